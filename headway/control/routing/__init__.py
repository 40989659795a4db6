"""The routing decisions of the generator: the replica of a request, and rate limits of external callers.

Pure state machines with ``now`` as an argument; requests are sent by ``generator``. Begin with ``replicas.py``.
"""
