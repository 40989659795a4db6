"""Plays episodes of the user's environment before a run starts, in the process the run would use."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from headway.config.schema import Experiment
from headway.orchestrator.preflight.demonstrations import DemonstratedTask, answer_of, demonstrated, look_at_rewards
from headway.orchestrator.preflight.findings import Findings
from headway.orchestrator.preflight.sandboxes import SANDBOXES, uses_sandboxes
from headway.records.errors import ConfigurationError, HeadwayError
from headway.records.rollout import Failure, Verdict
from headway.records.task import Task
from headway.rollout.hosting.service import scores_itself
from headway.runtime.hooks import shown

if TYPE_CHECKING:
    from headway.rollout.hosting.client import EnvironmentPool

_LIMIT_S = 30.0  # for the episode, its worker's start included; for the others together
_Ended = Failure | Verdict | str  # a text: the environment gives no score


def rewards_itself(experiment: Experiment) -> bool:
    """Whether the environment has a `score` of its own; False where it can't be imported: reported elsewhere."""
    try:
        return scores_itself(experiment.environment)
    except ConfigurationError:
        return False


def episode_findings(experiment: Experiment, tasks: Mapping[str, Sequence[Task]], known: Findings) -> Findings:
    """Findings of an episode of the first of the training ``tasks`` (by split), with the answers of a demonstration of
    sft.data, else the reference answer, or "?"; and of the rewards of others, if the environment gives them. None where
    it is not a class of the user's, or ``known`` ones refuse it."""
    findings = Findings()
    refused = any(finding.level == "error" and finding.key.startswith(("environment", "sandbox")) for finding in known)
    if refused or not tasks.get("train") or ":" not in experiment.environment.name:
        return findings
    (attempts, sure), first = demonstrated(experiment, tasks, "?"), tasks["train"][0]
    told = attempts[0] if attempts else DemonstratedTask(task=first, answers=(answer_of(first.answer or "?"),))
    judges = rewards_itself(experiment) and not uses_sandboxes(experiment)  # a sandbox for each would take long
    others, what = attempts if judges else [], "of tasks.train"
    if attempts:
        what = "by a demonstration of sft.data"
    try:
        played, rewards = asyncio.run(_play_all(experiment, told, others))
    except TimeoutError:
        findings.warning("environment", f"one episode {what} wasn't over within {_LIMIT_S:g} s")
    except HeadwayError as error:
        findings.error("environment", f"one episode {what}: {error}")
    else:
        if isinstance(played, str):
            say = findings.warning if "a tool told" in played else findings.info
            say("environment", f"played 1 episode {what}: {played}")
            if len(rewards) == len(others):
                look_at_rewards("environment.name", f"{experiment.environment.name}.score", rewards, sure, findings)
        elif played.infrastructure:
            findings.warning("environment", f"one episode {what} failed: {played.cause}")
        else:
            findings.error("environment", f"one episode {what} failed: {played.cause}")
    return findings


async def _play_all(
    experiment: Experiment, told: DemonstratedTask, others: Sequence[DemonstratedTask]
) -> tuple[str | Failure, list[float]]:
    """Play ``told`` and say what it came to; then the ``others`` at once: the rewards of those that got one, if all
    ended in time. Raises TimeoutError, and HeadwayError where the worker fails."""
    from headway.rollout.hosting.client import EnvironmentPool
    from headway.runtime.clock import RealClock
    from headway.runtime.workers import LocalLauncher

    clock = RealClock()
    one = experiment.environment.model_copy(update={"workers": 1, "nodes": ()})
    pool = EnvironmentPool(LocalLauncher(clock), one, experiment.sandbox, clock, sandboxes=SANDBOXES)
    seed, rewards = experiment.run.seed, list[float]()
    try:
        async with asyncio.timeout(_LIMIT_S):
            await pool.start()
            replies, ended = await _play(pool, "check", told, seed)
        with suppress(TimeoutError):
            async with asyncio.timeout(_LIMIT_S):
                playing = (_play(pool, f"check-{number}", one, seed) for number, one in enumerate(others))
                rest = await asyncio.gather(*playing, return_exceptions=True)
                rewards = [one[1].reward for one in rest if isinstance(one, tuple) and isinstance(one[1], Verdict)]
    finally:
        await pool.stop()
    if isinstance(ended, Failure):
        return ended, rewards
    return f"{replies}, {ended if isinstance(ended, str) else f'score {ended.reward:.3g}'}", rewards


async def _play(pool: EnvironmentPool, name: str, attempt: DemonstratedTask, seed: int) -> tuple[str, _Ended]:
    """Play an attempt, with its last answer again and again; returns the replies, with the first error of a tool, and
    how it ended."""
    replies, rewards, answers, wrong = 0, 0.0, attempt.answers, ""
    async with pool.seated(name) as lease:
        reply = await lease.begin(attempt.task, seed)
        while reply.asked is not None:
            reply = await lease.reply(answers[min(replies, len(answers) - 1)], reply.asked.speaker, False)
            replies, rewards = replies + 1, rewards + (reply.reward or 0.0)
            for said in reply.asked.said if reply.asked is not None else ():
                if not wrong and said.get("role") == "tool" and str(said["content"]).startswith("error: "):
                    wrong = f" (a tool told {shown(said['content'])})"
        what = f"reply x{replies}{wrong}"
        if reply.failure is not None:
            return what, reply.failure
        scored = await lease.score()
    if scored.verdict is None:
        return what, f"no score, rewards of turns {rewards + (scored.reward or 0.0):g}"
    return what, scored.verdict.failure or scored.verdict
