"""The algorithms of a training step on CPU: advantages, sample layout, packing, importance masks, loss aggregation.

Everything is NumPy and pure but for users' hooks; the package imports records, config, runtime and telemetry alone,
never torch. Begin with ``samples.py`` for the batch's layout, ``advantages.py`` for the estimators and ``groups/`` for
finished groups.
"""
