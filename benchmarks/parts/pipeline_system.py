"""The system under measurement: the real orchestrator over real processes, timed between two steps."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from operator import attrgetter

from headway.algorithms.samples import lay_out
from headway.config.schema import Experiment
from headway.orchestrator.train import start_observers, wire
from headway.records.ledger import LedgerLine, StepRecord
from headway.records.tokens import encoder
from headway.records.training import TrainBatch
from headway.runtime.clock import RealClock
from headway.runtime.run_directory import RunDirectory
from headway.telemetry.ledger import Ledger
from parts.pipeline_load import Shape
from parts.pipeline_machine import Snapshot, Usage, between, snapshot


@dataclass(frozen=True)
class Steady:
    """What the ledger and the kernel say about the steps between warm-up and the end."""

    records: list[StepRecord]
    seconds: float
    usage: Usage

    @property
    def samples(self) -> int:
        return sum(record.samples for record in self.records)

    @property
    def per_s(self) -> float:
        """Trained samples per second."""
        return self.samples / self.seconds

    @property
    def mean_length(self) -> float:
        """Response tokens of a trained sample."""
        return sum(record.tokens.trained_per_s * record.step_s for record in self.records) / self.samples

    def total(self, field: str) -> float:
        return sum(attrgetter(field)(record) for record in self.records)

    def per_sample_ms(self, field: str) -> float:
        return 1000 * self.total(field) / self.samples

    def cpu_ms(self, role: str) -> float:
        """CPU milliseconds of ``role`` per sample."""
        return 1000 * self.usage.roles_s.get(role, 0.0) / self.samples

    def outline(self) -> str:
        """Where a sample's milliseconds go, in one line."""
        parts = {name: self.per_sample_ms(f"{name}_s") for name in ("trainer_compute", "trainer_wait", "publish")}
        parts |= {f"{role} CPU": self.cpu_ms(role) for role in ("orchestrator", "verifier")}
        return "ms per sample: " + ", ".join(f"{name} {value:.3f}" for name, value in parts.items())

    def max_staleness(self) -> int:
        return int(max(record.trajectory_staleness.max for record in self.records))


class Watch:
    """Takes a snapshot when the warm-up is over and when enough steps are done, then ends the run."""

    def __init__(self, warmup_steps: int, steps: int) -> None:
        self._first = warmup_steps
        self._last = warmup_steps + steps
        self._seen: list[StepRecord] = []
        self._started: Snapshot | None = None
        self.steady: Steady | None = None
        self.done = asyncio.Event()

    def __call__(self, line: LedgerLine) -> None:
        if not isinstance(line, StepRecord) or self.done.is_set():
            return
        self._seen.append(line)
        if len(self._seen) == self._first:
            self._started = snapshot()
        elif len(self._seen) == self._last and self._started is not None:
            usage = between(self._started, snapshot())
            seconds = line.time_s - self._seen[self._first - 1].time_s
            self.steady = Steady(self._seen[self._first :], seconds, usage)
            self.done.set()


async def measure(
    settings: Experiment,
    shape: Shape,
    steps: int,
    warmup_steps: int | None = None,
    on_line: Callable[[LedgerLine], None] = lambda line: None,
) -> Steady:
    """Run the system until ``steps`` steps after the warm-up (default: budget + 1) are trained; then let it drain,
    unmeasured. ``on_line`` gets the ledger as it is written.

    The run's own check of its books runs at the end; it raises AccountingError.
    """
    clock = RealClock()
    directory = RunDirectory(settings.run.directory)
    directory.begin(settings, resume=False)
    watch = Watch(warmup_steps or settings.queue.budget + 1, steps)
    try:
        async with AsyncExitStack() as stack:
            ledger = stack.enter_context(Ledger(directory.path, clock))
            ledger.subscribe(watch)
            ledger.subscribe(on_line)
            observers = start_observers(settings, directory, ledger, clock, stack)
            run = await wire(settings, directory, ledger, clock, stack, shape.force, observers)
            await run.begin()

            async def end_when_done() -> None:
                await watch.done.wait()
                run.interrupt()

            ending = asyncio.create_task(end_when_done())
            await run.train()
            await ending
            await run.conclude()
    finally:
        directory.release()
    if watch.steady is None:
        raise RuntimeError("the run ended before its measurement did")
    return watch.steady


def serialisation_ms(batches: Sequence[TrainBatch]) -> dict[str, float]:
    """Milliseconds per sample to encode a batch for the trainer, to decode it there, and to encode it for the disk."""
    samples = sum(len(batch.samples) for batch in batches)

    def timed(work: Callable[[], object]) -> float:
        started = time.process_time()
        work()
        return 1000 * (time.process_time() - started) / samples

    encoded = [pickle.dumps(lay_out(batch), protocol=5) for batch in batches]
    rows = encoder()
    return {
        "encode for the trainer": timed(lambda: [pickle.dumps(lay_out(batch), protocol=5) for batch in batches]),
        "decode in the trainer": timed(lambda: [pickle.loads(data).arrays() for data in encoded]),
        "encode for the buffer": timed(lambda: [rows.encode(s.rollout) for b in batches for s in b.samples]),
    }
