"""Implements the jobs beside a training run: evaluation of a model, SFT, model cards, explanations of the curriculum.

Each is one call that starts its own workers, or reads a run's folder; none of them trains by the four loops.
Begin with evaluate.py.
"""
