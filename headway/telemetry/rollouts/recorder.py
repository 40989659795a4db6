"""The recorder of a run's rollouts, which the buffer's commits feed: ``RUN/rollouts/finished`` and ``ended``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from headway.config.schema import LedgerConfig
from headway.records.errors import StorageFailed
from headway.records.rollout import FinishedGroup, Rollout
from headway.runtime.clock import Clock
from headway.telemetry.rollouts.columns import ENDED, FINISHED, ended_batch, finished_batch, is_recorded, recorded_share
from headway.telemetry.rollouts.reader import RolloutRecord
from headway.telemetry.rollouts.segments import FOLDER, SegmentWriter

FLUSH_S = 2.0  # age at which unwritten rollouts are written when a group finishes or a step ends
FLUSH_TOKENS = 1 << 18  # ... and their tokens, about 4 MB
EVENT_ROLLOUTS_ENDED = "rollouts_ended"  # recording has ended; detail: the reason
EVENT_ROLLOUTS_LOST = "rollouts_lost"  # data: rollouts that an earlier process finished and didn't record

CountRollouts = Callable[[float], int]  # rollouts, in the accounting, of the groups in a recorded share
ListEndings = Callable[[], Iterable[tuple[int, str, str, int | None]]]  # the accounting's (group, ending, reason, step)


class RolloutRecorder:
    """Records each rollout once, in the order in which the buffer commits them, and each group's end.

    Lifecycle: *made* -> ``begin`` (starts a new segment) -> *recording* -> *ended*, by ``close`` or an error, which
    calls ``on_event``. It never raises, since its failures must not reach the run. Rollouts and endings are written
    when a group finishes or a step ends, FLUSH_S or FLUSH_TOKENS after the last write, because a rollout in a small
    batch costs several times as much.
    """

    def __init__(
        self, run_dir: str | Path, settings: LedgerConfig, clock: Clock, on_event: Callable[..., None], **limits: int
    ) -> None:
        """``on_event(name, detail, **data)``. ``limits``: those of `SegmentWriter`."""
        self._folder = Path(run_dir) / FOLDER
        self._share = recorded_share(settings)
        self._limits: dict[str, Any] = {"max_bytes": settings.rollouts_max_bytes, **limits}
        self._clock = clock
        self._on_event = on_event
        self._finished: SegmentWriter | None = None  # None: not recording
        self._ended: SegmentWriter | None = None
        self._rows = 0  # written
        self._arrivals: list[tuple[Sequence[Rollout], str]] = []  # of a group, with its task's id
        self._arrived = 0  # rollouts of them
        self._reached: dict[int, int] = {}  # position among the arrivals -> tokens, of those that haven't finished
        self._ends: list[tuple[int, str, str, int | None, float]] = []
        self._tokens = 0  # unwritten, about
        self._written_s = clock.now()

    def begin(self, counted: CountRollouts, ends: ListEndings = lambda: ()) -> None:
        """Begin to record after the rows of an earlier process of the run, report how many of its finished rollouts are
        missing, and record the ends that it hadn't written."""
        if self._share:
            self._guarded(self._begin, counted, ends)

    def finished(self, group: FinishedGroup) -> None:
        """Record the members of a committed group, if it is in the share of groups that is recorded."""
        if self._is_recorded(group.group.index):
            self._add_arrivals(group.rollouts, group.group.task.task_id)

    def unfinished(self, index: int, task: str, reached: Mapping[int, int]) -> None:
        """Record the members of a group that ended before it finished. ``reached``: tokens by member."""
        if self._is_recorded(index):
            members = [Rollout(group=index, member=m, prompt_ids=(), finish_reason="abort") for m in reached]
            self._reached |= dict(enumerate(reached.values(), start=self._arrived))
            self._add_arrivals(members, task)

    def ended(self, groups: Iterable[int], ending: str, reason: str, step: int | None) -> None:
        """Record the end of ``groups``. ``step``: the step that trained or skipped them, if any."""
        now_s = self._clock.now()
        self._ends += [(index, ending, reason, step, now_s) for index in groups if self._is_recorded(index)]
        if step is not None and self._due:
            self.flush()

    def flush(self) -> None:
        """Write all arrived rollouts and endings."""
        if self._finished is not None:
            self._guarded(self._write)

    def close(self) -> None:
        """Write the rest and seal both segments; a second call is a no-op."""
        self.flush()
        for writer in (self._finished, self._ended):
            if writer is not None:
                writer.close()
        self._finished = self._ended = None

    def _is_recorded(self, index: int) -> bool:
        return self._finished is not None and (self._share == 1 or bool(is_recorded(index, self._share)))

    @property
    def _due(self) -> bool:
        return self._tokens >= FLUSH_TOKENS or self._clock.now() - self._written_s >= FLUSH_S

    def _guarded(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:  # the boundary to the record: its failure must not affect the run
            self._finished = self._ended = None
            self._arrivals, self._ends = [], []
            cause_text = str(error) if isinstance(error, StorageFailed) else f"{type(error).__name__}: {error}"
            self._on_event(EVENT_ROLLOUTS_ENDED, f"no further rollout is recorded: {cause_text}")

    def _begin(self, counted: CountRollouts, ends: ListEndings) -> None:
        record = RolloutRecord(self._folder.parent)
        self._rows = record.count()
        previous_session = record.session()
        counted_rollouts = counted(self._share)
        if previous_session is not None:
            finished_since = counted(previous_session["share"]) - previous_session["counted"]
            if (lost := finished_since - (self._rows - previous_session["rows"])) > 0:
                detail = f"{lost} rollouts that had finished before this resume were not written yet, or not recorded"
                self._on_event(EVENT_ROLLOUTS_LOST, detail, rollouts=lost)
        metadata = {"share": self._share, "counted": counted_rollouts, "rows": self._rows}
        self._finished = SegmentWriter(
            self._folder / "finished", FINISHED, first=self._rows, metadata=metadata, **self._limits
        )
        self._ended = SegmentWriter(self._folder / "ended", ENDED, **self._limits)
        pa.array([])  # imports pandas where it is installed, whose 0.2 s would delay the run later
        self._written_s = now_s = self._clock.now()
        if previous_session is not None:
            recorded = record.endings()
            self._ends = [(*row, now_s) for row in ends() if row[0] not in recorded and self._is_recorded(row[0])]
            self._write()

    def _add_arrivals(self, rollouts: Sequence[Rollout], task: str) -> None:
        self._arrivals.append((rollouts, task))
        self._arrived += len(rollouts)
        self._tokens += len(rollouts) * sum(len(rollout.response_ids) for rollout in rollouts[:1])  # about
        if self._due:
            self.flush()

    def _write(self) -> None:
        assert self._finished is not None, "it records"
        arrivals, self._arrivals, tokens_by_position, self._reached = self._arrivals, [], self._reached, {}
        self._arrived, self._tokens, self._written_s = 0, 0, self._clock.now()
        if arrivals:
            rollouts = [rollout for members, _ in arrivals for rollout in members]
            task_ids = [task for members, task in arrivals for _ in members]
            self._finished.append(finished_batch(rollouts, task_ids, tokens_by_position), self._rows)
            self._rows += len(rollouts)
        ending_rows, self._ends = self._ends, []
        if ending_rows and self._ended is not None:
            self._ended.append(ended_batch(ending_rows), 0)
