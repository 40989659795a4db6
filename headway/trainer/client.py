"""The orchestrator's handle of the trainer: all ranks behind one `records.clients.Trainer`. Torch-free."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headway.algorithms.samples import lay_out
from headway.config.schema import Experiment
from headway.records.errors import HeadwayError, RemoteError, StepRefused, StorageFailed
from headway.records.execution import MemoryMove
from headway.records.generation import ProbeScores, PublishedWeights
from headway.records.trace import WorkerState
from headway.records.training import CheckpointInfo, OptimiserSettings, PartReport, StepReport, TrainBatch
from headway.runtime.devices import parse_device
from headway.runtime.fork_server import MODEL_CODE
from headway.runtime.worker_slots import typed_cause
from headway.runtime.workers import Launcher, WorkerHandle, WorkerSpec, call_all

T = TypeVar("T")

SERVICE = "headway.trainer.service:TrainerService"
_DEATH_S = 5.0  # longest time from the others' broken connections until a rank's death is noticed


class TrainerClient:
    """The handle of the trainer ranks, which are worker processes.

    Lifecycle: `start` -> calls -> `stop`. When a rank dies, the call in progress raises WorkerDied, because sums over
    the ranks can't complete without it. Later calls raise it too, until `restart` has replaced all ranks; the version
    is then 0 and `load_checkpoint` must follow.
    """

    def __init__(
        self,
        launcher: Launcher,
        experiment: Experiment,
        run_id: str,
        *,
        log_directory: str | Path | None = None,
        host_of: Callable[[str], Awaitable[str]] | None = None,
        exports_weights: bool = False,
    ) -> None:
        """``host_of(node)``: the address by which others reach a node ("": this machine); needed for ranks on nodes.
        ``exports_weights``: see `ModelService`; not after `set_devices`."""
        self._launcher = launcher
        self._experiment = experiment
        self._run_id = run_id
        self._log_directory = log_directory
        self.workers: tuple[WorkerHandle, ...] = ()  # the ranks, rank 0 first; empty when none is running
        self._host_of = host_of
        self._exports_weights = exports_weights
        self._rendezvous = ""
        self._starts = 0
        self._restarts = 0
        self.accumulated_parts = 0  # since the last step, in the present processes

    @property
    def worker_states(self) -> list[WorkerState]:
        """Health and restarts of every rank."""
        alive_by_name = {worker.name: worker.alive for worker in self.workers}
        device_by_name = {f"trainer-{rank}": device for rank, device in enumerate(self._experiment.trainer.devices)}
        return [
            WorkerState(name=name, up=alive_by_name.get(name, False), restarts=self._restarts, device=device)
            for name, device in device_by_name.items()
        ]

    async def start(self) -> None:
        """Start one process per device of ``trainer.devices``; returns when all have loaded the model.

        Raises the error of the first rank that fails, after killing all others.
        """
        self.accumulated_parts = 0
        # A rendezvous file can be used for one start only, and must outlive it: groups may be made lazily.
        self._rendezvous = await self._make_rendezvous()
        specs = [self._spec(rank, device) for rank, device in enumerate(self._experiment.trainer.devices)]
        start_tasks = [asyncio.ensure_future(self._launcher.start(spec)) for spec in specs]
        try:
            self.workers = tuple(await asyncio.gather(*start_tasks))
        except RemoteError as error:
            raise typed_cause(error) from error
        finally:
            if not self.workers:
                await self._kill_started(start_tasks)

    def set_devices(self, devices: tuple[str, ...]) -> None:
        """Set the devices, one per rank, for the next start."""
        self._exports_weights = False  # the first devices had the memory
        trainer_config = self._experiment.trainer.model_copy(update={"devices": devices})
        self._experiment = self._experiment.model_copy(update={"trainer": trainer_config})

    async def restart(self) -> None:
        """Replace every rank by a new process with the initial weights."""
        self._restarts += bool(self.workers)  # a start after `kill` isn't counted: the kill was intended
        await self.kill()
        await self.start()

    async def train_step(self, batch: TrainBatch) -> StepReport:
        """Train on ``batch``. Raises ValueError for a rollout whose parts differ in length."""
        self.accumulated_parts = 0  # the ranks discard them
        reports: list[StepReport] = await self._all("train_step", lay_out(batch))
        return msgspec.structs.replace(reports[0], rank_compute_s=tuple(report.compute_s for report in reports))

    async def forward_backward(
        self, part: TrainBatch, loss: str | None = None, divisor: float | None = None
    ) -> PartReport:
        """See `records.clients.Trainer.forward_backward`."""
        laid_out = lay_out(part)
        previous_parts, self.accumulated_parts = self.accumulated_parts, 0  # after an error, unless nothing was changed
        try:
            report: PartReport = (await self._all("forward_backward", laid_out, loss, divisor))[0]
        except StepRefused:
            self.accumulated_parts = previous_parts
            raise
        self.accumulated_parts = previous_parts + 1
        return report

    async def optim_step(self, settings: OptimiserSettings | None = None) -> StepReport:
        """See `records.clients.Trainer.optim_step`."""
        self.accumulated_parts = 0  # after an error too
        reports: list[StepReport] = await self._all("optim_step", settings)
        return msgspec.structs.replace(reports[0], rank_compute_s=tuple(report.compute_s for report in reports))

    async def begin_publish(self, version: int) -> None:
        """See `records.clients.Trainer.begin_publish`."""
        await self._all("begin_publish", version)

    async def publish(self, version: int) -> PublishedWeights:
        return (await self._all("complete_publish", version))[0]

    async def score(self, prompt: tuple[int, ...] = (), pixels: str = "") -> ProbeScores | None:
        """See `records.clients.Trainer.score`."""
        return (await self._all("score", prompt, pixels))[0]

    async def save_checkpoint(self, path: str, consumed: dict[int, list[int]]) -> CheckpointInfo:
        return (await self._all("save_checkpoint", path, consumed))[0]

    async def save_weights(self, path: str, metrics: dict[str, float] | None = None) -> CheckpointInfo:
        """Write the present weights as a model folder (``RUN/best``), atomically."""
        return (await self._all("save_weights", path, metrics))[0]

    async def load_checkpoint(self, path: str) -> int:
        version = (await self._all("load_checkpoint", path))[0]
        self.accumulated_parts = 0  # the ranks discard them
        return version

    async def load_weights(self, path: str) -> None:
        await self._all("load_weights", path)

    async def measure_peak(self) -> float:
        """Measure the FLOP/s of large matrix products at the training dtype on all ranks, the denominator of MFU."""
        return sum(await self._all("measure_peak"))

    async def offload(self) -> list[MemoryMove]:
        """Move every rank's state, including accumulated parts, off its device (`TrainerService.offload`); returns each
        rank's move. Raises StorageFailed if a rank fails; then no rank is offloaded."""
        outcomes = await asyncio.gather(
            *(_with_own_cause(worker.call("offload")) for worker in self.workers), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                if isinstance(outcome, StorageFailed):
                    await self.onload()
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]

    async def onload(self) -> list[MemoryMove]:
        """Undo `offload`."""
        return await self._all("onload")

    async def stop(self, grace_s: float = 10.0) -> None:
        """Stop all ranks gracefully; their published weights are unlinked."""
        workers, self.workers = self.workers, ()
        await asyncio.gather(*(worker.stop(grace_s) for worker in workers))
        self._remove_rendezvous()

    async def kill(self) -> None:
        """Kill all ranks in any state; returns when they are dead."""
        workers, self.workers = self.workers, ()
        for worker in workers:
            worker.kill()
            await worker.died
        self._remove_rendezvous()

    def _spec(self, rank: int, device: str) -> WorkerSpec:
        name = f"trainer-{rank}"
        return WorkerSpec(
            name=name,
            factory=SERVICE,
            arguments={
                "experiment": self._experiment.model_dump(mode="json"),
                "run_id": self._run_id,
                "rank": rank,
                "world_size": len(self._experiment.trainer.devices),
                "rendezvous": self._rendezvous,
                "exports_weights": self._exports_weights,
            },
            device=device,
            preload=MODEL_CODE,
            log_path=None if self._log_directory is None else Path(self._log_directory) / f"{name}.log",
        )

    async def _all(self, method: str, *arguments: Any) -> list[Any]:
        workers = self._running()
        try:
            return await _with_own_cause(call_all(workers, method, *arguments))
        except RemoteError:
            # When a rank dies in the middle of a sum, the others' broken connections may be known before its death is.
            if len(workers) > 1:
                death_futures: list[Any] = [worker.died for worker in workers]
                done, _ = await asyncio.wait(death_futures, timeout=_DEATH_S, return_when=asyncio.FIRST_COMPLETED)
                for death_future in done:
                    raise death_future.result() from None
            raise

    def _running(self) -> tuple[WorkerHandle, ...]:
        if not self.workers:
            raise HeadwayError("the trainer is not running: start() or restart() it first")
        return self.workers

    async def _kill_started(self, start_tasks: list[asyncio.Task[WorkerHandle]]) -> None:
        """Kill the other ranks after one failed to start, since they would wait for it forever."""
        for start_task in start_tasks:
            start_task.cancel()
        for worker_or_error in await asyncio.gather(*start_tasks, return_exceptions=True):
            if not isinstance(worker_or_error, BaseException):
                worker_or_error.kill()
                await worker_or_error.died
        self._remove_rendezvous()

    async def _make_rendezvous(self) -> str:
        """The ranks' rendezvous: a file of this machine, or a port of rank 0's node if any rank is on a node."""
        devices = [parse_device(name) for name in self._experiment.trainer.devices]
        if len(devices) == 1 or self._host_of is None or not any(device.node for device in devices):
            return f"file://{tempfile.gettempdir()}/headway-ranks-{uuid.uuid4().hex}"
        self._starts += 1
        ports = self._experiment.cluster.ports
        # Another port at each start: the last start's may still be closing.
        return f"tcp://{await self._host_of(devices[0].node)}:{ports[self._starts % len(ports)]}"

    def _remove_rendezvous(self) -> None:
        if self._rendezvous.startswith("file://"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._rendezvous.removeprefix("file://"))


async def _with_own_cause(call: Coroutine[Any, Any, T]) -> T:
    try:
        return await call
    except RemoteError as error:
        raise typed_cause(error) from error
