"""Plays one episode of the user's environment before a run starts, in the process the run would use."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headway.config.schema import Experiment
from headway.orchestrator.preflight.findings import Findings
from headway.orchestrator.preflight.sandboxes import SANDBOXES
from headway.records.errors import ConfigurationError, HeadwayError
from headway.records.rollout import Failure
from headway.records.task import Task
from headway.rollout.hosting.service import scores_itself

_LIMIT_S = 30.0  # for the episode, its worker's start included


def may_reward(experiment: Experiment) -> bool:
    """Whether what makes the rollouts may say what they are worth: then tasks need no answer."""
    return experiment.environment.name != "single_turn" or experiment.hooks.rollout != "single_turn"


def rewards_itself(experiment: Experiment) -> bool:
    """Whether the environment has a `score` of its own; False where it can't be imported: reported elsewhere."""
    try:
        return scores_itself(experiment.environment)
    except ConfigurationError:
        return False


def episode_findings(experiment: Experiment, tasks: Sequence[Task] | None, known: Findings) -> Findings:
    """Findings of an episode of the first of ``tasks`` in which every answer is the reference one, or "?". None where
    the environment is not a class of the user's, or ``known`` ones refuse it."""
    findings = Findings()
    refused = any(finding.level == "error" and finding.key.startswith(("environment", "sandbox")) for finding in known)
    if refused or not tasks or ":" not in experiment.environment.name:
        return findings
    try:
        played = asyncio.run(_play(experiment, tasks[0]))
    except TimeoutError:
        findings.warning("environment", f"one episode of tasks.train wasn't over within {_LIMIT_S:g} s")
    except HeadwayError as error:
        findings.error("environment", f"one episode of tasks.train: {error}")
    else:
        if not isinstance(played, Failure):
            findings.info("environment", f"played 1 episode of tasks.train: {played}")
        elif played.infrastructure:
            findings.warning("environment", f"one episode of tasks.train failed: {played.cause}")
        else:
            findings.error("environment", f"one episode of tasks.train failed: {played.cause}")
    return findings


async def _play(experiment: Experiment, task: Task) -> str | Failure:
    """Play it and say what it came to. Raises TimeoutError, and HeadwayError where the worker fails."""
    from headway.rollout.hosting.client import EnvironmentPool
    from headway.runtime.clock import RealClock
    from headway.runtime.workers import LocalLauncher

    clock = RealClock()
    one = experiment.environment.model_copy(update={"workers": 1, "nodes": ()})
    pool = EnvironmentPool(LocalLauncher(clock), one, experiment.sandbox, clock, sandboxes=SANDBOXES)
    message, replies, rewards = {"role": "assistant", "content": task.answer or "?"}, 0, 0.0
    try:
        async with asyncio.timeout(_LIMIT_S):
            await pool.start()
            async with pool.seated("check") as lease:
                reply = await lease.begin(task, experiment.run.seed)
                while reply.asked is not None:
                    reply = await lease.reply(message, reply.asked.speaker, False)
                    replies, rewards = replies + 1, rewards + (reply.reward or 0.0)
                if reply.failure is not None:
                    return reply.failure
                scored = await lease.score()
    finally:
        await pool.stop()
    if scored.verdict is None:
        return f"reply x{replies}, no score, rewards of turns {rewards + (scored.reward or 0.0):g}"
    return scored.verdict.failure or f"reply x{replies}, score {scored.verdict.reward}"
