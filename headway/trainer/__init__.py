"""This package owns losses, the optimiser, data-parallel ranks, reference log-probabilities and checkpoints.
It may import the base packages, `algorithms`, `models`, `tokens` and `weights`. `service.py` is the process of a
rank, `client.py` its torch-free handle, and `fake.py` the stand-in for tests and simulation. Begin with `policy.py`.
"""
