"""Checks a run before it starts: finds problems, sizes the memory, calibrates the workers and forecasts the rates.

Its checks return findings and change nothing in the run's folder; the calibration trains in memory alone. Some checks
are part of every run's start as well (logprob_agreement.py, references.py). Begin with check.py, then preview.py.
"""
