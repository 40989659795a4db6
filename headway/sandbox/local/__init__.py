"""The backend that makes sandboxes on this machine from namespaces, with or without bubblewrap.

The package owns the owner's side: the zygote's handle, a sandbox's socket, the proxy for allowed hosts, and the base
class of backends on this machine. The other side is in ``guest``. Begin reading with ``backend.py``, then
``sandbox.py``.
"""
