"""Launchers that start the agents of a run's nodes: by ssh, by Slurm's srun, or as Ray actors.

The package owns starting an agent and restarting it with backoff; the agent's own connection to the run carries
everything else. It imports records, config and runtime, and Ray when a run uses it. Begin with ``agents.py``.
"""
