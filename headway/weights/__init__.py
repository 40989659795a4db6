"""Publishes versions of the weights: through shared memory on one machine, through mirrors to other nodes.

The trainer publishes, replicas subscribe; every read is verified. Imports records, config, runtime and telemetry
alone; shared_memory.py is the only file that needs torch. Begin with shared_memory.py, then mirrors.py.
"""
