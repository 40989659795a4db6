"""The durable, bounded buffer of groups between rollouts and trainer, the batch log, and its copy on another machine.

The package owns ``RUN/buffer.db``: the lifecycle of groups, partial rollouts, batches, the audit. It
imports records, config, runtime, telemetry, control and algorithms alone, and loads no torch. Begin with ``store.py``.
"""
