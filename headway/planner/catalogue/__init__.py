"""The catalogues of devices, machines, prices and published runs, as TOML files with a source and a date each entry.

The package owns reading and overriding them; it computes nothing. It imports records, config and control alone. Begin
with ``read.py``.
"""
