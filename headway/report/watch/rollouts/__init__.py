"""This package searches and describes the recorded rollouts of a run for `headway watch`.

It reads the rollout record (``telemetry/rollouts``), and writes only the caches of columns and texts. It never loads a
tokenizer: the service passes a `TokenTable`. Begin with ``watched_rollouts.py``.
"""
