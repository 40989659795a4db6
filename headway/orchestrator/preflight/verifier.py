"""Scores some answers by the run's verifiers before its start, in the process that it would use."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from headway.config.schema import Experiment
from headway.orchestrator.preflight.demonstrations import DemonstratedTask, check_rewards, make_attempts
from headway.orchestrator.preflight.episode import rewards_itself
from headway.orchestrator.preflight.references import LeftOut, prove_references, refused_sources
from headway.orchestrator.task_sets import named_verifiers, rollouts_may_reward
from headway.records.check_report import Findings
from headway.records.errors import HeadwayError, RemoteError
from headway.records.rollout import Verdict
from headway.records.task import Task

_START_S = 60.0  # a verifier's imports may be heavy


def verifier_findings(experiment: Experiment, tasks: Mapping[str, Sequence[Task]], *, strict: bool = False) -> Findings:
    """Check the verifiers on answers to ``tasks`` (by split). They score the reference answer and a wrong one to one
    task of each split, all references that can prove themselves, and demonstrations where the verifier is the user's
    own. ``strict``: a reference that doesn't prove itself is an error, not only where they are more than 1 %."""
    findings = Findings()
    first_tasks: dict[tuple[str, str, str], Task] = {}  # (split, source, verifier) -> its first task
    for split, split_tasks in tasks.items():
        for task in split_tasks:
            first_tasks.setdefault((split, task.source, task.verifier), task)
    if not first_tasks:
        return findings
    used_names = {name for _, _, name in first_tasks}
    for name in experiment.verifiers:
        if name not in used_names:
            findings.warning(f"verifiers.{name}", "no task uses it: a source or a row must name it as 'verifier'")
    settings_by_key = {
        "verifier": experiment.verifier,
        **{f"verifiers.{name}": settings for name, settings in experiment.verifiers.items()},
    }
    for key, verifier in settings_by_key.items():
        if "think>" in str(verifier.parameters) and experiment.uses_chat and not experiment.verifier.reasoning:
            problem_text = "asks for marks of reasoning, which it isn't given where the chat template has them; valid:"
            findings.warning(f"{key}.parameters", f"{problem_text} verifier.reasoning = true")
    is_self_scored, default_name = rewards_itself(experiment), experiment.verifier.name
    is_users = ":" in default_name and not is_self_scored
    attempts, fully_known = make_attempts(experiment, tasks, "") if is_users else ([], False)
    attempts = [attempt for attempt in attempts if not attempt.task.verifier]
    try:
        verdicts, attempt_verdicts, left_out = asyncio.run(_score(experiment, first_tasks, attempts, tasks))
    except TimeoutError:
        findings.error("verifier.name", f"{default_name!r} didn't start within {_START_S:g} s")
        return findings
    except RemoteError as error:  # the worker's message, without the names of the process and the exception
        findings.error("verifier.name", error.error.partition("ConfigurationError: ")[2] or error.error)
        return findings
    except HeadwayError as error:
        findings.error("verifier.name" if used_names <= {""} else "verifiers", str(error))
        return findings
    refused_reasons = refused_sources(left_out)
    for exclusion in left_out:
        split, sources = exclusion.split, getattr(experiment.tasks, exclusion.split)
        add_finding = findings.error if strict or (split, exclusion.source) in refused_reasons else findings.warning
        add_finding(f"tasks.{split}", exclusion.line(sources))
    for (split, _), reason in refused_reasons.items():
        findings.error(f"tasks.{split}", reason)
    unproved_tasks = {(exclusion.split, task.task_id) for exclusion in left_out for task in exclusion.tasks}
    is_compared = all(verdict.failure is None for verdict in attempt_verdicts) and check_rewards(
        "verifier.name", default_name, [verdict.reward for verdict in attempt_verdicts], fully_known, findings
    )
    for (split, source, name), source_verdicts in verdicts.items():
        key = f"tasks.{split}.verifier" if name else "verifier.name"
        has_several = len(getattr(experiment.tasks, split)) > 1
        tasks_text = f"of {source} in tasks.{split}" if has_several else f"of tasks.{split}"
        failures = [verdict.failure for verdict in source_verdicts if verdict.failure is not None]
        if (split, first_tasks[split, source, name].task_id) in unproved_tasks:
            continue  # reported
        if failures and len(source_verdicts) == 1 and rollouts_may_reward(experiment):  # it may never be called
            reason = "; so do rollouts that nothing else rewards"
            if not is_self_scored:
                findings.info(key, f"fails on the first task {tasks_text}: {failures[0].cause}{reason}")
        elif failures:
            findings.error(key, f"fails on the first task {tasks_text}: {failures[0].cause}")
        elif len(source_verdicts) > 1 and not source_verdicts[0].solved:
            answer_reward, empty_reward = (verdict.reward for verdict in source_verdicts[:2])
            is_equal = answer_reward == empty_reward and not is_self_scored and (name or not is_compared)
            message = f"{name or default_name} doesn't accept the bare reference answer of the first task {tasks_text}"
            if is_equal:
                message += f" and gives it what no answer gets, {empty_reward:g}"
                findings.warning(key, f"{message}; fine if it needs more around it, else no answer earns a reward")
            else:
                findings.info(key, f"{message}; fine if it needs more around it")
    return findings


async def _score(
    experiment: Experiment,
    first_tasks: Mapping[tuple[str, str, str], Task],
    attempts: Sequence[DemonstratedTask],
    tasks: Mapping[str, Sequence[Task]],
) -> tuple[dict[tuple[str, str, str], list[Verdict]], list[Verdict], list[LeftOut]]:
    """Score the reference answer, where there is one, and an empty one to each of the ``first_tasks``. Also scores the
    ``attempts``. Returns both lists of verdicts, and the groups of ``tasks`` that don't prove themselves."""
    from headway.rollout.verification.client import VerifierPool
    from headway.runtime.clock import RealClock
    from headway.runtime.workers import LocalLauncher

    clock = RealClock()
    settings = experiment.verifier.model_copy(update={"workers": 1})
    named_settings = named_verifiers(experiment, {"": first_tasks.values()})
    pool = VerifierPool(LocalLauncher(clock), settings, clock, named=named_settings, retries=0)
    try:
        async with asyncio.timeout(_START_S):
            await pool.start()
        verdicts: dict[tuple[str, str, str], list[Verdict]] = {}
        for task_key, task in first_tasks.items():
            responses = [task.answer, ""] if task.answer else [""]
            verdicts[task_key] = await pool.verify(task, responses)
        answer_verdicts = [await pool.verify(attempt.task, [attempt.answers[-1]["content"]]) for attempt in attempts]
        return verdicts, [verdict for (verdict,) in answer_verdicts], await prove_references(experiment, tasks, pool)
    finally:
        await pool.stop()
