"""Prompts of tasks as tokens; those with pictures are made in a process that runs the model's processor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from headway.config.schema import Experiment
from headway.models.hub.pixels import FOLDER, PixelStore
from headway.records.clients import PromptCodec
from headway.records.errors import RemoteError, WorkerDied
from headway.records.task import Task
from headway.runtime.clock import Clock
from headway.runtime.devices import every_core
from headway.runtime.run_directory import RunDirectory
from headway.runtime.worker_slots import WorkerSlot, own_cause
from headway.runtime.workers import Launcher, WorkerSpec


class Pictures:
    """The process, started when it is first needed, and what it stores in the run's folder."""

    def __init__(self, launcher: Launcher, clock: Clock, experiment: Experiment) -> None:
        model, run = experiment.model, Path(experiment.run.directory)
        folder, logs = run / FOLDER, RunDirectory(run).logs
        spec = WorkerSpec(
            name="pictures",
            factory="headway.models.hub.pictures:PictureWorker",
            arguments={"model_path": model.path, "trust": model.trust_remote_code, "folder": str(folder)},
            device=every_core(),
            log_path=logs / "pictures.log" if logs.is_dir() else None,
        )
        self._slot = WorkerSlot(spec, launcher, clock)
        self._store = PixelStore(folder)
        self._held = set[str]()  # of tasks that no group in the buffer names: evaluations'
        self._opening = ""  # of the group that opens next
        self._unneeded: dict[str, int] = {}  # what nobody needed when last looked

    async def prompt(self, task: Task, *, hold: bool) -> tuple[Task, Any, int]:
        """The task with the content hash of its pixel arrays, its token ids, and the bytes of the arrays. ``hold``:
        those stay till the run's end. Raises ConfigurationError for what the processor refuses, and WorkerDied when the
        process dies of it twice."""
        try:
            ids, digest, size = await self._asked(task)
        except WorkerDied:
            ids, digest, size = await self._asked(task)
        if hold:
            self._held.add(digest)
        else:
            self._opening = digest
        return msgspec.structs.replace(task, pixels=digest), ids, size

    async def _asked(self, task: Task) -> tuple[Any, str, int]:
        try:
            worker = self._slot.live or await self._slot.restart()
            if worker is None:
                raise self._slot.fault or WorkerDied(self._slot.name, "not started")
            return await worker.call("prompt", task.messages, task.pictures)
        except RemoteError as error:
            raise own_cause(error) from None

    def keep(self, needed: set[str]) -> None:
        """Delete the arrays that nobody needs now nor did when last called, nor has asked for meanwhile; ``needed``: by
        groups in the buffer."""
        stored = self._store.stored()
        kept = needed | self._held | {self._opening}
        unneeded = {digest: at for digest, at in stored.items() if digest not in kept}
        for digest, at in unneeded.items() & self._unneeded.items():
            self._store.remove(digest, at)
        self._unneeded = unneeded

    async def stop(self) -> None:
        """End the process."""
        await self._slot.stop(0.0)


def open_pictures(
    experiment: Experiment, sets: Mapping[str, Iterable[Task]], launcher: Launcher, clock: Clock
) -> Pictures | None:
    """The process of a run whose task sets have pictures, not yet started; None: none has."""
    seen = any(task.pictures for tasks in sets.values() for task in tasks)
    return Pictures(launcher, clock, experiment) if seen else None


class Prompts:
    """Makes a task's prompt: by the tokenizer at once, with ``pictures`` in time."""

    def __init__(self, tokenizer: PromptCodec, template: Any, pictures: Pictures | None = None) -> None:
        self.pictures = pictures
        self._tokenizer, self._template = tokenizer, template
        self._prepared: dict[str, dict[str, Any]] = {}  # by task id, of the group that opens next

    def ready(self, task: Task) -> bool:
        """Whether `of` can make its prompt at once."""
        return not task.pictures or task.task_id in self._prepared

    async def make(self, task: Task) -> dict[str, Any]:
        """The fields ``task`` and ``prompt_ids`` of a group that isn't in the buffer. Raises as `Pictures.prompt`."""
        return await self._made(task, hold=True) if task.pictures else self.of(task)

    async def prepare(self, task: Task) -> None:
        """Make a task ``ready``, which is the next group's. Raises as `Pictures.prompt`."""
        self._prepared = {task.task_id: await self._made(task, hold=False)}

    def of(self, task: Task) -> dict[str, Any]:
        """The fields of a group whose task is ``ready``."""
        if task.pictures:
            return self._prepared.pop(task.task_id)
        return {"task": task, "prompt_ids": self._tokenizer.render(task.shown, self._template)}

    async def _made(self, task: Task, *, hold: bool) -> dict[str, Any]:
        assert self.pictures is not None, "there is a process where a task has pictures"
        made, ids, _ = await self.pictures.prompt(task, hold=hold)
        return {"task": made, "prompt_ids": ids}
