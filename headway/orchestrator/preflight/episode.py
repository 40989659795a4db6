"""Plays episodes of the user's environment before a run starts, in the process that the run would use."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from headway.config.schema import Experiment
from headway.orchestrator.preflight.demonstrations import DemonstratedTask, answer_of, check_rewards, make_attempts
from headway.orchestrator.preflight.sandboxes import SANDBOXES, uses_sandboxes
from headway.records.check_report import Findings
from headway.records.errors import ConfigurationError, HeadwayError
from headway.records.rollout import Failure, Verdict
from headway.records.task import Task
from headway.rollout.hosting.service import scores_itself
from headway.runtime.hooks import quoted

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
    """Play an episode of the first training task, and check its outcome and the rewards of other attempts. ``tasks``:
    by split. The answers are those of a demonstration of sft.data, else the reference answer, or "?"; rewards are
    checked if the environment gives them. No findings where the environment is not a class of the user's, or ``known``
    findings refuse it."""
    findings = Findings()
    broken = any(finding.level == "error" and finding.key.startswith(("environment", "sandbox")) for finding in known)
    if broken or not tasks.get("train") or ":" not in experiment.environment.name:
        return findings
    (attempts, fully_known), first = make_attempts(experiment, tasks, "?"), tasks["train"][0]
    attempt = attempts[0] if attempts else DemonstratedTask(task=first, answers=(answer_of(first.answer or "?"),))
    judges = rewards_itself(experiment) and not uses_sandboxes(experiment)  # a sandbox for each would take long
    other_attempts, origin_text = attempts if judges else [], "of tasks.train"
    if attempts:
        origin_text = "by a demonstration of sft.data"
    try:
        outcome, rewards = asyncio.run(_play_all(experiment, attempt, other_attempts))
    except TimeoutError:
        findings.warning("environment", f"one episode {origin_text} didn't end within {_LIMIT_S:g} s")
    except HeadwayError as error:
        findings.error("environment", f"one episode {origin_text}: {error}")
    else:
        if isinstance(outcome, str):
            add_finding = findings.warning if "a tool replied" in outcome else findings.info
            add_finding("environment", f"played 1 episode {origin_text}: {outcome}")
            if len(rewards) == len(other_attempts):
                score_name = f"{experiment.environment.name}.score"
                check_rewards("environment.name", score_name, rewards, fully_known, findings)
        elif outcome.infrastructure:
            findings.warning("environment", f"one episode {origin_text} failed: {outcome.cause}")
        else:
            findings.error("environment", f"one episode {origin_text} failed: {outcome.cause}")
    return findings


async def _play_all(
    experiment: Experiment, attempt: DemonstratedTask, others: Sequence[DemonstratedTask]
) -> tuple[str | Failure, list[float]]:
    """Play ``attempt``, then the ``others`` at once; returns the first one's outcome and the rewards of the others.
    Only those that got a reward are in the list, which is empty unless all ended in time. Raises TimeoutError, and
    HeadwayError where the worker fails."""
    from headway.rollout.hosting.client import EnvironmentPool
    from headway.runtime.clock import RealClock
    from headway.runtime.workers import LocalLauncher

    clock = RealClock()
    settings = experiment.environment.model_copy(update={"workers": 1, "nodes": ()})
    pool = EnvironmentPool(LocalLauncher(clock), settings, experiment.sandbox, clock, sandboxes=SANDBOXES)
    seed, rewards = experiment.run.seed, list[float]()
    try:
        async with asyncio.timeout(_LIMIT_S):
            await pool.start()
            replies, ending = await _play(pool, "check", attempt, seed)
        with suppress(TimeoutError):
            async with asyncio.timeout(_LIMIT_S):
                episodes = (_play(pool, f"check-{number}", other, seed) for number, other in enumerate(others))
                outcomes = await asyncio.gather(*episodes, return_exceptions=True)
                rewards = [o[1].reward for o in outcomes if isinstance(o, tuple) and isinstance(o[1], Verdict)]
    finally:
        await pool.stop()
    if isinstance(ending, Failure):
        return ending, rewards
    return f"{replies}, {ending if isinstance(ending, str) else f'score {ending.reward:.3g}'}", rewards


async def _play(pool: EnvironmentPool, name: str, attempt: DemonstratedTask, seed: int) -> tuple[str, _Ended]:
    """Play an attempt, repeating its last answer; returns a summary of the replies, and the ending. The summary has the
    first error of a tool."""
    replies, rewards, answers, tool_error = 0, 0.0, attempt.answers, ""
    async with pool.lease(name) as lease:
        reply = await lease.begin(attempt.task, seed)
        while reply.asked is not None:
            reply = await lease.reply(answers[min(replies, len(answers) - 1)], reply.asked.speaker, False)
            replies, rewards = replies + 1, rewards + (reply.reward or 0.0)
            for message in reply.asked.messages if reply.asked is not None else ():
                if not tool_error and message.get("role") == "tool" and str(message["content"]).startswith("error: "):
                    tool_error = f" (a tool replied {quoted(message['content'])})"
        summary = f"reply x{replies}{tool_error}"
        if reply.failure is not None:
            return summary, reply.failure
        score = await lease.score()
    if score.verdict is None:
        return summary, f"no score, rewards of turns {rewards + (score.reward or 0.0):g}"
    return summary, score.verdict.failure or score.verdict
