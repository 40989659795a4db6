"""Processes and their environment: clock, workers and their supervision, links, queues, devices, the run directory.

The package owns how a process is started, called, watched and ended, on this machine or a node, and the epoch of a run
(``epochs``). It imports records and config alone, and knows nothing of training. Begin with ``workers.py`` for the
worker interface, ``link.py`` and ``framing.py`` for the connection below it, and ``clock.py`` for virtual time.
"""
