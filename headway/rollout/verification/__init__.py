"""Verifiers: scorers of responses by name or by a user's function, and the pool of processes that run them.

`verifiers.py` resolves names to scorers, `service.py` is the worker with a watchdog for hangs, `client.py` the pool. A
verifier's exception becomes a failed verdict, never a reward. Begin with `verifiers.py`.
"""
