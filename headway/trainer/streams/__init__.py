"""The streams of a step's loss (`algorithms/streams.py`): the losses of a micro-batch's tokens, and their sum.

The package has models compute through their interface, and neither loads nor updates any. Begin with ``losses.py``.
"""
