"""Stores spans of many tracks in a file, and reads any window of ten million spans at a resolution in milliseconds."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

SEAL_ROWS = 1 << 16
_BLOCK_ROWS = 16
_LATE_S = 5.0  # a worker's spans arrive up to a snapshot interval later than those of another worker on its device
_MIN_GAP_S = 1e-6  # spans with a smaller gap were split only by a snapshot
_TIMES, _CODES = [("start", "f8"), ("end", "f8")], [("track", "i4"), ("name", "i4")]
_ROW = np.dtype([*_TIMES, *_CODES, ("number", "i4"), ("member", "i4")])
_BLOCK = np.dtype([*_TIMES, *_CODES, ("work", "f8"), ("row", "i8"), ("count", "i4")])

Row = tuple[float, float, int, int, int, int]
"""A span: start and end, seconds; track; code of its name; number and member, -1 for none."""
Flags = NDArray[np.bool_]


class StoredSpans(msgspec.Struct, frozen=True, kw_only=True):
    """The valid sizes of a store's files in rows and blocks, and the rows that aren't in the files yet."""

    rows: int = 0
    blocks: int = 0
    tail: bytes = b""


class SpanStore:
    """Spans as rows, sorted by track and start, that don't overlap.

    Lifecycle: ``restore``, then ``add`` and ``window``. A row is first in the *tail* in memory, where new rows are
    sorted in; then it is *sealed*: at least SEAL_ROWS rows are appended to a file, with a block for each _BLOCK_ROWS
    rows of a track. A block has their interval, their time of work and the name that took longest. A window reads
    blocks where they are narrower than its pixels, and rows elsewhere.
    """

    def __init__(self, rows: Path, blocks: Path) -> None:
        """Open the two files. Temporary ones are used where another process has locked them, or writing fails."""
        self.kept = True  # whether the files are permanent
        try:
            self._files: Sequence[BinaryIO] = [path.open("a+b") for path in (rows, blocks)]
            fcntl.flock(self._files[0], fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed
        except OSError:
            self.kept, self._files = False, [tempfile.TemporaryFile(), tempfile.TemporaryFile()]  # noqa: SIM115

    def restore(self, stored: StoredSpans) -> None:
        """Start from a state of the files, and truncate them to it. Raises ValueError when they are shorter."""
        self.stored = stored
        self._set_tail(np.frombuffer(stored.tail, _ROW))
        sizes = stored.rows * _ROW.itemsize, stored.blocks * _BLOCK.itemsize
        for file, size in zip(self._files, sizes, strict=True):
            if file.seek(0, 2) < size:
                raise ValueError("the cache is shorter than its recorded state")
            file.truncate(size)
            file.seek(size)
        self._files[1].seek(0)
        self._blocks: dict[int, list[NDArray[Any]]] = {}
        self._add_blocks(np.frombuffer(self._files[1].read(), _BLOCK))

    def _add_blocks(self, blocks: NDArray[Any]) -> None:
        blocks = blocks[np.argsort(blocks["track"], kind="stable")]
        for track_blocks in np.split(blocks, np.flatnonzero(np.diff(blocks["track"])) + 1):
            self._blocks.setdefault(int(track_blocks["track"][0]) if len(track_blocks) else -1, []).append(track_blocks)

    def _set_tail(self, tail: NDArray[Any]) -> None:
        self._tail, self._tail_tracks = tail, tail["track"].copy()

    def add(self, fresh: Sequence[Row], works: Flags, to_s: float) -> bool:
        """Add rows; returns whether the tail was sealed. ``works``: whether each name is work; ``to_s``: the latest end
        of all spans. Raises OSError when the disk is full."""
        self._set_tail(_sort_and_join(np.concatenate((self._tail, np.array(fresh, _ROW)))))
        is_late = self._tail["end"] > to_s - _LATE_S
        is_late &= len(is_late) < 2 * SEAL_ROWS
        rows, tail_rows = self._tail[~is_late], self._tail[is_late]
        if len(rows) < SEAL_ROWS:
            return False
        blocks = _blocks(rows, works, self.stored.rows)
        for file, array in zip(self._files, (rows, blocks), strict=True):
            file.write(array.tobytes())
            file.flush()
        sizes = {"rows": self.stored.rows + len(rows), "blocks": self.stored.blocks + len(blocks)}
        self.stored = StoredSpans(**sizes, tail=tail_rows.tobytes())
        self._set_tail(tail_rows)
        self._add_blocks(blocks)
        return True

    def window(self, track: int, from_s: float, to_s: float, pixels: int, works: Flags) -> dict[str, list[Any]]:
        """Return at most ``pixels`` spans of a track between two moments; times are seconds since ``from_s``. Spans
        narrower than two pixels are joined with neighbours, so each two pixels have at most a joined and a wide span.
        ``share`` is a span's share of work. Spans that aren't joined keep their ends beyond the window, and only they
        have ``number`` and ``member``, which are left out where they would be -1 throughout."""
        width_s = 2 * (to_s - from_s) / pixels
        blocks, narrow_blocks, rows = self._units(track, from_s, to_s, width_s)

        def column(name: str) -> NDArray[Any]:  # copying whole rows takes ten times as long
            return np.concatenate((blocks[name][narrow_blocks], *(part[name] for part in rows)))

        whole_start, whole_end, name = map(column, ("start", "end", "name"))
        max_work_s = np.where(works, np.inf, 0.0)
        work = np.concatenate((blocks["work"][narrow_blocks], *(max_work_s[part["name"]] for part in rows)))
        order = np.argsort(whole_start, kind="stable")
        start, end = np.maximum(whole_start, from_s)[order], np.minimum(whole_end, to_s)[order]
        if (start[1:] < end[:-1]).any():
            _cut(start, end)
        order, start, end = (values[end > start] for values in (order, start, end))
        work = np.minimum(work[order], end - start)
        is_narrow, pixel_index = end - start < width_s, np.floor((start - from_s) / width_s)
        part_starts = _part_starts(is_narrow[1:] & (pixel_index[1:] == pixel_index[:-1]), len(start))
        if not len(part_starts):
            return {"start": [], "end": [], "name": [], "share": []}
        part_ends = np.append(part_starts[1:], len(start)) - 1
        is_single, heaviest_rows = part_starts == part_ends, order[_heaviest(work + (end - start) * 1e-9, part_starts)]
        work_share = np.add.reduceat(work, part_starts) / (end[part_ends] - start[part_starts])
        start = np.where(is_single & (start[part_starts] <= from_s), whole_start[heaviest_rows], start[part_starts])
        end = np.where(is_single & (end[part_ends] >= to_s), whole_end[heaviest_rows], end[part_ends])
        array_by_field = {"start": np.round(start - from_s, 7), "end": np.round(end - from_s, 7)}
        array_by_field |= {"name": name[heaviest_rows], "share": np.round(work_share, 4)}
        for field in ("number", "member"):
            values = np.concatenate((np.full(len(narrow_blocks), -1), *(part[field] for part in rows)))
            values = np.where(is_single, values[heaviest_rows], -1)
            array_by_field |= {field: values} if (values >= 0).any() else {}
        return {field: values.tolist() for field, values in array_by_field.items()}

    def _units(self, track: int, from_s: float, to_s: float, width_s: float) -> tuple[Any, NDArray[Any], list[Any]]:
        """Return the blocks of a track, the indices of narrow blocks inside the window, and arrays of rows with all
        other spans that reach into it."""
        block_arrays = self._blocks.setdefault(track, [np.zeros(0, _BLOCK)])
        block_arrays[:] = [np.concatenate(block_arrays)] if len(block_arrays) > 1 else block_arrays
        blocks, start, end = block_arrays[0], block_arrays[0]["start"], block_arrays[0]["end"]
        reaching_blocks = np.flatnonzero((end > from_s) & (start < to_s))
        start, end = start[reaching_blocks], end[reaching_blocks]
        fits_inside = (end - start < width_s) & (start >= from_s) & (end <= to_s)
        begin, row_counts = (blocks[name][reaching_blocks[~fits_inside]] for name in ("row", "count"))
        run_starts = _part_starts(begin[1:] == begin[:-1] + row_counts[:-1], len(begin))  # adjacent in the file
        run_rows = np.add.reduceat(row_counts, run_starts) if len(run_starts) else run_starts
        rows = np.frombuffer(b"".join(map(self._read_rows, begin[run_starts].tolist(), run_rows.tolist())), _ROW)
        low, high = np.searchsorted(self._tail_tracks, (track, track + 1))
        return blocks, reaching_blocks[fits_inside], [rows, self._tail[low:high]]

    def _read_rows(self, row: int, count: int) -> bytes:
        # Not mapped, since all pages that were ever read would count as this process's memory.
        return os.pread(self._files[0].fileno(), count * _ROW.itemsize, row * _ROW.itemsize)


def _sort_and_join(rows: NDArray[Any]) -> NDArray[Any]:
    """Sort ``rows`` by track and start. Where two rows of a track overlap, the later one is cut; rows that were split
    only by a snapshot are joined."""
    rows = rows[np.lexsort((rows["start"], rows["track"]))]
    track = rows["track"]
    overlaps_next = (track[1:] == track[:-1]) & (rows["start"][1:] < rows["end"][:-1])
    for track_id in np.unique(track[1:][overlaps_next]):
        low, high = np.searchsorted(track, (track_id, track_id + 1))
        _cut(rows["start"][low:high], rows["end"][low:high])
    rows = rows[rows["end"] > rows["start"]]
    continues = rows["start"][1:] - rows["end"][:-1] < _MIN_GAP_S
    for name in ("track", "name", "number", "member"):
        continues &= rows[name][1:] == rows[name][:-1]
    part_starts = _part_starts(continues, len(rows))
    joined_rows = rows[part_starts]
    joined_rows["end"] = rows["end"][np.append(part_starts[1:], len(rows))[: len(part_starts)] - 1]
    return joined_rows


def _cut(start: NDArray[Any], end: NDArray[Any]) -> None:
    """Move each of the sorted starts to the latest end of the spans before it; a span inside another becomes empty."""
    start[1:] = np.maximum(start[1:], np.maximum.accumulate(end)[:-1])


def _part_starts(continues: Flags, count: int) -> NDArray[np.intp]:
    """Return where parts begin among ``count`` positions; ``continues``: whether each but the first continues one."""
    return np.concatenate(([0][:count], np.flatnonzero(~continues) + 1)).astype(np.intp)


def _heaviest(weights: NDArray[Any], first: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the index of the greatest weight of each part."""
    peaks = np.repeat(np.maximum.reduceat(weights, first), np.diff(np.append(first, len(weights))))
    peak_positions = np.flatnonzero(weights == peaks)
    return peak_positions[np.searchsorted(peak_positions, first)]


def _blocks(rows: NDArray[Any], works: Flags, offset: int) -> NDArray[Any]:
    """Make the blocks of sorted rows; the first row has number ``offset`` in the file."""
    track_starts = _part_starts(np.diff(rows["track"]) == 0, len(rows))
    row_in_track = np.arange(len(rows)) - np.repeat(track_starts, np.diff(np.append(track_starts, len(rows))))
    first = np.flatnonzero(row_in_track % _BLOCK_ROWS == 0)
    took_s = rows["end"] - rows["start"]
    work_s = np.where(works[rows["name"]], took_s, 0.0)
    blocks = np.zeros(len(first), _BLOCK)
    blocks["start"], blocks["track"], blocks["row"] = rows["start"][first], rows["track"][first], first + offset
    blocks["count"] = np.diff(np.append(first, len(rows)))
    blocks["end"] = rows["end"][first + blocks["count"] - 1]
    blocks["work"] = np.add.reduceat(work_s, first)
    blocks["name"] = rows["name"][_heaviest(work_s + took_s * 1e-9, first)]
    return blocks
