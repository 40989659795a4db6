"""This package describes plans: a run's plan and placements with their outcomes, and the steps of workflows.

It only reads records, ledgers and workflow files; plans are made in `planner`. Begin with ``run_plan.py``.
"""
