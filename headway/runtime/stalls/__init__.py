"""Observation of waiting: the register of open waits, stacks of threads and tasks, and counts of collectives.

The package collects the facts; `control/stalls.py` decides which wait is a stall. It imports records alone, and runs in
the orchestrator and in every worker. Begin with ``waits.py``.
"""
