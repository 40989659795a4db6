"""Headway trains language models by reinforcement learning, with generation and training running asynchronously.

Users import from ``headway.api`` alone; the other packages may change between releases. ``docs/map.md`` has a line for
each module, and ``docs/design.md`` says which package may import which. Begin with ``orchestrator/train.py``, which
assembles a run.
"""
