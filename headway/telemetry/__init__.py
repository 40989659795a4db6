"""This package owns the ledger and its readers, the record of rollouts, metrics, the trace, and the exporters.
It may import `records`, `config` and `runtime`, and makes no decisions of a run. Begin with `ledger.py`.
"""
