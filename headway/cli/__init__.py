"""The package `cli` is the `headway` command: options, the calls into other packages, and the printing of results.

It makes no decisions of its own. It may import every package, but only inside functions, so that a command loads what
it needs and ``--help`` stays fast. Errors become messages and exit codes in `main.py` alone. Begin reading with
`main.py`, then `training.py`, which has `headway train`.
"""
