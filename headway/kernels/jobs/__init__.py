"""This package implements `headway kernels`: evaluation and scoring of answers, task files, and data for SFT.
It evaluates through a client of kernel services or this machine's evaluator, and runs no candidate itself. Begin
with `evaluate.py`.
"""
