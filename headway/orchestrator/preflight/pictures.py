"""Checks the sizes of prompts with pictures, before the start, on some that it makes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from headway.config.schema import Experiment
from headway.models.hf.pixels import CACHED
from headway.models.hf.prompts import PictureClient
from headway.orchestrator.preflight.capacity import gibibytes
from headway.orchestrator.preflight.memory import uncovered_groups
from headway.records.check_report import Findings
from headway.records.task import Task
from headway.runtime.clock import RealClock
from headway.runtime.scratch import ScratchFolder
from headway.runtime.workers import LocalLauncher

_TRIED = 4  # tasks of each split whose prompts are made
_LIMIT_S = 120.0  # for all of them, the start of the process included


def picture_findings(experiment: Experiment, sets: Mapping[str, Sequence[Task]]) -> Findings:
    """Make the prompts of some tasks in the run's own process; report their sizes and problems."""
    findings = Findings()
    pictured_tasks = {split: [task for task in tasks if task.pictures] for split, tasks in sets.items()}
    tried_tasks = [task for tasks in pictured_tasks.values() for task in tasks[:_TRIED]]
    if not tried_tasks:
        return findings
    with findings.refused("model.path"), ScratchFolder("headway-check-") as folder:
        run_settings = experiment.run.model_copy(update={"directory": str(folder)})
        try:
            prompts = asyncio.run(_make_prompts(experiment.model_copy(update={"run": run_settings}), tried_tasks))
        except TimeoutError:
            findings.warning("tasks", f"{len(tried_tasks)} prompts with pictures weren't made within {_LIMIT_S:g} s")
            return findings
        sizes = [(len(ids), nbytes) for task, ids, nbytes in prompts if not task.unshown]
        if refusals := [task.unshown for task, _, _ in prompts if task.unshown]:
            add = findings.warning if sizes else findings.error
            add("tasks", f"{len(refusals)} of {len(prompts)} prompts tried would fail their groups: {refusals[0]}")
        if not sizes:
            return findings
        tokens, each = max(tokens for tokens, _ in sizes), sum(nbytes for _, nbytes in sizes) // len(sizes)
        queue = experiment.queue
        groups = uncovered_groups(experiment) + queue.groups_per_step * (queue.budget + 1)
        groups = min(groups, len(pictured_tasks.get("train", ())))
        held = sum(len(tasks) for split, tasks in pictured_tasks.items() if split != "train")
        cache_text = gibibytes(each * min(CACHED, groups + held))
        findings.info(
            "tasks",
            f"pixel arrays take {each:,} bytes a prompt ({len(sizes)} tried, of at most {tokens:,} tokens): up to "
            f"{gibibytes(each * groups)} for groups, {gibibytes(each * held)} for evaluations till the run's end; each "
            f"replica and trainer keeps up to {cache_text} in memory",
        )
        if tokens > (limit := experiment.rollout.max_prompt_tokens):
            findings.error("rollout.max_prompt_tokens", f"a prompt with pictures has {tokens:,} tokens, over {limit}")
    return findings


async def _make_prompts(experiment: Experiment, tasks: Sequence[Task]) -> list[tuple[Task, Any, int]]:
    """Make these tasks' prompts. Raises TimeoutError, and as `PictureClient.prompt`."""
    pictures = PictureClient(LocalLauncher(clock := RealClock()), clock, experiment)
    try:
        async with asyncio.timeout(_LIMIT_S):
            return [await pictures.prompt(task, hold=False) for task in tasks]
    finally:
        await pictures.stop()
