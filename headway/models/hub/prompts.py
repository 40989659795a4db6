"""Prompts of tasks as tokens; those with pictures are made in a process that runs the model's processor."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from headway.config.schema import Experiment
from headway.models.hub.pixels import FOLDER, PixelStore
from headway.records.clients import PromptCodec
from headway.records.errors import ConfigurationError, RemoteError, WorkerDied
from headway.records.task import Task
from headway.records.tokens import TokenIds
from headway.runtime.clock import Clock
from headway.runtime.devices import every_core
from headway.runtime.fork_server import SCORING
from headway.runtime.run_directory import RunDirectory
from headway.runtime.worker_slots import WorkerSlot, own_cause
from headway.runtime.workers import EventCallback, Launcher, WorkerSpec

_COMPARED = 4  # tasks with pictures, of which a broken one or two don't keep trainer and engines from being compared


def _untold(name: str, detail: str, /, **fields: Any) -> None: ...


class Pictures:
    """The process, started when it is first needed, and what it stores in the run's folder."""

    def __init__(
        self, launcher: Launcher, clock: Clock, experiment: Experiment, on_event: EventCallback = _untold
    ) -> None:
        model, run = experiment.model, Path(experiment.run.directory)
        folder, logs = run / FOLDER, RunDirectory(run).logs
        spec = WorkerSpec(
            name="pictures",
            factory="headway.models.hub.pictures:PictureWorker",
            arguments={
                "model_path": model.path,
                "trust": model.trust_remote_code,
                "folder": str(folder),
                "template_arguments": model.chat_template_kwargs,
                "started": RunDirectory(run).started().isoformat(),
            },
            device=every_core(),
            preload=SCORING,  # verifiers' server: one of its own would take the trainer's and the replicas' place
            log_path=logs / "pictures.log" if logs.is_dir() else None,
        )
        self.compared: list[Task] = []  # of which the first that can be shown is for trainer and engines to agree on
        self._slot = WorkerSlot(spec, launcher, clock, on_event)
        self._store = PixelStore(folder)
        self._held: dict[str, tuple[Task, Any, int]] = {}  # prompts that no group in the buffer names, by task id
        self._asking = asyncio.Lock()  # held for a prompt: what the process dies of is known
        self._holding = asyncio.Lock()  # the same for an evaluation's: a group's waits behind one of them at most
        self._opening = ""  # of the group that opens next
        self._unneeded: dict[str, int] = {}  # what nobody needed when last looked

    async def prompt(self, task: Task, *, hold: bool) -> tuple[Task, Any, int]:
        """The task with the content hash of its pixel arrays, its token ids, and the bytes of the arrays; or, where
        they can't be made or the process dies of them twice, `unshown` without ids. ``hold``: an evaluation's, made
        once, whose arrays stay till the run's end. Raises what the process raises while it starts, and HeadwayError on
        a full disk."""
        if not hold:
            made = await self._asked(task)
            self._opening = made[0].pixels
            return made
        async with self._holding:
            made = self._held.get(task.task_id) or await self._asked(task)
            if made[0].pixels:
                self._held[task.task_id] = made
        return made

    async def _asked(self, task: Task) -> tuple[Task, Any, int]:
        why = ""
        async with self._asking:
            self._slot.forgive()  # its deaths of other prompts
            for _ in range(2):
                worker = self._slot.live or await self._slot.restart()
                if worker is None:
                    raise own_cause(self._slot.fault or WorkerDied(self._slot.name, "not started"))
                try:
                    ids, digest, size = await worker.call("prompt", task.messages, task.pictures)
                    return msgspec.structs.replace(task, pixels=digest), ids, size
                except RemoteError as error:
                    if not isinstance(cause := own_cause(error), ConfigurationError | RemoteError):
                        raise cause from None  # not the prompt's fault, as a full disk
                    why = str(cause)
                    break
                except WorkerDied as death:
                    why = f"the process that makes prompts died of its pictures: {death.cause.splitlines()[0]}"
        return msgspec.structs.replace(task, unshown=why), TokenIds(), 0

    def keep(self, needed: set[str]) -> None:
        """Delete the arrays that nobody needs now nor did when last called, nor has asked for meanwhile; ``needed``: by
        groups in the buffer."""
        stored = self._store.stored()
        kept = needed | {task.pixels for task, _, _ in self._held.values()} | {self._opening}
        unneeded = {digest: at for digest, at in stored.items() if digest not in kept}
        for digest, at in unneeded.items() & self._unneeded.items():
            self._store.remove(digest, at)
        self._unneeded = unneeded

    async def stop(self) -> None:
        """End the process."""
        await self._slot.stop(0.0)


def open_pictures(
    experiment: Experiment,
    sets: Mapping[str, Iterable[Task]],
    launcher: Launcher,
    clock: Clock,
    on_event: EventCallback = _untold,
) -> Pictures | None:
    """The process of a run whose task sets have pictures, not yet started; None: none has."""
    pictures = Pictures(launcher, clock, experiment, on_event)
    pictures.compared += islice((task for tasks in sets.values() for task in tasks if task.pictures), _COMPARED)
    return pictures if pictures.compared else None


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
