"""The search for placements: devices, mode and granularity of each stage of a workflow.

Pure computation on records of workflows and pools; executing a plan belongs to ``flow``, files to ``planner``. Begin
with ``search.py``, whose docstring has the model and the algorithm.
"""
