"""Scores some answers by the run's verifiers before its start, in the process that it would use."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from headway.config.schema import Experiment
from headway.orchestrator.preflight.demonstrations import DemonstratedTask, demonstrated, look_at_rewards
from headway.orchestrator.preflight.episode import rewards_itself
from headway.orchestrator.preflight.findings import Findings
from headway.orchestrator.preflight.references import LeftOut, prove_references, refused_sources
from headway.orchestrator.task_sets import may_reward, named_verifiers
from headway.records.errors import HeadwayError, RemoteError
from headway.records.rollout import Verdict
from headway.records.task import Task

_START_S = 60.0  # a verifier's imports may be heavy


def verifier_findings(experiment: Experiment, tasks: Mapping[str, Sequence[Task]], *, strict: bool = False) -> Findings:
    """Findings of the reference answer and a wrong one to one task of each split, of all references that can prove
    themselves, and of demonstrations where the verifier is the user's own; ``tasks``: by split. ``strict``: a reference
    that doesn't is an error, not only where they are more than 1 %."""
    findings = Findings()
    firsts: dict[tuple[str, str, str], Task] = {}  # (split, source, verifier) -> its first task
    for split, found in tasks.items():
        for task in found:
            firsts.setdefault((split, task.source, task.verifier), task)
    if not firsts:
        return findings
    asked = {name for _, _, name in firsts}
    for name in experiment.verifiers:
        if name not in asked:
            findings.warning(f"verifiers.{name}", "no task asks for it: its source or its row names it as 'verifier'")
    chosen = {
        "verifier": experiment.verifier,
        **{f"verifiers.{name}": one for name, one in experiment.verifiers.items()},
    }
    for key, verifier in chosen.items():
        if "think>" in str(verifier.parameters) and experiment.chats and not experiment.verifier.reasoning:
            what = "asks for marks of reasoning, which it isn't given where the chat template has them; valid:"
            findings.warning(f"{key}.parameters", f"{what} verifier.reasoning = true")
    alone, own = rewards_itself(experiment), experiment.verifier.name
    attempts, sure = demonstrated(experiment, tasks, "") if ":" in own and not alone else ([], False)
    attempts = [one for one in attempts if not one.task.verifier]
    try:
        verdicts, of_attempts, left_out = asyncio.run(_score(experiment, firsts, attempts, tasks))
    except TimeoutError:
        findings.error("verifier.name", f"{own!r} didn't start within {_START_S:g} s")
        return findings
    except RemoteError as error:  # the worker's own words, without the names of the process and the exception
        findings.error("verifier.name", error.error.partition("ConfigurationError: ")[2] or error.error)
        return findings
    except HeadwayError as error:
        findings.error("verifier.name" if asked <= {""} else "verifiers", str(error))
        return findings
    refused = refused_sources(left_out)
    for one in left_out:
        key = f"tasks.{one.split}"
        (findings.error if strict or (one.split, one.source) in refused else findings.warning)(
            key, one.line(getattr(experiment.tasks, one.split))
        )
    for (split, _), why in refused.items():
        findings.error(f"tasks.{split}", why)
    unproved = {(one.split, task.task_id) for one in left_out for task in one.tasks}
    told = all(verdict.failure is None for verdict in of_attempts) and look_at_rewards(
        "verifier.name", own, [verdict.reward for verdict in of_attempts], sure, findings
    )
    for (split, source, name), found in verdicts.items():
        key = f"tasks.{split}.verifier" if name else "verifier.name"
        several = len(getattr(experiment.tasks, split)) > 1
        whose = f"of {source} in tasks.{split}" if several else f"of tasks.{split}"
        broken = [verdict.failure for verdict in found if verdict.failure is not None]
        if (split, firsts[split, source, name].task_id) in unproved:
            continue  # said
        if broken and len(found) == 1 and may_reward(experiment):  # it may never be asked
            why = "; so do rollouts that nothing else rewards"
            if not alone:
                findings.info(key, f"fails on the first task {whose}: {broken[0].cause}{why}")
        elif broken:
            findings.error(key, f"fails on the first task {whose}: {broken[0].cause}")
        elif len(found) > 1 and not found[0].solved:
            alike = found[0].reward == found[1].reward and not alone and (name or not told)
            refuses = f"{name or own} doesn't accept the bare reference answer of the first task {whose}"
            if alike:
                refuses += f" and gives it what no answer gets, {found[1].reward:g}"
                findings.warning(key, f"{refuses}; fine if it wants more around it, else nothing earns a reward")
            else:
                findings.info(key, f"{refuses}; fine if it wants more around it")
    return findings


async def _score(
    experiment: Experiment,
    firsts: Mapping[tuple[str, str, str], Task],
    attempts: Sequence[DemonstratedTask],
    tasks: Mapping[str, Sequence[Task]],
) -> tuple[dict[tuple[str, str, str], list[Verdict]], list[Verdict], list[LeftOut]]:
    """Verdicts on the reference answer, where there is one, and an empty one to the tasks; on ``attempts``; what of all
    ``tasks`` doesn't prove itself."""
    from headway.rollout.verification.client import VerifierPool
    from headway.runtime.clock import RealClock
    from headway.runtime.workers import LocalLauncher

    clock = RealClock()
    one = experiment.verifier.model_copy(update={"workers": 1})
    named = named_verifiers(experiment, {"": firsts.values()})
    pool = VerifierPool(LocalLauncher(clock), one, clock, named=named, retries=0)
    try:
        async with asyncio.timeout(_START_S):
            await pool.start()
        verdicts: dict[tuple[str, str, str], list[Verdict]] = {}
        for place, task in firsts.items():
            responses = [task.answer, ""] if task.answer else [""]
            verdicts[place] = await pool.verify(task, responses)
        last = [await pool.verify(one.task, [one.answers[-1]["content"]]) for one in attempts]
        return verdicts, [verdict for (verdict,) in last], await prove_references(experiment, tasks, pool)
    finally:
        await pool.stop()
