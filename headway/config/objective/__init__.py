"""The objective of a run: parameters of losses and advantages, and the rules of its task sources.

The package knows keys and their merging, and computes nothing. Begin with ``rules.py``.
"""
