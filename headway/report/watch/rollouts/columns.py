"""Reads numeric columns of all rollouts of a run. They are cached, and extended as the record grows."""

from __future__ import annotations

import contextlib
import hashlib
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike, NDArray

from headway.records.rollout import ENDINGS
from headway.runtime.user_cache import write_cached
from headway.telemetry.rollouts.columns import ENDED, FINISHED
from headway.telemetry.rollouts.segments import SegmentFile, list_segments

OPEN = len(ENDINGS)  # code of an ending: its index in ENDINGS, or OPEN
FAILED = ENDINGS.index("failed")
BOUNDARIES = ("model", "environment", "sandbox", "reward", "engine", "unknown")
FILE_NAME = "rollouts.npz"  # of the cache
_NUMBERS: dict[str, DTypeLike] = {
    "group": np.int64, "member": np.int32, "reward": np.float64, "solved": np.bool_, "verified": np.bool_,
    "tokens": np.int32, "turns": np.int32, "finished_s": np.float64,
}  # fmt: skip
_DERIVED: dict[str, DTypeLike] = {
    "first_version": np.int32,  # -1: no token was sampled
    "last_version": np.int32,
    "own": np.uint8,  # the rollout's own ending; OPEN: the group's ending counts
    "boundary": np.uint8,  # boundary of its failure, index in BOUNDARIES; 255: it didn't fail
    "task": np.int32,  # index in the table's names
}
TOOL = "\0"  # prefix of tools among the table's names
_TOOLS: dict[str, DTypeLike] = {  # a row for each tool that a rollout called
    "tool_row": np.int64, "tool": np.int32, "tool_calls": np.int32, "tool_errors": np.int32,
}  # fmt: skip
_READ = [*_NUMBERS, "span_versions", "branches", "removal", "failure", "task_id", "tool_names", "tool_errors"]
_ENDED: dict[str, DTypeLike] = {
    "group": np.int64, "step": np.int32, "time_s": np.float64, "ending": np.uint8, "reason": np.int32,
}  # fmt: skip
_BATCHES = 2000  # read by one call in a second or two; further calls read the rest
_KEEP_SHARE, _KEEP_ROWS = 0.1, 20_000  # growth after which the cache is rewritten: share of its rows, and rows

Arrays = dict[str, NDArray[Any]]


class StreamPosition(NamedTuple):
    """The position in a stream: its last batch that was read, and the number of rows up to its end."""

    segment: int = 0
    offset: int = 0  # 0: nothing of this segment was read
    rows: int = 0


class StreamTail:
    """Reads the batches appended to a stream of a record. Reading starts at ``position``, which the caller advances.
    ``problems``: why parts can't be read, by segment."""

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        self.folder, self.position = folder, StreamPosition()
        self.problems: dict[str, str] = {}
        self._schema = schema

    def batches(self, columns: Sequence[str]) -> Iterator[tuple[StreamPosition, int, pa.RecordBatch]]:
        """Yield (position after the batch, number of its first row, batch) for each further batch."""
        position = self.position
        for segment in list_segments(self.folder):
            if segment.number < position.segment:
                continue
            is_resumed = segment.number == position.segment and position.offset > 0
            first_row = position.rows if is_resumed else segment.first
            segment_file = SegmentFile(segment.path, self._schema)
            for offset, batch in segment_file.batches(columns, position.offset if is_resumed else 0):
                if is_resumed:  # the last batch that was read; it ends at ``first_row``
                    is_resumed = False
                    continue
                yield StreamPosition(segment.number, offset, first_row + batch.num_rows), first_row, batch
                first_row += batch.num_rows
            self.problems.pop(segment.path.name, None)
            if segment_file.problem:
                self.problems[segment.path.name] = segment_file.problem

    def identity(self) -> str:
        """Return a text that differs for another record under the same path: a hash of the first segment's start."""
        for segment in list_segments(self.folder)[:1]:
            with contextlib.suppress(OSError), segment.path.open("rb") as file:
                return f"{segment.path.name} {hashlib.sha256(file.read(1 << 14)).hexdigest()}"
        return ""


class RolloutTable(NamedTuple):
    """The rollouts at one moment, with a value of each column for each rollout. Row numbers begin with ``first``; a row
    that the record lacks has member -1."""

    columns: Arrays  # _NUMBERS, _DERIVED, and of its end "ending", "step" (-1: none) and "reason" (-1: its own); _TOOLS
    names: list[str]
    first: int

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    def __len__(self) -> int:
        return len(self.columns["group"])


class RolloutColumns:
    """The columns of a run's record. ``table`` reads the appended rollouts; the cache is written when the record has
    grown by a tenth. If the cache is damaged or belongs to another record, the record is read again."""

    def __init__(self, record: Path, cache: Path | None, begin: StreamPosition = StreamPosition()) -> None:
        """Read the cache. ``record``: RUN/rollouts; ``cache``: None: no cache; ``begin``: first rollout to read."""
        self.finished, self.ended = StreamTail(record / "finished", FINISHED), StreamTail(record / "ended", ENDED)
        self.finished.position, self.first = begin, begin.rows
        self._record, self._path = record, cache and cache / FILE_NAME
        self._names: dict[str, int] = {}
        self._rows: Arrays = {name: np.empty(0, kind) for name, kind in {**_NUMBERS, **_DERIVED, **_TOOLS}.items()}
        self._ends: Arrays = {name: np.empty(0, kind) for name, kind in _ENDED.items()}
        self._table: RolloutTable | None = None
        self.complete = True  # whether the last call has read to the end
        self._count = self._written = begin.rows  # rows that have been read, and rows in the cache
        self._newest: RolloutColumns | None = None
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, EOFError, zipfile.BadZipFile):
            if self._path:
                self._load(self._path)

    @property
    def problems(self) -> list[str]:
        errors = [*self.finished.problems.values(), *self.ended.problems.values()]
        return errors if self.complete else [*errors, f"{self._count:,} rollouts are read so far; try again for more"]

    def table(self) -> RolloutTable:
        """Read and return the rollouts that can be read now."""
        previous_positions, self.complete = (self.finished.position, self.ended.position), True
        self._ends = _append(self._ends, [self._endings(batch) for _, batch in self._fresh(self.ended, ENDED.names)])
        self._rows = _append(self._rows, [self._arrays(row, batch) for row, batch in self._fresh(self.finished, _READ)])
        if self._table is None or previous_positions != (self.finished.position, self.ended.position):
            self._table = self._make_table()
            if self._path and self._count - self._written >= max(_KEEP_ROWS, _KEEP_SHARE * self._written):
                with contextlib.suppress(OSError):  # the next watcher reads the record itself
                    self._store(self._path)
                self._written = self._count
        return self._table

    def newest(self, row: int) -> RolloutColumns | None:
        """Return the columns of the newest rollouts, from ``row`` or before; None: less than a segment of the rollouts
        before them is unread. May be called while another thread reads the table."""
        segments = [segment for segment in list_segments(self.finished.folder) if segment.first <= row][-1:]
        if not segments or segments[0].number <= self.finished.position.segment + 1:
            self._newest = None
        elif self._newest is None or self._newest.first > row:
            start = StreamPosition(segments[0].number, 0, segments[0].first)
            self._newest = RolloutColumns(self._record, None, begin=start)
        return self._newest

    def training(self, group: int) -> tuple[float | None, float | None]:
        """Return the clock when a group's training step could begin (after the step before and its own last rollout),
        and at the group's end; None where there is no step or no end."""
        end_rows, table = np.flatnonzero(self._ends["group"] == group), self.table()
        if not len(end_rows):
            return None, None
        step, times_s = int(self._ends["step"][end_rows[-1]]), self._ends["time_s"]
        previous_times_s = times_s[(self._ends["step"] == step - 1) & (step > 0)]
        begin_times_s = np.append(previous_times_s, table["finished_s"][table["step"] == step])
        return (float(begin_times_s.max()) if step >= 0 and len(begin_times_s) else None), float(times_s[end_rows[-1]])

    def _fresh(self, tail: StreamTail, columns: list[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
        for number, (position, row, batch) in enumerate(tail.batches(columns), start=1):
            yield row, batch
            tail.position = position
            if number == _BATCHES and tail is self.finished:
                self.complete = False
                break

    def _arrays(self, row: int, batch: pa.RecordBatch) -> Arrays:
        """Return the columns of a batch, preceded by empty rows for those lost in a damaged segment before it."""
        missing = row - self._count
        self._count = max(self._count, row + batch.num_rows)
        row, batch = row + max(0, -missing), batch.slice(max(0, -missing))
        arrays = {name: _numpy(batch[name], kind) for name, kind in _NUMBERS.items()}
        arrays["first_version"], arrays["last_version"] = _versions(batch)
        own_endings, boundary_codes = _codes(batch["removal"]), np.full(batch.num_rows, 255, np.uint8)
        for index in np.flatnonzero(batch["failure"].is_valid().to_numpy(zero_copy_only=False)).tolist():
            boundary_codes[index], own_endings[index] = _boundary(batch["failure"][index].as_py()), FAILED
        arrays |= {"own": own_endings, "boundary": boundary_codes, "task": self._name_codes(batch["task_id"])}
        if missing > 0:
            arrays = {name: np.concatenate([np.zeros(missing, array.dtype), array]) for name, array in arrays.items()}
            arrays["member"][:missing] = -1
        return arrays | self._tool_columns(row, batch)

    def _tool_columns(self, row: int, batch: pa.RecordBatch) -> Arrays:
        lengths = _numpy(batch["tool_names"].value_lengths(), np.int64)
        names = self._name_codes(batch["tool_names"].flatten(), TOOL)
        keys, index = np.unique(row + np.repeat(np.arange(len(lengths)), lengths) << 32 | names, return_inverse=True)
        error_flags = np.resize(_numpy(batch["tool_errors"].flatten(), np.bool_), len(names))  # where they are damaged
        counts = [np.bincount(index, weights, len(keys)) for weights in (None, error_flags)]
        typed_columns = zip(_TOOLS.items(), [keys >> 32, keys & 0xFFFFFFFF, *counts], strict=True)
        return {name: values.astype(kind) for (name, kind), values in typed_columns}

    def _endings(self, batch: pa.RecordBatch) -> Arrays:
        raw_columns = {"group": batch["group"], "step": batch["step"].fill_null(-1), "time_s": batch["time_s"]}
        arrays = {name: _numpy(column, _ENDED[name]) for name, column in raw_columns.items()}
        return arrays | {"ending": _codes(batch["ending"]), "reason": self._name_codes(batch["reason"])}

    def _name_codes(self, column: pa.Array, prefix: str = "") -> NDArray[Any]:
        """Return the indices of a column's texts, each with ``prefix``, in the table's names."""
        return _coded(column, lambda text: self._names.setdefault(prefix + text, len(self._names))).astype(np.int32)

    def _make_table(self) -> RolloutTable:
        """Join the rows with their groups' endings; the last ending counts where a group ended twice."""
        groups, last_index = np.unique(self._ends["group"][::-1], return_index=True)
        group_index = np.searchsorted(groups, self._rows["group"])
        group_index[np.append(groups, -1)[group_index] != self._rows["group"]] = len(groups)
        columns, ends_with_group = dict(self._rows), self._rows["own"] == OPEN
        for name, otherwise in (("ending", OPEN), ("step", -1), ("reason", -1)):
            group_values = np.append(self._ends[name][::-1][last_index], np.array(otherwise, _ENDED[name]))
            own_values = self._rows["own"] if name == "ending" else np.array(-1, np.int32)
            columns[name] = np.where(ends_with_group, group_values[group_index], own_values)
        return RolloutTable(columns, list(self._names), self.first)

    def _store(self, path: Path) -> None:
        tails = [(tail.position, tail.problems) for tail in (self.finished, self.ended)]
        header = msgspec.json.encode((self.finished.identity(), tails, list(self._names)))
        arrays: dict[str, Any] = {"header": np.frombuffer(header, np.uint8), **self._rows}
        arrays |= {f"end_{name}": array for name, array in self._ends.items()}
        write_cached(path, lambda file: np.savez(file, **arrays))

    def _load(self, path: Path) -> None:
        with np.load(path) as archive:  # compares checksums
            identity, tails, names = msgspec.json.decode(archive["header"].tobytes())
            if identity != self.finished.identity():
                return
            self._rows = {name: archive[name] for name in self._rows}
            self._ends = {name: archive[f"end_{name}"] for name in self._ends}
        self._count = self._written = len(self._rows["group"])
        self._names = {name: code for code, name in enumerate(names)}
        for tail, (position, problems) in zip((self.finished, self.ended), tails, strict=True):
            tail.position, tail.problems = StreamPosition(*position), problems


def _append(first: Arrays, further: Sequence[Arrays]) -> Arrays:
    if not further:
        return first
    return {name: np.concatenate([array, *(arrays[name] for arrays in further)]) for name, array in first.items()}


def _numpy(column: pa.Array, kind: DTypeLike) -> NDArray[Any]:
    """Convert a column to an array; nulls become 0."""
    filled_column = column.fill_null(False if pa.types.is_boolean(column.type) else 0) if column.null_count else column
    return filled_column.to_numpy(zero_copy_only=False).astype(kind)


def _coded(column: pa.Array, code: Callable[[str], int]) -> NDArray[Any]:
    """Return the code of each of a column's texts; nulls count as ""."""
    texts = column.fill_null("").dictionary_encode()
    return np.array([code(text) for text in texts.dictionary.to_pylist()], int)[texts.indices.to_numpy()]


def _codes(endings: pa.Array) -> NDArray[Any]:
    return _coded(endings, lambda text: ENDINGS.index(text) if text in ENDINGS else OPEN).astype(np.uint8)


def _boundary(failure: str) -> int:
    with contextlib.suppress(msgspec.MsgspecError, ValueError, TypeError, KeyError):
        return BOUNDARIES.index(msgspec.json.decode(failure)["boundary"])
    return len(BOUNDARIES) - 1


def _versions(batch: pa.RecordBatch) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return (first, last) version of each rollout, its branches included; -1: no token was sampled."""
    first, last = _ends_of(batch["span_versions"])
    if batch["branches"].null_count < batch.num_rows:
        branch_counts = batch["branches"].value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        owner_rows = np.repeat(np.arange(batch.num_rows), branch_counts)
        branch_first, branch_last = _ends_of(batch["branches"].flatten().field("span_versions"))
        has_tokens = branch_first >= 0
        first[first < 0] = np.iinfo(np.int32).max
        np.minimum.at(first, owner_rows[has_tokens], branch_first[has_tokens])
        np.maximum.at(last, owner_rows[has_tokens], branch_last[has_tokens])
        first[last < 0] = -1
    return first, last


def _ends_of(lists: pa.ListArray) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return (first, last) value of each list; -1: the list is empty."""
    offsets = lists.offsets.to_numpy()
    values = np.append(_numpy(lists.values, np.int32), np.int32(-1))
    filled = offsets[1:] > offsets[:-1]
    return np.where(filled, values[offsets[:-1]], np.int32(-1)), np.where(filled, values[offsets[1:] - 1], np.int32(-1))
