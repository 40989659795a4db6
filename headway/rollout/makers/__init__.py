"""Makers of rollouts: single turns, a user's function, environments, agents and outside workers.

A maker samples through `TurnSampler` alone, which parks, resumes and retries model calls; whether a parked member may
resume is decided by the orchestrator, at an injected gate. Begin with `turn_sampler.py`, then read `attempts.py`, the
base of all makers with several turns.
"""
