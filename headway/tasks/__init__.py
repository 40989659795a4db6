"""Task sources: rows of files, data sets, generators and functions, read as tasks or as demonstrations for SFT.

The package owns the reading and checking of rows, and the resumable order in which tasks are drawn. It may import
tokens, and records, config, runtime and telemetry; it scores no response and runs no model. Begin reading with
``sources.py``, then ``cursor.py``.
"""
