"""This package runs inside sandboxes, in the process of an untrusted reference or candidate.
It may import the standard library, preloaded torch and triton, and of `sandbox` the wire format and the system call
filters. The evaluator trusts nothing that it reports. Begin with `program.py`.
"""
