"""Exporters send ledger lines to trackers, Prometheus, callbacks of the user and receivers of alerts.
Each has its own thread, and may neither block nor fail a run. Begin with `exporters.py`.
"""
