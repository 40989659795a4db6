"""The control loop: the ledger, and (later) the knobs."""

from __future__ import annotations

from headway.orchestrator.context import RunContext
from headway.orchestrator.state import Signal
from headway.records.ledger import StepRecord
from headway.runtime.channel import Channel


class Control:
    """Writes each step's record.

    Consumes: the records of completed steps (train loop's channel); adds what the engines say.
    Waits for: the engines' statistics.
    Unblocked by: the train loop.
    """

    def __init__(self, run: RunContext, completed: Channel[StepRecord]) -> None:
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

    async def _write(self, record: StepRecord) -> None:
        run = self._run
        run.record(run.meter.with_engines(record, await run.generator.statistics()))
