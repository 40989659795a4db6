"""Opens the actors that a run needs beside trainer and generator, and changes their placement.

Hosts of agents, environments and outside workers, their sandboxes, the controller's process, the buffer's HTTP service.
Contains no loop of a run: it may use the orchestrator's context, not the loops. Begin with environments.py.
"""
