"""This package compares several runs: their list, the differences of their configurations, and common axes.

It reads ledgers and configurations only. Begin with ``listing.py``, which is `headway runs`.
"""
