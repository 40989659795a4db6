"""Rollouts: makers of all kinds, environments, agents, tools, and the verifiers that score responses.

This package makes one rollout from its task to its verdict. It reaches the generator only through an injected
callable (`makers/turn_sampler.py:Generate`) and imports records, config, runtime, telemetry, tokens, tasks, sandbox,
and of `kernels` the torch-free client, prompts, rewards and tasks; never torch or the orchestrator. Begin with
`makers/select.py:make_rollouts`.
"""
