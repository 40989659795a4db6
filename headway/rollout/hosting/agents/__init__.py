"""Processes of agents: a host that forks them, their logs, and the orchestrator's client for the host.

Each agent has a process group of its own and outlives neither its rollout nor the orchestrator. Agents reach the policy
over HTTP alone, so nothing here sees tokens. Begin with `processes.py`; `host.py` describes the protocol.
"""
