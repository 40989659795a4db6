"""Everything that runs inside a sandbox: the zygote, the first process, and the runner for providers.

The package owns a sandbox's setup, its commands, files and snapshots, and the protocol with its owner. It may import
only the standard library and ``headway.sandbox.linux``, which is a security boundary. ``hosted_runner.py``,
``files.py`` and ``wire.py`` must run on Python 3.8. Begin reading with ``init.py``, then ``zygote.py``.
"""
