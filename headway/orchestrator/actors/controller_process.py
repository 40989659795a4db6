"""Where the controller looks at its model: a process of its own, which gives way to everybody.

A look simulates the queue some dozen times: a tenth of a second or more of one core. In the orchestrator's process the
loops would wait for it. Its CPU time is told, as on a machine whose cores are all busy the two sides miss some of it
even so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headway.records.ledger import StepRecord
from headway.runtime.devices import every_core
from headway.runtime.workers import Launcher, Worker, WorkerSpec

if TYPE_CHECKING:
    from headway.control.tuning.controller import ControllerState, Decision
    from headway.control.tuning.knob_search import ControlLimits
    from headway.runtime.child import WorkerContext

_LAST = 19  # niceness: it gets what nobody else wants, and on cores that are all busy some 1.5 %


class ControllerWorker:
    """Worker class."""

    def __init__(self, context: WorkerContext) -> None:
        os.nice(_LAST)
        from headway.control.tuning.controller import decide  # only now: the imports give way, too

        self._decide = decide

    def decide(
        self, state: ControllerState, records: Sequence[StepRecord], limits: ControlLimits
    ) -> tuple[Decision, float]:
        """See ``headway.control.tuning.controller.decide``; and the CPU seconds that took."""
        began_s = time.process_time()
        return self._decide(state, records, limits), time.process_time() - began_s


class ControllerProcess:
    """Asks the controller in a process that is started when it is first needed, and again when it died."""

    def __init__(self, launcher: Launcher, log_folder: str | Path | None = None) -> None:
        self._launcher = launcher
        self._log_path = Path(log_folder) / "controller.log" if log_folder else None
        self.worker: Worker | None = None

    async def __call__(
        self, state: ControllerState, records: Sequence[StepRecord], limits: ControlLimits
    ) -> tuple[Decision, float]:
        """What ``decide`` says, and the CPU seconds it took. Raises WorkerDied when the process can't be
        started or dies meanwhile."""
        if self.worker is None or not self.worker.alive:
            spec = WorkerSpec(
                name="controller",
                factory="headway.orchestrator.actors.controller_process:ControllerWorker",
                device=every_core(),
                log_path=self._log_path,
            )
            self.worker = await self._launcher.start(spec)
        return await self.worker.call("decide", state, records, limits)

    async def stop(self) -> None:
        """End the process; a look that is underway counts for nothing."""
        if self.worker is not None and self.worker.alive:
            self.worker.kill("stopped")
            await self.worker.died
