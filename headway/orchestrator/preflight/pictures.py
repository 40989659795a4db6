"""Sizes of prompts with pictures, before the start: some of them are made."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from headway.config.schema import Experiment
from headway.models.hub.prompts import Pictures
from headway.orchestrator.preflight.findings import Findings
from headway.orchestrator.preflight.memory import gibibytes, uncovered_groups
from headway.records.task import Task
from headway.runtime.clock import RealClock
from headway.runtime.scratch import ScratchFolder
from headway.runtime.workers import LocalLauncher

_TRIED = 4  # tasks of each split whose prompts are made


def picture_findings(experiment: Experiment, sets: Mapping[str, Sequence[Task]]) -> Findings:
    """Make the prompts of some tasks by the run's own process; their sizes, and what is wrong with them."""
    findings = Findings()
    seen = {split: [task for task in tasks if task.pictures] for split, tasks in sets.items()}
    tried = [task for tasks in seen.values() for task in tasks[:_TRIED]]
    if not tried:
        return findings
    with findings.refused("model.path"), ScratchFolder("headway-check-") as folder:
        run = experiment.run.model_copy(update={"directory": str(folder)})
        sizes = asyncio.run(_sizes(experiment.model_copy(update={"run": run}), tried))
        tokens, each = max(tokens for tokens, _ in sizes), sum(size for _, size in sizes) // len(sizes)
        queue = experiment.queue
        groups = uncovered_groups(experiment) + queue.groups_per_step * (queue.budget + 1)
        groups = min(groups, len(seen.get("train", ())))
        held = sum(len(tasks) for split, tasks in seen.items() if split != "train")
        findings.info(
            "tasks",
            f"pixel arrays take {each:,} bytes a prompt ({len(sizes)} tried, of at most {tokens:,} tokens): up to "
            f"{gibibytes(each * groups)} for groups, {gibibytes(each * held)} for evaluations till the run's end",
        )
        if tokens > (limit := experiment.rollout.max_prompt_tokens):
            findings.error("rollout.max_prompt_tokens", f"a prompt with pictures has {tokens:,} tokens, over {limit}")
    return findings


async def _sizes(experiment: Experiment, tasks: Sequence[Task]) -> list[tuple[int, int]]:
    """Tokens and bytes of pixel arrays of these tasks' prompts."""
    pictures = Pictures(LocalLauncher(clock := RealClock()), clock, experiment)
    try:
        return [(len(ids), size) for _, ids, size in [await pictures.prompt(task, hold=True) for task in tasks]]
    finally:
        await pictures.stop()
