"""The package `flow` runs users' own workflows: workers in processes, groups, channels, and plans of devices.

It also owns the links between these processes, and turns on shared devices, which RL runs use too (`device_locks.py`).
It may import records, config, runtime, telemetry and control, whose pure decisions it carries out. Begin reading with
`run.py`, then `worker.py` and `channel.py`.
"""
