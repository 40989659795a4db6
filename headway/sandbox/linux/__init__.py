"""Bindings to the Linux kernel: system calls, control groups and the filter of system calls.

The package runs in sandboxes and in their owners. It may import only the standard library, which is a security
boundary. Begin reading with ``kernel.py``.
"""
