"""The control loop: the ledger, and (later) the knobs."""

from __future__ import annotations

from headway.orchestrator.context import RunContext
from headway.orchestrator.state import Signal
from headway.orchestrator.train_loop import CompletedStep
from headway.runtime.channel import Channel


class Control:
    """Writes each step's record.

    Consumes: completed steps (train loop's channel).
    Waits for: the engines' statistics.
    Unblocked by: the train loop.
    """

    def __init__(self, run: RunContext, completed: Channel[CompletedStep]) -> None:
        self._run = run
        self._completed = completed
        self._written = 0
        self._flushed = Signal()

    async def loop(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await self._write(await self._completed.get())
            self._written += 1
            self._flushed.notify()

    async def flushed(self, steps: int) -> None:
        """Wait until the records of ``steps`` completed steps are written."""
        while self._written < steps:
            await self._flushed.wait(self._flushed.count)

    async def _write(self, step: CompletedStep) -> None:
        run = self._run
        record = run.meter.step_record(
            report=step.report,
            trained=step.groups,
            state=run.state,
            engines=await run.generator.statistics(),
            buffer_capacity_groups=run.buffer.statistics().capacity,
            time_s=run.time_s(),
        )
        run.record(record)
