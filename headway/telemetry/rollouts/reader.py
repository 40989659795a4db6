"""Reader of a run's record of rollouts, which is lazy and lock-free and works during the run or later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from headway.runtime.run_directory import require_schema
from headway.telemetry.rollouts.columns import ENDED, FINISHED, TRAINED
from headway.telemetry.rollouts.segments import FOLDER, SegmentFile, list_segments

_STREAMS = {"finished": FINISHED, "ended": ENDED, "trained": TRAINED}
SequenceKey = tuple[int, int, int]  # group, member, sequence: 0 for the trunk, then the branches


class GroupEnding(NamedTuple):
    """The end of a group, for its members that hadn't left it earlier."""

    ending: str
    reason: str
    step: int | None  # that trained or skipped it
    time_s: float  # clock


class TrainedSequence(NamedTuple):
    """The trainer's values of a sequence's response tokens; each array is [R]."""

    logprobs: np.ndarray  # under the weights each token was trained with; NaN: not computed
    clipped: np.ndarray
    trained: np.ndarray  # the token has loss
    advantages: np.ndarray
    values: np.ndarray | None  # of the critic, in units of reward; NaN: no loss; None: there is no critic


class RolloutRecord:
    """The reader of a run's record, of any size. It locks and writes nothing, and reads only the requested ranges of
    columns. Each call also finds rollouts appended since the last. ``problems``: segments that the last calls couldn't
    read, with reasons.

    Example: ``for row, batch in RolloutRecord(run).batches(["reward"], start=1000): ...``
    """

    def __init__(self, run_dir: str | Path) -> None:
        """Raises ConfigurationError for a run with another schema."""
        require_schema(run_dir)
        self.folder = Path(run_dir) / FOLDER
        self.problems: dict[Path, str] = {}
        self._indices: dict[Path, tuple[int, list[tuple[int, int, int]]]] = {}  # by segment: its size then, its batches

    def exists(self) -> bool:
        """Whether the run has a record."""
        return bool(list_segments(self.folder / "finished"))

    def count(self) -> int:
        """The number of readable rollouts."""
        segments = list_segments(self.folder / "finished")
        if not segments:
            return 0
        return segments[-1].first + sum(rows for _, rows, _ in self._index(segments[-1].path, "group"))

    def session(self) -> dict[str, Any] | None:
        """The metadata of the process that recorded last; None: there is no readable segment."""
        segments = list_segments(self.folder / "finished")
        return next((meta for s in reversed(segments) if (meta := SegmentFile(s.path, FINISHED).metadata())), None)

    def batches(
        self, columns: Sequence[str] | None = None, start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield rollouts ``start`` .. ``stop`` in the order of their arrival, as (number of the first, batch of the
        ``columns`` of `FINISHED`; None: all)."""
        segments = list_segments(self.folder / "finished")
        for segment_index, segment in enumerate(segments):
            is_earlier = segment_index + 1 < len(segments) and segments[segment_index + 1].first <= start
            if is_earlier or (stop is not None and segment.first >= stop):
                continue
            first_row = segment.first
            for offset, batch_rows, _ in self._index(segment.path, "group"):
                skipped_rows = max(0, start - first_row)
                kept_rows = (batch_rows if stop is None else min(batch_rows, stop - first_row)) - skipped_rows
                for batch in self._read(segment.path, columns, offset) if kept_rows > 0 else ():
                    yield first_row + skipped_rows, batch.slice(skipped_rows, kept_rows)
                first_row += batch_rows

    def endings(self) -> dict[int, GroupEnding]:
        """The ends of all ended groups, by group."""
        ending_by_group: dict[int, GroupEnding] = {}
        for segment in list_segments(self.folder / "ended"):
            for _, batch in self._scan(segment.path, ENDED.names):
                groups, *other_columns = (column.to_pylist() for column in batch.columns)
                ending_by_group.update(zip(groups, map(GroupEnding, *other_columns), strict=True))
        return ending_by_group

    def trained(self, step: int) -> dict[SequenceKey, TrainedSequence]:
        """The trainer's values of a step's samples; a replayed step has those of its last replay."""
        sequence_by_key: dict[SequenceKey, TrainedSequence] = {}
        for segment in list_segments(self.folder / "trained"):
            for offset in [offset for offset, _, of_step in self._index(segment.path, "step") if of_step == step]:
                for batch in self._read(segment.path, TRAINED.names, offset):
                    keys = zip(*(batch[name].to_pylist() for name in ("group", "member", "sequence")), strict=True)
                    columns = [_arrays(batch[name]) for name in TrainedSequence._fields]
                    sequence_by_key.update(zip(keys, map(TrainedSequence, *columns), strict=True))
        return sequence_by_key

    def _index(self, path: Path, column: str) -> list[tuple[int, int, int]]:
        """The (offset, rows, first value of ``column``) of each of a segment's batches."""
        size = path.stat().st_size
        cached_size, index = self._indices.get(path, (-1, []))
        if cached_size != size:
            index = [(start, b.num_rows, b[column][0].as_py()) for start, b in self._scan(path, [column]) if b.num_rows]
            self._indices[path] = (size, index)
        return index

    def _scan(self, path: Path, columns: Sequence[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
        segment = SegmentFile(path, _STREAMS[path.parent.name])
        yield from segment.batches(columns)
        self.problems.pop(path, None)
        if segment.problem:
            self.problems[path] = segment.problem

    def _read(self, path: Path, columns: Sequence[str] | None, offset: int) -> Iterator[pa.RecordBatch]:
        """Yield the batch at ``offset``, or nothing if it can't be read."""
        segment = SegmentFile(path, _STREAMS[path.parent.name])
        for _, batch in segment.batches(columns, offset):
            yield batch
            return
        self.problems[path] = segment.problem


def _arrays(column: pa.Array) -> list[Any]:
    """Each row of a list column as an array; of one that the record lacks, None."""
    if column.null_count:
        return [None] * len(column)
    values = column.flatten().to_numpy(zero_copy_only=False)
    return np.split(values, np.cumsum(column.value_lengths().to_numpy())[:-1])
