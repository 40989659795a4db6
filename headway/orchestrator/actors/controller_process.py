"""Evaluates the controller's model in a process of its own with the lowest CPU priority.

A decision simulates the queue some dozen times, which takes a tenth of a second or more of one core. In the
orchestrator's process the loops would wait for it. Its CPU time is reported: on a machine whose cores are all busy,
generator and trainer lose some of it even so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headway.records.errors import WorkerDied
from headway.records.ledger import StepRecord
from headway.runtime.clock import Clock
from headway.runtime.devices import every_core
from headway.runtime.worker_slots import WorkerSlot
from headway.runtime.workers import Launcher, WorkerHandle, WorkerSpec

if TYPE_CHECKING:
    from headway.control.tuning.controller import ControllerState, Decision
    from headway.control.tuning.knob_search import ControlLimits
    from headway.runtime.child import WorkerContext

_NICENESS = 19  # niceness: it gets the CPU time that no other process wants, and on cores that are all busy some 1.5 %


class ControllerWorker:
    """Worker class: evaluates the controller."""

    def __init__(self, context: WorkerContext) -> None:
        os.nice(_NICENESS)
        from headway.control.tuning.controller import decide  # after nice: the imports run at low priority, too

        self._decide = decide

    def decide(
        self, state: ControllerState, records: Sequence[StepRecord], limits: ControlLimits
    ) -> tuple[Decision, float]:
        """The result of ``headway.control.tuning.controller.decide``, and the CPU seconds it took."""
        began_s = time.process_time()
        return self._decide(state, records, limits), time.process_time() - began_s


class ControllerProcess:
    """Runs the controller in a process that is started when it is first needed, and again when it has died."""

    def __init__(self, launcher: Launcher, clock: Clock, log_folder: str | Path | None = None) -> None:
        spec = WorkerSpec(
            name="controller",
            factory="headway.orchestrator.actors.controller_process:ControllerWorker",
            device=every_core(),
            log_path=Path(log_folder) / "controller.log" if log_folder else None,
        )
        self._slot = WorkerSlot(spec, launcher, clock)  # its caller reports its deaths

    @property
    def worker(self) -> WorkerHandle | None:
        return self._slot.worker

    async def __call__(
        self, state: ControllerState, records: Sequence[StepRecord], limits: ControlLimits
    ) -> tuple[Decision, float]:
        """The decision of ``decide``, and the CPU seconds it took. Raises WorkerDied when the process can't be started
        or dies meanwhile."""
        worker = self._slot.live or await self._slot.restart()
        if worker is None:
            raise WorkerDied(self._slot.name, f"not started: {self._slot.fault}") from self._slot.fault
        return await worker.call("decide", state, records, limits)

    async def stop(self) -> None:
        """Stop the process; a decision under way is lost."""
        await self._slot.stop(0.0)
