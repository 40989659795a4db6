"""A deterministic trainer without a model, whose steps take time only on the injected clock."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from headway.records.counted import sampled_tokens
from headway.records.errors import StepRefused
from headway.records.generation import PublishedWeights
from headway.records.training import CheckpointInfo, OptimiserSettings, PartReport, StepReport, TrainBatch
from headway.runtime.clock import Clock
from headway.trainer.checkpoints import CheckpointState, keep_last, verify, write_folder

Latency = float | Callable[[TrainBatch], float]
_ROUNDING = 1e-6  # share of a step's time


class FakeTrainer:
    """A stand-in for `client.TrainerClient` with the same protocol, configured latencies and real (empty) checkpoints.

    ``seconds_per_sample``: a number, or a function of the batch that returns the seconds of its complete step.
    ``skip_steps``: calls of `train_step` (0, 1, ...) that report a non-finite step. The attribute ``batches`` keeps
    every trained batch for tests.
    """

    def __init__(
        self,
        clock: Clock,
        seconds_per_sample: Latency = 0.01,
        *,
        publish_s: float = 0.0,
        link_s: float = 0.0,
        checkpoint_s: float = 0.0,
        skip_steps: frozenset[int] = frozenset(),
        keep_checkpoints: int = 2,
        flops_per_token: float = 0.0,
        keep_batches: bool = True,
        lost_s: Callable[[], float] | None = None,
        on_work: Callable[[bool], None] = lambda computes: None,
    ) -> None:
        """``link_s``: from a version's snapshot, which takes ``publish_s``, until it is where the generator reads it,
        beside the next step. ``flops_per_token``: of forward and backward, for MFU. ``keep_batches``: whether
        ``batches`` is filled. ``lost_s``: returns the seconds of training lost so far to other work on the device; it
        grows more slowly than time. ``on_work`` is called with True when computation begins, False when it ends."""
        self._on_work = on_work
        self._lost_s = lost_s
        self._flops_per_token = flops_per_token
        self._keep_batches = keep_batches
        self._calls = 0
        self._clock = clock
        self._latency = seconds_per_sample
        self._publish_s, self._link_s = publish_s, link_s
        self._begun: int | None = None  # the version that is being published
        self._checkpoint_s = checkpoint_s
        self._begun_checkpoint = "", CheckpointState(version=0)  # path and state of the one that is being written
        self._skip_steps = skip_steps
        self._keep_checkpoints = keep_checkpoints
        self.version = 0
        self.batches: list[TrainBatch] = []
        self._parts: list[TrainBatch] = []
        self._parts_s = 0.0
        self.published: list[int] = []
        self.loaded_weights: list[str] = []
        self.started = False

    async def start(self) -> None:
        self.started = True

    async def restart(self) -> None:
        """Restart as a new process would, at version 0 until a checkpoint is loaded."""
        self.version = 0
        self._clear_parts()
        self.started = True

    async def train_step(self, batch: TrainBatch) -> StepReport:
        self._clear_parts()
        await self.forward_backward(batch)
        return await self.optim_step()

    async def forward_backward(self, part: TrainBatch) -> PartReport:
        if part.step != self.version:
            raise StepRefused(f"batch of step {part.step} given to a trainer at version {self.version}")
        started_s, latency = self._clock.now(), self._latency
        self._on_work(True)
        try:
            await self._work(latency(part) if callable(latency) else latency * len(part.samples))
        finally:
            self._on_work(False)
        self._parts.append(part)
        self._parts_s += (spent_s := self._clock.now() - started_s)
        return PartReport(samples=len(part.samples), tokens=0, loss=0.0, loss_tokens=0, compute_s=spent_s)

    async def optim_step(self, settings: OptimiserSettings | None = None) -> StepReport:
        step, skipped = self.version, self._calls in self._skip_steps
        self._calls += 1
        samples = tuple(sample for part in self._parts for sample in part.samples)
        if self._keep_batches:
            demonstrations = tuple(drawn for part in self._parts for drawn in part.demonstrations)
            self.batches.append(TrainBatch(step=step, samples=samples, demonstrations=demonstrations))
        compute_s = self._clear_parts()
        self.version += 0 if skipped else 1
        rollouts = [sample.rollout for sample in samples]
        tokens = sum(rollout.all_tokens for rollout in rollouts)
        return StepReport(
            step=step,
            version=self.version,
            skipped=skipped,
            reason="told to skip" if skipped else "",
            samples=len(rollouts),
            tokens=tokens,
            computed_tokens=tokens,
            flops=tokens * self._flops_per_token,
            loss_tokens=sum(sampled_tokens(s.response_mask) for rollout in rollouts for s in rollout.sequences),
            micro_batches=1,
            compute_s=compute_s,
            metrics={"loss": 0.0, "grad_norm": 0.0, "entropy": 0.0, "learning_rate": 0.0},
        )

    @property
    def accumulated_parts(self) -> int:
        return len(self._parts)

    def _clear_parts(self) -> float:
        """Discard the parts since the last step; returns the seconds they took."""
        spent_s, self._parts_s = self._parts_s, 0.0
        self._parts.clear()
        return spent_s

    async def _work(self, seconds: float) -> None:
        """Sleep for ``seconds`` of training at full speed, extended by the time lost in that period."""
        if self._lost_s is None:
            await self._clock.sleep(seconds)
            return
        remaining_s, lost_s = seconds, self._lost_s()
        while remaining_s > _ROUNDING * seconds:
            await self._clock.sleep(remaining_s)
            previous_lost_s, lost_s = lost_s, self._lost_s()
            remaining_s = lost_s - previous_lost_s

    async def begin_publish(self, version: int) -> None:
        await self._clock.sleep(self._publish_s)
        self._begun = version

    async def publish(self, version: int) -> PublishedWeights:
        if self._begun != version:
            await self.begin_publish(version)
        self._begun = None
        if self._link_s:
            await self._clock.sleep(self._link_s)
        self.published.append(version)
        return PublishedWeights(
            version=version, path=f"fake://{version}", checksum="0" * 32, size_bytes=0, publish_s=self._publish_s
        )

    async def score(self, prompt: tuple[int, ...] = (), pixels: str = "") -> None:
        return None

    async def begin_checkpoint(self, path: str, consumed: dict[int, list[int]]) -> None:
        await self._clock.sleep(self._checkpoint_s)
        self._begun_checkpoint = path, CheckpointState(version=self.version, consumed=consumed)

    async def save_checkpoint(
        self, path: str, consumed: dict[int, list[int]], before_commit: Callable[[], None] = lambda: None
    ) -> CheckpointInfo:
        if self._begun_checkpoint[0] != path:
            await self.begin_checkpoint(path, consumed)
        state = self._begun_checkpoint[1]
        before_commit()
        write_folder(path, lambda folder: _write_fake_model(folder / "model", state.version), state)
        keep_last(Path(path).parent.parent, self._keep_checkpoints)
        self._begun_checkpoint = "", state
        return CheckpointInfo(path=path, version=state.version)

    async def save_weights(self, path: str, metrics: dict[str, float] | None = None) -> CheckpointInfo:
        state = CheckpointState(version=self.version, metrics=metrics or {})
        write_folder(path, lambda folder: _write_fake_model(folder, self.version), state)
        return CheckpointInfo(path=path, version=self.version)

    async def load_checkpoint(self, path: str) -> int:
        self.version = verify(path).version
        self._clear_parts()
        return self.version

    async def load_weights(self, path: str) -> None:
        self.loaded_weights.append(path)

    async def measure_peak(self) -> float:
        return 0.0

    async def stop(self) -> None:
        self.started = False


def _write_fake_model(folder: Path, version: int) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"fake": True, "version": version}), encoding="utf-8")
