"""Opens a run's machines: the nodes that it awaits, the devices placed on them, the files that their workers read.

The connections to nodes and their agents belong to runtime/nodes; here is only what a run decides about them.
Begin with machines.py.
"""
