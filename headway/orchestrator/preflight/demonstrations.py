"""Turns demonstrations of ``sft.data`` into attempts that a check plays and scores before the start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from headway.config.schema import Experiment
from headway.records.check_report import Findings
from headway.records.errors import ConfigurationError
from headway.records.task import Task
from headway.tasks.demonstrations import Pair, read_demonstrations

_MOST = 64  # demonstrations that are tried: where a tenth earns a reward, at least one of these nearly always does
_FEW = 8  # fewest attempts that allow a conclusion; reference answers that are tried


@dataclass(frozen=True, kw_only=True)
class DemonstratedTask:
    """Answers to a task: messages, as in OpenAI's chat API, at least one."""

    task: Task
    answers: tuple[dict[str, Any], ...]


def answer_of(text: str) -> dict[str, Any]:
    """Make the message of an answer."""
    return {"role": "assistant", "content": text}


def make_attempts(
    experiment: Experiment, tasks: Mapping[str, Sequence[Task]], empty_answer: str
) -> tuple[list[DemonstratedTask], bool]:
    """Make attempts from ``sft.data``'s first demonstrations; returns them, and whether all their tasks are known. Each
    attempt is at the one of ``tasks`` (by split) with its prompt, or else at a task of that prompt alone; then some
    reference answers follow, and at last ``empty_answer``. No attempts where ``sft.data`` isn't a file, has no
    demonstrations, or can't be read, which `headway sft` reports; demonstrations with tool calls are left out. Where
    tasks have more than prompt and answer, a demonstration whose task isn't known is left out, except the first, which
    is then at a training task."""
    source, train, attempts, fully_known = experiment.sft.data, tasks["train"], list[DemonstratedTask](), True
    task_by_prompt, ambiguous_prompts = dict[str, Task](), set[str]()
    for task in (each for split_tasks in tasks.values() for each in split_tasks):
        if task_by_prompt.setdefault(task.prompt, task).task_id != task.task_id:
            ambiguous_prompts.add(task.prompt)  # the demonstration's task is ambiguous
    task_by_prompt = {prompt: task for prompt, task in task_by_prompt.items() if prompt not in ambiguous_prompts}
    has_metadata, bare = any(task.metadata for task in train), not any(task.answer or task.metadata for task in train)
    try:
        for location, row in islice(read_demonstrations(source), _MOST) if source and source.source == "jsonl" else ():
            is_pair = isinstance(row, Pair)
            messages = ({"role": "user", "content": row.prompt}, answer_of(row.solution)) if is_pair else row.messages
            answers = tuple(message for message in messages if message["role"] == "assistant")
            if not answers or any(message.get("tool_calls") for message in answers):
                continue
            prompt = next((message["content"] for message in messages if message["role"] == "user"), "")
            fully_known = fully_known and (bare or prompt in task_by_prompt)
            if prompt in task_by_prompt or not has_metadata or not attempts:
                unknown_task = train[0] if has_metadata else Task(task_id=location, prompt=prompt)
                attempts.append(DemonstratedTask(task=task_by_prompt.get(prompt, unknown_task), answers=answers))
    except ConfigurationError:
        return [], False
    if attempts:
        answered_tasks = [task for task in train[:_FEW] if task.answer and (fully_known or not has_metadata)]
        attempts += [DemonstratedTask(task=task, answers=(answer_of(task.answer),)) for task in answered_tasks]
        attempts.append(DemonstratedTask(task=attempts[0].task, answers=(answer_of(empty_answer),)))
    return attempts, fully_known


def check_rewards(key: str, function: str, rewards: Sequence[float], fully_known: bool, findings: Findings) -> bool:
    """Add a finding where ``function`` gave all attempts of `make_attempts` the same reward. It is an error
    where they are many and at their own tasks (``fully_known``), else a warning. ``rewards``: of the attempts. Returns
    False where these are equal and too few to conclude anything."""
    count, are_equal = len(rewards) - 1, len({*rewards}) <= 1
    if are_equal and count >= _FEW:
        by = "by the answers in sft.data" + ("" if fully_known else ", to tasks that may lack what it needs")
        reason = f"{function} gives {count} attempts, {by}, the reward {rewards[0]:g}, and one without content as well"
        add_finding = findings.error if fully_known and count >= _MOST else findings.warning
        add_finding(key, f"{reason}: if no answer earns another one, nothing can be learned. Check what it compares")
    return not are_equal or count >= _FEW
