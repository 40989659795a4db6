"""Adds up the streams of a step's loss (`algorithms/streams.py`) from per-token losses of a micro-batch.

The package knows rules, tokens and weights; it runs no model. Begin with ``losses.py``.
"""
