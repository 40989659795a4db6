"""Demonstrations of ``sft.data`` as attempts that a check plays and scores before the start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from headway.config.schema import Experiment
from headway.orchestrator.preflight.findings import Findings
from headway.records.errors import ConfigurationError
from headway.records.task import Task
from headway.tasks.demonstrations import Pair, read_demonstrations

_MOST = 64  # demonstrations that are tried: where one in ten earns something, one of so many nearly always does
_FEW = 8  # attempts of which less conclude nothing; reference answers that are tried


@dataclass(frozen=True, kw_only=True)
class DemonstratedTask:
    """Answers to a task: messages, as in OpenAI's chat API, at least one."""

    task: Task
    answers: tuple[dict[str, Any], ...]


def answer_of(text: str) -> dict[str, Any]:
    """An answer as a message."""
    return {"role": "assistant", "content": text}


def demonstrated(
    experiment: Experiment, tasks: Mapping[str, Sequence[Task]], nothing: str
) -> tuple[list[DemonstratedTask], bool]:
    """Attempts with the answers of the first demonstrations of ``sft.data``, if that is a file, each at the one of
    ``tasks`` (by split) with its prompt, or else at a task of that alone; then some reference answers, and at last
    ``nothing``. And whether each demonstration's task is known whole. None where there are no demonstrations, or they
    can't be read, which `headway sft` says; those with calls of tools are left out. Where tasks have more than prompt
    and answer, one whose task isn't known is no attempt but for the first, which is then at a training task."""
    source, train, attempts, sure = experiment.sft.data, tasks["train"], list[DemonstratedTask](), True
    known, several = dict[str, Task](), set[str]()
    for task in (one for found in tasks.values() for one in found):
        if known.setdefault(task.prompt, task).task_id != task.task_id:
            several.add(task.prompt)  # which of them a demonstration is of can't be told
    known = {prompt: task for prompt, task in known.items() if prompt not in several}
    more, bare = any(one.metadata for one in train), not any(one.answer or one.metadata for one in train)
    try:
        for where, row in islice(read_demonstrations(source), _MOST) if source and source.source == "jsonl" else ():
            pair = isinstance(row, Pair)
            messages = ({"role": "user", "content": row.prompt}, answer_of(row.solution)) if pair else row.messages
            answers = tuple(one for one in messages if one["role"] == "assistant")
            if not answers or any(one.get("tool_calls") for one in answers):
                continue
            prompt = next((one["content"] for one in messages if one["role"] == "user"), "")
            sure = sure and (bare or prompt in known)
            if prompt in known or not more or not attempts:
                unknown = train[0] if more else Task(task_id=where, prompt=prompt)
                attempts.append(DemonstratedTask(task=known.get(prompt, unknown), answers=answers))
    except ConfigurationError:
        return [], False
    if attempts:
        told = [one for one in train[:_FEW] if one.answer and (sure or not more)]
        attempts += [DemonstratedTask(task=one, answers=(answer_of(one.answer),)) for one in told]
        attempts.append(DemonstratedTask(task=attempts[0].task, answers=(answer_of(nothing),)))
    return attempts, sure


def look_at_rewards(key: str, function: str, rewards: Sequence[float], sure: bool, findings: Findings) -> bool:
    """Add a finding where ``function`` gave all attempts of `demonstrated` one reward, ``rewards``: an error where they
    are many and to their own tasks (``sure``), else a warning. Returns whether they were enough to tell."""
    count, alike = len(rewards) - 1, len({*rewards}) <= 1
    if alike and count >= _FEW:
        by = "by the answers in sft.data" + ("" if sure else ", to tasks that may lack what it needs")
        found = f"{function} gives {count} attempts, {by}, the reward {rewards[0]:g}, and one without content as well"
        add = findings.error if sure and count >= _MOST else findings.warning
        add(key, f"{found}: if nothing earns another, nothing can be learned. Look at what it compares")
    return not alike or count >= _FEW
