"""The orchestrator's handle of the trainer: all ranks behind one `records.clients.Trainer`. Torch-free."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import numpy as np

from headway.algorithms.samples import FlatBatch, IntArray, lay_out
from headway.algorithms.step_plan import divide
from headway.config.load import placed_experiment
from headway.config.schema import Experiment
from headway.records.errors import StepRefused, StorageFailed
from headway.records.execution import MemoryMove
from headway.records.generation import ProbeScores, PublishedWeights
from headway.records.tokens import TokenLogprobs
from headway.records.trace import WorkerState
from headway.records.training import CheckpointInfo, OptimiserSettings, PartReport, StepReport, TrainBatch
from headway.runtime.workers import Launcher
from headway.trainer.checkpoints import scratch_of
from headway.trainer.rank_workers import RankWorkers, with_own_cause

SERVICE = "headway.trainer.service:TrainerService"


class TrainerClient(RankWorkers):
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
        configured: Experiment | None = None,
        log_directory: str | Path | None = None,
        host_of: Callable[[str], Awaitable[str]] | None = None,
        exports_weights: bool = False,
    ) -> None:
        """``configured``: the experiment before a move of its placement, if there was one. ``host_of(node)``: the
        address by which others reach a node ("": this machine); needed for ranks on nodes. ``exports_weights``: see
        `ModelService`; not after `set_devices`."""
        devices = experiment.trainer.devices
        super().__init__(launcher, experiment, run_id, devices, SERVICE, log_directory=log_directory, host_of=host_of)
        self.more_arguments = {"exports_weights": exports_weights}
        self._configured, self._restarts = configured or experiment, 0
        self._begun_checkpoint = ""  # path of `begin_checkpoint`; "": it is being saved, or is
        self._unsaved_checkpoint = ""  # path of the last checkpoint that was begun; "": it is saved
        self.accumulated_parts = 0  # since the last step, in the present processes

    @property
    def worker_states(self) -> list[WorkerState]:
        """Health and restarts of every rank."""
        alive_by_name = {worker.name: worker.alive for worker in self.workers}
        device_by_name = {f"trainer-{rank}": device for rank, device in enumerate(self.devices)}
        return [
            WorkerState(name=name, up=alive_by_name.get(name, False), restarts=self._restarts, device=device)
            for name, device in device_by_name.items()
        ]

    async def start(self) -> None:
        """See `RankWorkers.start`."""
        self.accumulated_parts, self._begun_checkpoint = 0, ""
        await super().start()

    async def stop(self, grace_s: float = 10.0) -> None:
        """See `RankWorkers.stop`; a checkpoint that isn't saved is removed."""
        await super().stop(grace_s)
        self._remove_unsaved()

    async def kill(self) -> None:
        """See `RankWorkers.kill`; a checkpoint that isn't saved is removed."""
        await super().kill()
        self._remove_unsaved()

    def _remove_unsaved(self) -> None:
        path, self._begun_checkpoint, self._unsaved_checkpoint = self._unsaved_checkpoint, "", ""
        if path:
            shutil.rmtree(scratch_of(path), ignore_errors=True)

    def set_devices(self, devices: tuple[str, ...]) -> None:
        """Set the devices, one per rank, for the next start."""
        self.more_arguments = {"exports_weights": False}  # the first devices had the memory
        self._experiment = placed_experiment(self._configured, {"trainer.devices": json.dumps(devices)})
        self.devices = devices

    async def restart(self) -> None:
        """Replace every rank by a new process with the initial weights."""
        self._restarts += bool(self.workers)  # a start after `kill` isn't counted: the kill was intended
        await self.kill()
        await self.start()

    async def train_step(self, batch: TrainBatch) -> StepReport:
        """Train on ``batch``. Raises ValueError for a rollout whose parts differ in length."""
        self.accumulated_parts = 0  # the ranks discard them
        sequences, shares = await asyncio.to_thread(self._divide, batch)
        reports: list[StepReport] = await self.call_each("train_step", [(share,) for share in shares])
        advantages = [advantage for report in reports[:: self._context] for advantage in report.sample_advantages]
        in_batch_order = np.array(advantages)[np.argsort(np.concatenate(sequences))] if advantages else np.zeros(0)
        return msgspec.structs.replace(
            reports[0],
            rank_compute_s=tuple(report.compute_s for report in reports),
            sample_advantages=tuple(in_batch_order.tolist()),
        )

    async def forward_backward(self, part: TrainBatch) -> PartReport:
        """See `records.clients.Trainer.forward_backward`."""
        sequences, shares = await asyncio.to_thread(self._divide, part)
        previous_parts, self.accumulated_parts = self.accumulated_parts, 0  # after an error, unless nothing was changed
        try:
            reports: list[PartReport] = await self.call_each("forward_backward", [(share,) for share in shares])
        except StepRefused:
            self.accumulated_parts = previous_parts
            raise
        self.accumulated_parts = previous_parts + 1
        context = self._context  # of so many reports, each has the same samples
        lengths_s = np.concatenate([share.lengths_s for share in shares[::context]])
        sequence_n = np.repeat(np.concatenate(sequences), lengths_s)
        logprobs_n = np.concatenate([report.logprobs.array for report in reports[::context]])
        in_batch_order = TokenLogprobs.view(logprobs_n[np.argsort(sequence_n, kind="stable")])
        return msgspec.structs.replace(reports[0], logprobs=in_batch_order)

    async def optim_step(self, settings: OptimiserSettings | None = None) -> StepReport:
        """See `records.clients.Trainer.optim_step`."""
        self.accumulated_parts = 0  # after an error too
        reports: list[StepReport] = await self.call_all("optim_step", settings)
        return msgspec.structs.replace(reports[0], rank_compute_s=tuple(report.compute_s for report in reports))

    async def begin_publish(self, version: int) -> None:
        """See `records.clients.Trainer.begin_publish`."""
        await self.call_all("begin_publish", version)

    async def publish(self, version: int) -> PublishedWeights:
        return (await self.call_all("complete_publish", version))[0]

    async def score(self, prompt: tuple[int, ...] = (), pixels: str = "") -> ProbeScores | None:
        """See `records.clients.Trainer.score`."""
        return (await self.call_all("score", prompt, pixels))[0]

    async def begin_checkpoint(self, path: str, consumed: dict[int, list[int]], beside: bool = True) -> None:
        """See `records.clients.Trainer.begin_checkpoint`. ``beside``: other calls may come before it is saved."""
        self._unsaved_checkpoint = path  # from now on there may be a folder, also if this is cancelled
        await self.call_all("begin_checkpoint", path, consumed, beside)
        self._begun_checkpoint = path

    async def save_checkpoint(
        self, path: str, consumed: dict[int, list[int]], before_commit: Callable[[], None] = lambda: None
    ) -> CheckpointInfo:
        """See `records.clients.Trainer.save_checkpoint`."""
        if self._begun_checkpoint != path:
            await self.begin_checkpoint(path, consumed, beside=False)
        self._begun_checkpoint, checksums = "", dict[str, str]()
        try:
            for method in ("checkpoint_written", "checkpoint_checksums"):
                for rank_checksums in await self.call_all_to_end(method):
                    checksums |= rank_checksums
            before_commit()
            version = await self.until_death(with_own_cause(self._running()[0].call("commit_checkpoint", checksums)))
            self._unsaved_checkpoint = ""
        except StorageFailed:
            await self.call_all("discard_checkpoint")
            raise
        return CheckpointInfo(path=path, version=version)

    async def save_weights(self, path: str, metrics: dict[str, float] | None = None) -> CheckpointInfo:
        """Write the present weights as a model folder (``RUN/best``), atomically."""
        return (await self.call_all("save_weights", path, metrics))[0]

    async def load_checkpoint(self, path: str) -> int:
        version = (await self.call_all("load_checkpoint", path))[0]
        self.accumulated_parts = 0  # the ranks discard them
        return version

    async def load_weights(self, path: str) -> None:
        await self.call_all("load_weights", path)

    async def measure_peak(self) -> float:
        """Measure the FLOP/s of large matrix products at the training dtype on all ranks, the denominator of MFU."""
        return sum(await self.call_all("measure_peak"))

    async def offload(self) -> list[MemoryMove]:
        """Move every rank's state, including accumulated parts, off its device (`TrainerService.offload`); returns each
        rank's move. Raises StorageFailed if a rank fails; then no rank is offloaded."""
        try:
            return await self.call_all_to_end("offload")
        except StorageFailed:
            await self.onload()
            raise

    async def onload(self) -> list[MemoryMove]:
        """Undo `offload`."""
        return await self.call_all("onload")

    @property
    def _context(self) -> int:
        """The number of neighbouring ranks that compute the same samples."""
        return self._experiment.trainer.layout_of(len(self._running()))[1]

    def _divide(self, batch: TrainBatch) -> tuple[list[IntArray], list[FlatBatch]]:
        """Return the parts of a batch, as sequences by their index in it, and what is sent to each rank."""
        laid_out, context = lay_out(batch), self._context
        parts = len(self._running()) // context
        if parts == 1:
            return [np.arange(len(laid_out.lengths_s))], [laid_out] * context
        sequences = divide(laid_out, self._experiment.trainer, parts)
        return sequences, [share for part in map(laid_out.take, sequences) for share in [part] * context]
