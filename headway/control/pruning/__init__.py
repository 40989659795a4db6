"""The rules of early pruning: detectors of repetitive responses, length caps, audits, and the figures of pruners.

Pure functions of token ids, lengths and rewards; the orchestrator applies them. Begin with ``rules.py``.
"""
