"""Transports of messages and weights between processes: their paths, and the packing of arrays and tensors.

Imports neither torch nor a package above runtime. Begin with paths.py.
"""
