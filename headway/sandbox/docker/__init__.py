"""The backend that makes sandboxes in containers of a Docker daemon.

The package owns the containers, volumes and imported images of an owner, and their removal. It builds on ``local``,
whose sandbox and base class it uses. Only ``sandbox/backends.py`` and ``cli`` may import it, lazily, since it
needs aiodocker. Begin reading with ``backend.py``.
"""
