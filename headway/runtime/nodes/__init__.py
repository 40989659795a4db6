"""The other machines of a run: agents, their authenticated and encrypted connections, and launching workers on them.

The package owns the handshake with the run's key, health checks of nodes, their conditions, and the cache of model
files. It imports records, config and the rest of runtime alone. Begin with ``nodes.py`` on the orchestrator's machine
and ``agent.py`` on a node.
"""
