"""The backend whose sandboxes run at a provider: E2B, Modal or Prime Intellect.

The package owns the adapters to the providers' SDKs and the requests to the runner inside a sandbox. It may not import
an SDK before its adapter is made, since SDKs are optional. Begin reading with ``provider.py``, then ``backend.py``.
"""
