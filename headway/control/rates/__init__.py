"""Roofline models of generation and training: seconds and memory of a step from figures of model and device.

Pure arithmetic without measurements; catalogues of devices and prices belong to ``planner``. Begin with ``specs.py``.
"""
