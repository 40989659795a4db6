"""The decisions of a run as pure functions and state machines: admission, staleness, accounting, stalls, device locks.

No task, client, clock or I/O is used; the time ``now`` is an argument, so the planner simulates the same decisions. The
package imports records and config alone, never torch. Begin with ``admission.py`` and ``staleness.py``.
"""
