"""Watches a run while it trains: stalled waits, a blocked event loop, and the rules of alerts.

It records events in the ledger and may restart a worker or end the run, as ``run.on_stall`` demands; the rules are in
control/stalls.py and control/alerts.py. Begin with watch.py.
"""
