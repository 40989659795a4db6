"""Teachers outside of the trainer: they score rollouts as these finish.

The package asks replicas and servers, checks their answers and stores them. It imports no torch. Begin with
``stage.py``.
"""
