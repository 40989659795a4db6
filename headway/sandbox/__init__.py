"""Isolated execution of untrusted code: backends that make sandboxes, and the pool that leases them.

The package owns the Protocols, the backends (``local/``, ``docker/``, ``hosted/``), the processes inside a sandbox
(``guest/``, ``linux/``), root file systems (``images/``) and snapshots. It may import records, config, runtime and
telemetry. Begin reading with ``protocol.py``, then ``pool.py`` and ``local/backend.py``.
"""
