"""This package compares several runs: their list, the differences of their configurations, and common axes.

It reads ledgers and configurations; the list also reads locks, epochs, the best evaluation and sizes on disk. Begin
with ``run_list.py``, which is `headway runs`.
"""
