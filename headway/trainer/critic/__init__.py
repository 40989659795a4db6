"""The critic: values of a batch's tokens, their training beside the policy, and its state.

The package owns the value head, its optimiser and the value loss. Advantages are made of values in
``algorithms/values.py``. Begin with ``critic.py``.
"""
