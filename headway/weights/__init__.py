"""Publishes versions of the weights: in a GPU's memory or in shared memory, through mirrors to other nodes.

The trainer publishes, replicas subscribe; every read is verified. Imports records, config, runtime and telemetry
alone; layout.py, device_memory.py, publication.py, staging.py and shared_memory.py need torch. Begin with
shared_memory.py, then deltas.py and mirrors.py.
"""
