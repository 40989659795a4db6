"""Reading a run's record of rollouts: lazily, without locks, during the run or later."""

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
    """The end of a group: of its members that hadn't left it before."""

    ending: str
    reason: str
    step: int | None  # that trained or skipped it
    time_s: float  # clock


class TrainedSequence(NamedTuple):
    """The trainer's values of a sequence's response tokens, [R] each."""

    logprobs: np.ndarray  # under the weights each token was trained with; NaN: not computed
    clipped: np.ndarray
    trained: np.ndarray  # loss was taken of it
    advantages: np.ndarray


class RolloutRecord:
    """A run's record. Nothing is locked or written, and only what is asked for is read: ranges of columns of a record
    of any size. What is appended later is found by the next call. ``problems``: what the last calls couldn't read.

    Example: ``for row, batch in RolloutRecord(run).batches(["reward"], start=1000): ...``
    """

    def __init__(self, run_dir: str | Path) -> None:
        """Raises ConfigurationError for a run of another schema."""
        require_schema(run_dir)
        self.folder = Path(run_dir) / FOLDER
        self.problems: dict[Path, str] = {}
        self._indices: dict[Path, tuple[int, list[tuple[int, int, int]]]] = {}  # by segment: its size then, its batches

    def exists(self) -> bool:
        """Whether the run has a record."""
        return bool(list_segments(self.folder / "finished"))

    def count(self) -> int:
        """Rollouts that can be read."""
        segments = list_segments(self.folder / "finished")
        if not segments:
            return 0
        return segments[-1].first + sum(rows for _, rows, _ in self._index(segments[-1].path, "group"))

    def session(self) -> dict[str, Any] | None:
        """The metadata of the process that recorded last; None where there is no segment, or none that can be read."""
        segments = list_segments(self.folder / "finished")
        return next((found for s in reversed(segments) if (found := SegmentFile(s.path, FINISHED).metadata())), None)

    def batches(
        self, columns: Sequence[str] | None = None, start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield rollouts ``start`` .. ``stop`` in the order of their arrival: (number of the first, batch of
        ``columns.FINISHED``, those of ``columns``)."""
        segments = list_segments(self.folder / "finished")
        for number, segment in enumerate(segments):
            before = number + 1 < len(segments) and segments[number + 1].first <= start
            if before or (stop is not None and segment.first >= stop):
                continue
            row = segment.first
            for offset, rows, _ in self._index(segment.path, "group"):
                skipped = max(0, start - row)
                kept = (rows if stop is None else min(rows, stop - row)) - skipped
                for batch in self._read(segment.path, columns, offset) if kept > 0 else ():
                    yield row + skipped, batch.slice(skipped, kept)
                row += rows

    def endings(self) -> dict[int, GroupEnding]:
        """Every ended group's end."""
        found: dict[int, GroupEnding] = {}
        for segment in list_segments(self.folder / "ended"):
            for _, batch in self._scan(segment.path, ENDED.names):
                groups, *rest = (column.to_pylist() for column in batch.columns)
                found.update(zip(groups, map(GroupEnding, *rest), strict=True))
        return found

    def trained(self, step: int) -> dict[SequenceKey, TrainedSequence]:
        """The trainer's values of a step's samples; of a step that was replayed those of the last time."""
        found: dict[SequenceKey, TrainedSequence] = {}
        for segment in list_segments(self.folder / "trained"):
            for offset in [at for at, _, of_step in self._index(segment.path, "step") if of_step == step]:
                for batch in self._read(segment.path, TRAINED.names, offset):
                    keys = zip(*(batch[name].to_pylist() for name in ("group", "member", "sequence")), strict=True)
                    lists = [_arrays(batch[name]) for name in TrainedSequence._fields]
                    found.update(zip(keys, map(TrainedSequence, *lists), strict=True))
        return found

    def _index(self, path: Path, column: str) -> list[tuple[int, int, int]]:
        """(offset, rows, first value of ``column``) of a segment's batches."""
        size = path.stat().st_size
        known = self._indices.get(path)
        if known is None or known[0] != size:
            found = [(at, b.num_rows, b[column][0].as_py()) for at, b in self._scan(path, [column]) if b.num_rows]
            self._indices[path] = known = (size, found)
        return known[1]

    def _scan(self, path: Path, columns: Sequence[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
        file = SegmentFile(path, _STREAMS[path.parent.name])
        yield from file.batches(columns)
        self.problems.pop(path, None)
        if file.problem:
            self.problems[path] = file.problem

    def _read(self, path: Path, columns: Sequence[str] | None, offset: int) -> Iterator[pa.RecordBatch]:
        """The batch at ``offset``, or none where it can't be read."""
        file = SegmentFile(path, _STREAMS[path.parent.name])
        for _, batch in file.batches(columns, offset):
            yield batch
            return
        self.problems[path] = file.problem


def _arrays(column: pa.Array) -> list[np.ndarray]:
    """Each row of a list column as an array."""
    values = column.flatten().to_numpy(zero_copy_only=False)
    return np.split(values, np.cumsum(column.value_lengths().to_numpy())[:-1])
