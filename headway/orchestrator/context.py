"""Everything the loops work with: clients, buffer, tasks, clock and the shared state."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headway.buffer.store import GroupBuffer
from headway.config.schema import Experiment
from headway.control.tuning.controller import ControllerState, Decision
from headway.control.tuning.knob_search import ControlLimits
from headway.flow.device_locks import DeviceLocks
from headway.generator.client import GeneratorPool
from headway.models.hf.prompts import PromptMaker
from headway.orchestrator.parking import Parking
from headway.orchestrator.run_device_locks import RunMemory
from headway.orchestrator.state import RunState
from headway.orchestrator.step_metrics import StepMetrics
from headway.orchestrator.task_selection import TaskSelector
from headway.records.clients import Generator, PromptCodec, RolloutMaker, TeacherScores, Trainer, Verifier, Watch
from headway.records.errors import WorkerDied
from headway.records.ledger import EventRecord, LedgerLine, StepRecord
from headway.records.node import NodeConditions
from headway.records.rollout import Group, Rollout
from headway.records.sandbox_statistics import SandboxStatistics
from headway.records.task import Task
from headway.runtime.clock import Clock
from headway.runtime.stalls.waits import Waits
from headway.runtime.workers import death_fields
from headway.tasks.drawn_demonstrations import Demonstrations
from headway.trainer.client import TrainerClient

Decide = Callable[
    [ControllerState, Sequence[StepRecord], ControlLimits], Coroutine[Any, Any, tuple[Decision, float]]
]  # and CPU seconds


async def no_sandboxes() -> SandboxStatistics:
    """The empty sandbox statistics of a run without sandboxes."""
    return SandboxStatistics()


async def no_copy() -> None:
    """Return at once: the accounting has no replica."""


class EarlyPruning(Protocol):
    """Ends rollouts early while their group generates (orchestrator/pruning.py)."""

    def watch_of(self, group: Group, member: int) -> Watch: ...

    async def finished(self, group: Group, rollout: Rollout) -> Rollout: ...

    def forget(self, group: int) -> None: ...


@dataclass(frozen=True, kw_only=True)
class WorkerPools:
    """The generator and the trainer of a run whose placement may change, and the experiment as it was configured."""

    generator: GeneratorPool
    trainer: TrainerClient
    configured: Experiment


@dataclass
class RunContext:
    """The actors of one run. The orchestrator knows them by their Protocols only (DESIGN, section 3)."""

    experiment: Experiment
    clock: Clock
    state: RunState
    generator: Generator
    trainer: Trainer
    verifier: Verifier
    buffer: GroupBuffer
    task_selector: TaskSelector
    tokenizer: PromptCodec
    prompts: PromptMaker
    rollouts: RolloutMaker
    parking: Parking
    waits: Waits
    locks: DeviceLocks
    memory: RunMemory | None  # None: trainer and replicas stay in memory
    meter: StepMetrics
    record: Callable[[LedgerLine], None]
    keep_sample: Callable[[dict[str, object]], None]
    directory: str
    training_data: dict[str, int | str] = field(default_factory=dict)  # counts and digests: see `training_data`
    evaluation_tasks: dict[str, list[Task]] = field(default_factory=dict)  # split -> tasks
    teachers: TeacherScores | None = None  # None: no rule has any
    demonstrations: Demonstrations | None = None  # trained beside rollouts; None: none are
    pruning: EarlyPruning | None = None  # None: no rollout is ended early
    controller: Decide | None = None  # decides in another process; None: in this one, and the loops wait
    nodes: Callable[[], Iterable[NodeConditions]] = tuple  # conditions of the machines of a run on several
    worker_pools: WorkerPools | None = None  # None: the placement stays as it is
    sandboxes: Callable[[], Awaitable[SandboxStatistics]] = no_sandboxes  # all of them, as they are now
    replicated: Callable[[], Awaitable[None]] = no_copy  # waits until the accounting's replica has every commit
    started_s: float = 0.0  # clock when this process began the run
    start_s: float = 0.0  # seconds that its actors took to start; 0.0: not known

    def time_s(self) -> float:
        """Seconds since the run (or its resume) started."""
        return self.clock.now() - self.started_s

    def event(self, name: str, detail: str = "", /, **fields: Any) -> None:
        """Record an event now; ``fields`` that `EventRecord` doesn't have are its ``data``."""
        event_data = {key: field for key, field in fields.items() if key not in EventRecord.__struct_fields__}
        record_fields = {key: field for key, field in fields.items() if key not in event_data}
        stamp = {"step": self.state.version, "time_s": self.time_s()}
        self.record(EventRecord(event=name, detail=detail, data=event_data, **stamp, **record_fields))

    def died(self, death: WorkerDied) -> None:
        """Record the death of a worker that no pool keeps: the trainer's, the controller's."""
        self.event("worker_died", f"{death.worker}: {death.cause}", **death_fields(death))
