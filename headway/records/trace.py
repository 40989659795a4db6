"""Lines of a run's trace (``RUN/trace.jsonl``): what ran when. Times are seconds of the session's monotonic clock."""

from __future__ import annotations

import msgspec

from headway.records.generation import EngineLoad
from headway.records.node import NodeConditions


class TraceSession(msgspec.Struct, frozen=True, kw_only=True, tag="session", tag_field="kind"):
    """A process starts (or resumes) the run; gives the clock of the lines that follow."""

    clock_s: float  # the clock ...
    unix_s: float  # ... and the time of day at the same moment, seconds since 1970


class Span(msgspec.Struct, frozen=True, kw_only=True, tag="span", tag_field="kind"):
    """An activity of one worker, from start to end. Spans of one track don't overlap."""

    track: str  # generator-0, trainer-0, verifier-0, weights, evaluation
    name: str  # busy, idle, update, wait, compute, publish, checkpoint, score, ...
    start_s: float
    end_s: float
    step: int = -1  # trainer version before the step it belongs to; -1: none


class EngineStep(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Steps of an engine in a tenth of a second, added up, or one that took longer, as an array in this order."""

    end_s: float  # of the last one
    busy_s: float  # inside them
    steps: int  # 0: this engine doesn't count them
    tokens: int  # made by them
    running: int  # requests behind them that hold a slot
    kv_used_tokens: int
    version: int  # of the weights


class EngineSteps(msgspec.Struct, frozen=True, kw_only=True, tag="engine", tag_field="kind"):
    """The steps of a replica's engine in about the last second."""

    track: str  # generator-0
    rows: tuple[EngineStep, ...]

    def shifted(self, shift_s: float) -> EngineSteps:
        """Return these steps on a clock that is ``shift_s`` ahead."""
        return EngineSteps(
            track=self.track, rows=tuple([msgspec.structs.replace(row, end_s=row.end_s + shift_s) for row in self.rows])
        )


class RolloutTrace(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A member of a finished group, as an array in this order."""

    member: int
    first_token_s: float  # 0: it has none
    generated_s: float
    finished_s: float  # verified
    verify_s: float  # inside the verifier
    tokens: int
    first_version: int  # -1: no token
    last_version: int
    reward: float
    resumes: int
    reprefills: int
    failure: str  # boundary; "" when valid


class GroupTrace(msgspec.Struct, frozen=True, kw_only=True, tag="group", tag_field="kind"):
    """A group whose members are verified and committed."""

    index: int
    task: str  # its id
    admitted_s: float
    admitted_version: int
    finished_s: float
    rollouts: tuple[RolloutTrace, ...]


class GroupEnd(msgspec.Struct, frozen=True, kw_only=True, tag="end", tag_field="kind"):
    """A group ended. One that never finished (``finished`` false) has no GroupTrace."""

    index: int
    ending: str
    step: int  # trainer version: of the step that trained it, or when it ended
    time_s: float
    admitted_s: float
    finished: bool = True


class StepTrace(msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="kind"):
    """A training step ended; ``start_s`` is the end of the one before."""

    step: int  # version before it
    version: int  # after it
    start_s: float
    end_s: float
    rank_compute_s: tuple[float, ...] = ()  # by rank
    samples: int = 0
    skipped: bool = False


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a worker process at one moment."""

    name: str
    up: bool
    restarts: int = 0  # since this process of the run began
    device: str = ""  # a replica's or a rank's


class QueueSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag="pulse", tag_field="kind"):
    """The queue and the workers at one moment, about once a second."""

    time_s: float
    version: int
    applied_version: int
    open_groups: int
    running_groups: int
    parked_groups: int
    buffered_groups: int
    oldest_age_s: float
    engines: EngineLoad = EngineLoad()
    workers: tuple[WorkerState, ...] = ()
    nodes: tuple[NodeConditions, ...] = ()  # conditions of the run's machines, where it has several


class Mark(msgspec.Struct, frozen=True, kw_only=True, tag="mark", tag_field="kind"):
    """An event of the ledger, at its place in the trace."""

    event: str
    detail: str
    time_s: float


TraceLine = TraceSession | Span | EngineSteps | GroupTrace | GroupEnd | StepTrace | QueueSnapshot | Mark
