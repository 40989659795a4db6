"""Prompts of tasks as tokens; prompts with pictures are made in a process that runs the model's processor."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from headway.config.schema import Experiment
from headway.models.hf.pixels import FOLDER, PixelStore
from headway.records.clients import PromptCodec
from headway.records.errors import ConfigurationError, RemoteError, WorkerDied
from headway.records.task import Task
from headway.records.tokens import TokenIds
from headway.runtime.clock import Clock
from headway.runtime.devices import every_core
from headway.runtime.fork_server import VERIFIER_CODE
from headway.runtime.run_directory import RunDirectory
from headway.runtime.worker_slots import WorkerSlot, typed_cause
from headway.runtime.workers import EventCallback, Launcher, WorkerSpec

_COMPARED = 4  # tasks with pictures for the comparison of trainer and engines, which needs one that works


def _ignore_event(name: str, detail: str, /, **fields: Any) -> None: ...


class PictureClient:
    """The handle of the process that makes prompts with pictures, which starts at first use, and of its pixel arrays in
    the run's folder."""

    def __init__(
        self, launcher: Launcher, clock: Clock, experiment: Experiment, on_event: EventCallback = _ignore_event
    ) -> None:
        model, run_folder = experiment.model, Path(experiment.run.directory)
        pixels_folder, logs_folder = run_folder / FOLDER, RunDirectory(run_folder).logs
        spec = WorkerSpec(
            name="pictures",
            factory="headway.models.hf.pictures:PictureWorker",
            arguments={
                "model_path": model.path,
                "trust": model.trust_remote_code,
                "folder": str(pixels_folder),
                "template_arguments": model.chat_template_kwargs,
                "started": RunDirectory(run_folder).started().isoformat(),
            },
            device=every_core(),
            preload=VERIFIER_CODE,  # the verifiers' fork server: at most two exist
            log_path=logs_folder / "pictures.log" if logs_folder.is_dir() else None,
        )
        self.compared: list[Task] = []  # trainer and engines are compared on the first one whose prompt can be made
        self._slot = WorkerSlot(spec, launcher, clock, on_event)
        self._store = PixelStore(pixels_folder)
        self._held_prompts: dict[str, tuple[Task, Any, int]] = {}  # by task id; no group in the buffer names them
        self._process_lock = asyncio.Lock()  # one prompt at a time, so that the prompt that kills the process is known
        self._hold_lock = asyncio.Lock()  # one held prompt at a time: a group waits for at most one
        self._next_group_pixels = ""  # digest of the group that opens next
        self._unneeded: dict[str, int] = {}  # arrays that were unneeded at the last `remove_unneeded`

    async def prompt(self, task: Task, *, hold: bool) -> tuple[Task, Any, int]:
        """The task with the content hash of its pixel arrays, its token ids, and the arrays' size in bytes. If the
        prompt can't be made, or kills the process twice, the task has `unshown`, and no ids. ``hold``: the
        prompt, an evaluation's or the agreement check's, is made once, and its arrays stay until the run's end. Raises
        the process's errors while it starts, and HeadwayError on a full disk."""
        if not hold:
            made_prompt = await self._request_prompt(task)
            self._next_group_pixels = made_prompt[0].pixels
            return made_prompt
        async with self._hold_lock:
            made_prompt = self._held_prompts.get(task.task_id) or await self._request_prompt(task)
            if made_prompt[0].pixels:
                self._held_prompts[task.task_id] = made_prompt
        return made_prompt

    async def _request_prompt(self, task: Task) -> tuple[Task, Any, int]:
        reason = ""
        async with self._process_lock:
            self._slot.reset_failures()  # its deaths of other prompts
            for _ in range(2):
                worker = self._slot.live or await self._slot.restart()
                if worker is None:
                    raise typed_cause(self._slot.fault or WorkerDied(self._slot.name, "not started"))
                try:
                    ids, digest, size_bytes = await worker.call("prompt", task.messages, task.pictures)
                    return msgspec.structs.replace(task, pixels=digest), ids, size_bytes
                except RemoteError as error:
                    if not isinstance(exception := typed_cause(error), ConfigurationError | RemoteError):
                        raise exception from None  # not the prompt's fault, as a full disk
                    reason = str(exception)
                    break
                except WorkerDied as death:
                    reason = f"the process that makes prompts died of its pictures: {death.cause.splitlines()[0]}"
        return msgspec.structs.replace(task, unshown=reason), TokenIds(), 0

    def remove_unneeded(self, needed: set[str]) -> None:
        """Delete the arrays that are unneeded now and were at the last call, and that weren't written in between.
        ``needed``: digests of groups in the buffer."""
        write_times = self._store.stored()
        kept_digests = needed | {task.pixels for task, _, _ in self._held_prompts.values()} | {self._next_group_pixels}
        unneeded = {digest: written_ns for digest, written_ns in write_times.items() if digest not in kept_digests}
        for digest, written_ns in unneeded.items() & self._unneeded.items():
            self._store.remove(digest, written_ns)
        self._unneeded = unneeded

    async def stop(self) -> None:
        """End the process."""
        await self._slot.stop(0.0)


def open_pictures(
    experiment: Experiment,
    sets: Mapping[str, Iterable[Task]],
    launcher: Launcher,
    clock: Clock,
    on_event: EventCallback = _ignore_event,
) -> PictureClient | None:
    """The `PictureClient` of a run whose task sets have pictures, not started yet; None: no task has pictures."""
    pictures = PictureClient(launcher, clock, experiment, on_event)
    pictures.compared += islice((task for tasks in sets.values() for task in tasks if task.pictures), _COMPARED)
    return pictures if pictures.compared else None


class PromptMaker:
    """Makes prompts of tasks, immediately with the tokenizer, or through the PictureClient for tasks with pictures."""

    def __init__(self, tokenizer: PromptCodec, template: Any, pictures: PictureClient | None = None) -> None:
        self.pictures = pictures
        self._tokenizer, self._template = tokenizer, template
        self._prepared: dict[str, dict[str, Any]] = {}  # by task id, of the group that opens next

    def ready(self, task: Task) -> bool:
        """Whether `of` can make the task's prompt immediately."""
        return not task.pictures or task.task_id in self._prepared

    async def make(self, task: Task) -> dict[str, Any]:
        """The fields ``task`` and ``prompt_ids`` of a group outside of the buffer. Raises as `PictureClient.prompt`."""
        return await self._make(task, hold=True) if task.pictures else self.of(task)

    async def prepare(self, task: Task) -> None:
        """Make the next group's task ``ready``. Raises as `PictureClient.prompt` does."""
        self._prepared = {task.task_id: await self._make(task, hold=False)}

    def of(self, task: Task) -> dict[str, Any]:
        """The fields of a group whose task is ``ready``."""
        if task.pictures:
            return self._prepared.pop(task.task_id)
        return {"task": task, "prompt_ids": self._tokenizer.render(task.content, self._template)}

    async def _make(self, task: Task, *, hold: bool) -> dict[str, Any]:
        assert self.pictures is not None, "there is a process where a task has pictures"
        task_with_pixels, ids, _ = await self.pictures.prompt(task, hold=hold)
        return {"task": task_with_pixels, "prompt_ids": ids}
