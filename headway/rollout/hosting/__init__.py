"""Processes that host environments, agents and tool servers, and the orchestrator's handles on them.

`service.py` is the worker that runs environments, `client.py` the pool of these workers with leases, restarts and
deaths. The pool of sandboxes belongs to the orchestrator, which this package may not import: a worker gets the name of
the function that makes one. Begin with `client.py`.
"""
