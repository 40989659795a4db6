"""Kernel tasks as rows of Headway's task files: writing them with prompts, splitting, reading, finding by answer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headway.config.sources import TaskSource
from headway.kernels.prompts import kernel_prompt
from headway.kernels.tasks import KERNEL, kernel_task
from headway.records.errors import ConfigurationError
from headway.records.kernels import KernelTask
from headway.runtime.run_directory import write_atomically
from headway.tasks.sources import read_tasks


def require_new(path: Path, option: str) -> None:
    """Raise ConfigurationError if ``path`` exists or its folder doesn't."""
    if path.exists():
        raise ConfigurationError(f"{option} = {path} exists; valid: a file that doesn't")
    if not path.parent.is_dir():
        raise ConfigurationError(f"{option} = {path}: there is no folder {path.parent}")


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON objects, one per line, atomically. Raises HeadwayError."""
    write_atomically(path, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def task_row(task: KernelTask) -> dict[str, Any]:
    """A kernel task as a row of a task file."""
    return {"prompt": kernel_prompt(task), "metadata": {KERNEL: msgspec.to_builtins(task)}}


def distinct_tasks(tasks: Sequence[KernelTask]) -> list[KernelTask]:
    """The tasks, without those that have an earlier task's prompt."""
    task_by_prompt: dict[str, KernelTask] = {}
    for task in tasks:
        task_by_prompt.setdefault(kernel_prompt(task), task)
    return list(task_by_prompt.values())


def split_tasks(tasks: Sequence[KernelTask], share: float, seed: int) -> tuple[list[KernelTask], list[KernelTask]]:
    """Split into (kept, held out). A hash of seed and name draws the share, rounded, of each level to hold out. The
    order is kept, and the draw doesn't depend on it."""
    held_out: set[str] = set()
    for level in {task.level for task in tasks}:
        names = sorted((task.name for task in tasks if task.level == level), key=lambda name: _hash(seed, name))
        held_out.update(names[: round(share * len(names))])
    return [task for task in tasks if task.name not in held_out], [task for task in tasks if task.name in held_out]


def _hash(seed: int, name: str) -> bytes:
    return hashlib.blake2b(f"{seed}:{name}".encode()).digest()


class PromptedTask(NamedTuple):
    """A kernel task, and its prompt in the file."""

    kernel: KernelTask
    prompt: str


class KernelTaskFile:
    """The kernel tasks of a task file, found by name, task id or prompt.

    Raises ConfigurationError: an unreadable file, a row that is no kernel task, two tasks of one name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tasks: dict[str, PromptedTask] = {}
        self._names: dict[str, str] = {}  # by task id
        for task in read_tasks(TaskSource(path=str(path))).tasks:
            kernel = kernel_task(task, location=f'{path}, "{task.prompt[:40]}"')
            if kernel.name in self.tasks:
                raise ConfigurationError(f"{path}: two tasks are named {kernel.name!r}; valid: names that differ")
            self.tasks[kernel.name] = PromptedTask(kernel, task.prompt)
            self._names[task.task_id] = kernel.name

    def name_of(self, row: Mapping[str, Any], location: str) -> str:
        """The name of a row's task, found by its ``task`` (a name), ``task_id``, or the prompt in its ``prompt`` or
        first user message, which a chat template may surround; "": a task that the file lacks. Raises
        ConfigurationError for a row that names no task."""
        if isinstance(name := row.get("task"), str):
            return name if name in self.tasks else ""
        if isinstance(task_id := row.get("task_id"), str):
            return self._names.get(task_id, "")
        prompt_text = row.get("prompt")
        if isinstance(messages := row.get("messages"), list):
            user_messages = (m for m in messages if isinstance(m, dict) and m.get("role") == "user")
            prompt_text = next(user_messages, {}).get("content")
        if not isinstance(prompt_text, str):
            raise ConfigurationError(
                f'{location}: no task: it has {", ".join(sorted(row)) or "nothing"}; valid: "task" (its name), '
                '"task_id", or the prompt in "prompt" or "messages"'
            )
        return next((name for name, task in self.tasks.items() if task.prompt in prompt_text), "")
