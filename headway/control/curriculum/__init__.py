"""The curriculum over tasks: which task is drawn next, and the size of its group.

Decisions depend on counts of solved attempts alone, not on time or on the interleaving of events. Pure; it may import
records and config. Begin with ``curriculum.py``.
"""
