"""Records a workflow: the times of its steps by stage, beside the plan's expectation, its events, and its trace."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from headway.flow.placement import mode_of
from headway.flow.worker import StageTimes
from headway.records.errors import ConfigurationError, RemoteError, WorkerDied
from headway.records.execution import WORKFLOW_FILE, ExecutionPlan, FlowLine, FlowStep, StageStep
from headway.records.ledger import EventRecord
from headway.records.trace import Span
from headway.runtime.clock import Clock
from headway.runtime.line_file import LineFile
from headway.runtime.worker_slots import WorkerSlot
from headway.telemetry.trace_file import TraceFile, decoded_lines

if TYPE_CHECKING:
    from headway.flow.group import WorkerGroup

WorkerTimes = dict[str, list[StageTimes]]  # stage -> times of its workers, by rank


class StepRecorder:
    """Counts the steps of a workflow, and writes them and the events into the workflow's folder, if it has one."""

    def __init__(self, directory: str | Path | None, clock: Clock, *, resume: bool = False) -> None:
        """``resume``: continue the steps that the folder has. Raises ConfigurationError."""
        self.next_step = 0
        self._clock = clock
        self._opened_s = self._began_s = clock.now()
        self._step = -1
        self._idle_s = 0.0  # idle time of the device locks when the step began
        self._moved_s = 0.0
        self.on_event: Callable[[EventRecord], None] | None = None
        self._file: LineFile | None = None
        self._trace: TraceFile | None = None
        if directory is not None:
            path = Path(directory) / WORKFLOW_FILE
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and not resume:
                raise ConfigurationError(
                    f"directory = {str(directory)!r} has the steps of another workflow; choose a new one, or continue "
                    "them with resume = True"
                )
            self._file = LineFile(path)
            lines = decoded_lines(path, path.read_bytes(), msgspec.json.Decoder(FlowLine).decode)
            self.next_step = max((line.step + 1 for line in lines if isinstance(line, FlowStep)), default=0)
            self._step = self.next_step - 1
            self._trace = TraceFile(directory, clock, time.time())

    def event(self, name: str, detail: str, /, **fields: Any) -> None:
        """Record an event: an `EventCallback`."""
        known = {key: fields.pop(key) for key in list(fields) if key in EventRecord.__struct_fields__}
        time_s = self._clock.now() - self._opened_s
        record = EventRecord(event=name, detail=detail, step=max(0, self._step), time_s=time_s, data=fields, **known)
        self._write(record)
        if self.on_event is not None:
            self.on_event(record)

    def span(self, device: str, participant: str, action: str, start_s: float, end_s: float) -> None:
        """Record that a worker was loaded or offloaded, on the device's track of the trace."""
        if self._trace is not None:
            self._trace.write(
                Span(track=device, name=f"{action} {participant}", start_s=start_s, end_s=end_s, step=self._step)
            )

    def add_move_time(self, seconds: float) -> None:
        """Add the duration of a change of plan before the next step."""
        self._moved_s += seconds

    def begin_step(self, step: int, idle_s: float) -> None:
        """Begin a step. ``idle_s``: idle time of the device locks so far."""
        self._step, self._began_s, self._idle_s = step, self._clock.now(), idle_s

    async def end_step(
        self,
        plan: ExecutionPlan,
        groups: Mapping[str, WorkerGroup],
        times: Callable[[str], Awaitable[StageTimes]],
        idle_s: float,
    ) -> tuple[FlowStep, WorkerTimes]:
        """End the step: ask all workers for their ``times``. Returns the step's record, and these times."""
        now_s = self._clock.now()
        stage_steps: dict[str, StageStep] = {}
        times_by_stage: WorkerTimes = {}
        for stage, group in groups.items():
            stage_times = await asyncio.gather(*(_times(slot, times) for slot in group.slots))
            times_by_stage[stage] = stage_times
            for slot, worker_times in zip(group.slots, stage_times, strict=True):
                self._trace_turns(slot, worker_times)
            placement = plan.stages[stage]
            time_sums = {field: sum(getattr(worker_times, field) for worker_times in stage_times) for field in _SUMMED}
            stage_steps[stage] = StageStep(devices=placement.devices, expected_s=placement.expected_s, **time_sums)
        record = FlowStep(
            step=self._step,
            seconds=now_s - self._began_s,
            mode=mode_of(plan),
            stages=stage_steps,
            expected_s=plan.expected_s,
            lock_idle_s=idle_s - self._idle_s,
            moved_s=self._moved_s,
        )
        self._moved_s = 0.0
        self._write(record)
        return record, times_by_stage

    def _trace_turns(self, slot: WorkerSlot, times: StageTimes) -> None:
        """Put a worker's turns on its device's track."""
        if self._trace is None or slot.live is None:
            return
        shift_s, device = slot.live.clock_offset_s, slot.spec.device
        for turn in times.each:
            start_s, end_s = turn.start_s + shift_s, turn.end_s + shift_s
            self._trace.write(Span(track=device, name=slot.name, start_s=start_s, end_s=end_s, step=self._step))

    def close(self) -> None:
        """Close the files."""
        if self._file is not None:
            self._file.__exit__(None, None, None)
            self._file = None
        if self._trace is not None:
            self._trace.close()

    def _write(self, line: FlowLine) -> None:
        if self._file is not None:
            self._file.append(msgspec.json.encode(line))


_SUMMED = ("busy_s", "data_wait_s", "device_wait_s", "switch_s", "transfer_s", "items", "turns")


async def _times(slot: WorkerSlot, ask: Callable[[str], Awaitable[StageTimes]]) -> StageTimes:
    if slot.live is not None:
        with contextlib.suppress(WorkerDied, RemoteError):
            return await ask(slot.name)
    return StageTimes()
