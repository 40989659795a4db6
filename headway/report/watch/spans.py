"""Spans of many tracks in a file, and windows of them at a resolution: any part of ten million in milliseconds."""

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
_LATE_S = 5.0  # a worker's spans arrive up to a pulse after those of another on its device
_LEAST_S = 1e-6  # spans that are closer were parted by a pulse alone
_TIMES, _CODES = [("start", "f8"), ("end", "f8")], [("track", "i4"), ("name", "i4")]
_ROW = np.dtype([*_TIMES, *_CODES, ("number", "i4"), ("member", "i4")])
_BLOCK = np.dtype([*_TIMES, *_CODES, ("work", "f8"), ("row", "i8"), ("count", "i4")])

Row = tuple[float, float, int, int, int, int]
"""A span: start and end, seconds; track; code of its name; number and member, -1 for none."""
Flags = NDArray[np.bool_]


class StoredSpans(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a store's files counts, and the rows after them."""

    rows: int = 0
    blocks: int = 0
    tail: bytes = b""


class SpanStore:
    """Spans as rows, by track and start, which don't overlap.

    Lifecycle: ``restore``, then ``add`` and ``window``. Of a row: *tail*, in memory, where new ones are sorted in ->
    *sealed*, with SEAL_ROWS others: appended to a file, each _BLOCK_ROWS of a track with a block that says when, how
    much of it is work, and what took longest. A window takes blocks that are narrower than its pixels, and rows
    elsewhere.
    """

    def __init__(self, rows: Path, blocks: Path) -> None:
        """Open the two files. Where another process has them, or they can't be written, temporary ones are used."""
        self.kept = True  # whether the files stay
        try:
            self._files: Sequence[BinaryIO] = [path.open("a+b") for path in (rows, blocks)]
            fcntl.flock(self._files[0], fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed
        except OSError:
            self.kept, self._files = False, [tempfile.TemporaryFile(), tempfile.TemporaryFile()]  # noqa: SIM115

    def restore(self, stored: StoredSpans) -> None:
        """Begin with a state of the files, and forget what follows it. Raises ValueError when they are shorter."""
        self.stored = stored
        self._keep(np.frombuffer(stored.tail, _ROW))
        sizes = stored.rows * _ROW.itemsize, stored.blocks * _BLOCK.itemsize
        for file, size in zip(self._files, sizes, strict=True):
            if file.seek(0, 2) < size:
                raise ValueError("the cache is shorter than its state says")
            file.truncate(size)
            file.seek(size)
        self._files[1].seek(0)
        self._blocks: dict[int, list[NDArray[Any]]] = {}
        self._take_up(np.frombuffer(self._files[1].read(), _BLOCK))

    def _take_up(self, blocks: NDArray[Any]) -> None:
        blocks = blocks[np.argsort(blocks["track"], kind="stable")]
        for part in np.split(blocks, np.flatnonzero(np.diff(blocks["track"])) + 1):
            self._blocks.setdefault(int(part["track"][0]) if len(part) else -1, []).append(part)

    def _keep(self, tail: NDArray[Any]) -> None:
        self._tail, self._tail_tracks = tail, tail["track"].copy()

    def add(self, fresh: Sequence[Row], works: Flags, to_s: float) -> bool:
        """Add rows; returns whether the tail was sealed. ``works``: of each name, whether it is work; ``to_s``: the end
        of all. Raises OSError when the disk is full."""
        self._keep(_sorted(np.concatenate((self._tail, np.array(fresh, _ROW)))))
        late = self._tail["end"] > to_s - _LATE_S
        late &= len(late) < 2 * SEAL_ROWS
        rows, tail = self._tail[~late], self._tail[late]
        if len(rows) < SEAL_ROWS:
            return False
        blocks = _blocks(rows, works, self.stored.rows)
        for file, data in zip(self._files, (rows, blocks), strict=True):
            file.write(data.tobytes())
            file.flush()
        sizes = {"rows": self.stored.rows + len(rows), "blocks": self.stored.blocks + len(blocks)}
        self.stored = StoredSpans(**sizes, tail=tail.tobytes())
        self._keep(tail)
        self._take_up(blocks)
        return True

    def window(self, track: int, from_s: float, to_s: float, pixels: int, works: Flags) -> dict[str, list[Any]]:
        """At most ``pixels`` spans of a track between two moments, times in seconds since ``from_s``. Those narrower
        than two pixels are joined with neighbours, so there are at most a joined and a wide span for each two pixels.
        ``share`` is how much of a span is work. One that isn't joined is whole, beyond the window too; it alone has
        ``number`` and ``member``, which are left out where they would be -1 throughout."""
        width_s = 2 * (to_s - from_s) / pixels
        blocks, inner, rows = self._units(track, from_s, to_s, width_s)

        def column(name: str) -> NDArray[Any]:  # copies of whole rows would take ten times as long
            return np.concatenate((blocks[name][inner], *(part[name] for part in rows)))

        whole_start, whole_end, name = map(column, ("start", "end", "name"))
        most_s = np.where(works, np.inf, 0.0)
        work = np.concatenate((blocks["work"][inner], *(most_s[part["name"]] for part in rows)))
        order = np.argsort(whole_start, kind="stable")
        start, end = np.maximum(whole_start, from_s)[order], np.minimum(whole_end, to_s)[order]
        if (start[1:] < end[:-1]).any():
            _cut(start, end)
        order, start, end = (values[end > start] for values in (order, start, end))
        work = np.minimum(work[order], end - start)
        narrow, place = end - start < width_s, np.floor((start - from_s) / width_s)
        first = _first(narrow[1:] & (place[1:] == place[:-1]), len(start))
        if not len(first):
            return {"start": [], "end": [], "name": [], "share": []}
        last = np.append(first[1:], len(start)) - 1
        alone, longest = first == last, order[_longest(work + (end - start) * 1e-9, first)]
        share = np.add.reduceat(work, first) / (end[last] - start[first])
        start = np.where(alone & (start[first] <= from_s), whole_start[longest], start[first])
        end = np.where(alone & (end[last] >= to_s), whole_end[longest], end[last])
        found = {"start": np.round(start - from_s, 7), "end": np.round(end - from_s, 7)}
        found |= {"name": name[longest], "share": np.round(share, 4)}
        for field in ("number", "member"):
            values = np.concatenate((np.full(len(inner), -1), *(part[field] for part in rows)))
            values = np.where(alone, values[longest], -1)
            found |= {field: values} if (values >= 0).any() else {}
        return {field: values.tolist() for field, values in found.items()}

    def _units(self, track: int, from_s: float, to_s: float, width_s: float) -> tuple[Any, NDArray[Any], list[Any]]:
        """Blocks of a track, places of those that are inside the window and narrow, and arrays of rows with all others
        that reach into it."""
        parts = self._blocks.setdefault(track, [np.zeros(0, _BLOCK)])
        parts[:] = [np.concatenate(parts)] if len(parts) > 1 else parts
        blocks, start, end = parts[0], parts[0]["start"], parts[0]["end"]
        reaching = np.flatnonzero((end > from_s) & (start < to_s))
        start, end = start[reaching], end[reaching]
        inside = (end - start < width_s) & (start >= from_s) & (end <= to_s)
        begin, count = (blocks[name][reaching[~inside]] for name in ("row", "count"))
        runs = _first(begin[1:] == begin[:-1] + count[:-1], len(begin))  # one behind the other in the file
        sizes = np.add.reduceat(count, runs) if len(runs) else runs
        rows = np.frombuffer(b"".join(map(self._read_rows, begin[runs].tolist(), sizes.tolist())), _ROW)
        low, high = np.searchsorted(self._tail_tracks, (track, track + 1))
        return blocks, reaching[inside], [rows, self._tail[low:high]]

    def _read_rows(self, row: int, count: int) -> bytes:
        # Not mapped: what was looked at once would count as this process's memory.
        return os.pread(self._files[0].fileno(), count * _ROW.itemsize, row * _ROW.itemsize)


def _sorted(rows: NDArray[Any]) -> NDArray[Any]:
    """``rows`` by track and start. Where two of a track overlap, the later one is cut; where nothing but a pulse parts
    them, they are one."""
    rows = rows[np.lexsort((rows["start"], rows["track"]))]
    track = rows["track"]
    overlaps = (track[1:] == track[:-1]) & (rows["start"][1:] < rows["end"][:-1])
    for one in np.unique(track[1:][overlaps]):
        low, high = np.searchsorted(track, (one, one + 1))
        _cut(rows["start"][low:high], rows["end"][low:high])
    rows = rows[rows["end"] > rows["start"]]
    goes_on = rows["start"][1:] - rows["end"][:-1] < _LEAST_S
    for name in ("track", "name", "number", "member"):
        goes_on &= rows[name][1:] == rows[name][:-1]
    first = _first(goes_on, len(rows))
    joined = rows[first]
    joined["end"] = rows["end"][np.append(first[1:], len(rows))[: len(first)] - 1]
    return joined


def _cut(start: NDArray[Any], end: NDArray[Any]) -> None:
    """Move starts, which are sorted, behind the ends of all before. Of a span inside another nothing is left."""
    start[1:] = np.maximum(start[1:], np.maximum.accumulate(end)[:-1])


def _first(goes_on: Flags, count: int) -> NDArray[np.intp]:
    """Where parts begin among ``count`` places; ``goes_on``: of all but the first, whether it continues a part."""
    return np.concatenate(([0][:count], np.flatnonzero(~goes_on) + 1)).astype(np.intp)


def _longest(weights: NDArray[Any], first: NDArray[np.intp]) -> NDArray[np.intp]:
    """Place of the greatest weight of each part."""
    peaks = np.repeat(np.maximum.reduceat(weights, first), np.diff(np.append(first, len(weights))))
    places = np.flatnonzero(weights == peaks)
    return places[np.searchsorted(places, first)]


def _blocks(rows: NDArray[Any], works: Flags, offset: int) -> NDArray[Any]:
    """Blocks of sorted rows, the first of which is number ``offset`` of the file."""
    tracks = _first(np.diff(rows["track"]) == 0, len(rows))
    within = np.arange(len(rows)) - np.repeat(tracks, np.diff(np.append(tracks, len(rows))))
    first = np.flatnonzero(within % _BLOCK_ROWS == 0)
    took_s = rows["end"] - rows["start"]
    work_s = np.where(works[rows["name"]], took_s, 0.0)
    blocks = np.zeros(len(first), _BLOCK)
    blocks["start"], blocks["track"], blocks["row"] = rows["start"][first], rows["track"][first], first + offset
    blocks["count"] = np.diff(np.append(first, len(rows)))
    blocks["end"] = rows["end"][first + blocks["count"] - 1]
    blocks["work"] = np.add.reduceat(work_s, first)
    blocks["name"] = rows["name"][_longest(work_s + took_s * 1e-9, first)]
    return blocks
