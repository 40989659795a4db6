"""The outcome of a finished group: filters, hooks, shaped rewards and the training batch.

The package owns the hooks' contracts and their checks. User code is called only through ``hooks.py``, which reports
violations as HookFailed; the rest is pure. Begin with ``filters.py``.
"""
