"""Builds Chrome trace events: slices, counters and instants on named tracks.

Format: Trace Event Format (JSON object form, "X", "C", "i" and "M" events; times in microseconds).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

_MIN_SPAN_S = 1e-6  # shorter slices are invisible, and rounding would make them overlap


class TraceEvents:
    """The events of a trace. Times are seconds of one clock; the file counts from the earliest.

    Invariant: slices of a track are either nested or disjoint. A slice that overlaps the end of an open slice is cut to
    the longer of its two parts. Slices of a track must be added in order of their start, outer ones before inner.

    Example: ``slice("trainer", "trainer-0", "step 3", 12.0, 12.5)``.
    """

    def __init__(self, processes: Sequence[str] = ()) -> None:
        """``processes``: names in the order of display; other processes follow."""
        self._events: list[dict[str, Any]] = []
        self._processes = {name: number for number, name in enumerate(processes, start=1)}
        self._tracks: Counter[str] = Counter()  # process -> number of its tracks so far
        self._threads: dict[tuple[str, str], tuple[int, int]] = {}  # -> process and thread id
        self._open: dict[tuple[int, int], list[tuple[float, float]]] = {}  # track -> open slices, outer first
        self._begun: dict[tuple[int, int], float] = {}  # track -> start of its newest slice
        self._first_s = float("inf")
        self._last_s = -float("inf")

    def __len__(self) -> int:
        return len(self._events)

    @property
    def duration_s(self) -> float:
        """Return the seconds from the first event to the last."""
        return max(0.0, self._last_s - self._first_s)

    def slice(
        self, process: str, track: str, name: str, start_s: float, end_s: float, arguments: dict[str, Any] | None = None
    ) -> None:
        """Add a slice from ``start_s`` to ``end_s``; slices below a microsecond are left out."""
        track_id = self._track(process, track)
        open_slices = self._open.setdefault(track_id, [])
        start_s = max(start_s, self._begun.get(track_id, start_s))
        while open_slices and open_slices[-1][1] <= start_s:
            open_slices.pop()
        # A slice mostly inside the open one is cut to its end; one mostly beyond it starts at that end.
        while open_slices and end_s > (outer_s := open_slices[-1][1]):
            if outer_s - start_s < end_s - outer_s:
                open_slices.pop()
                start_s = outer_s
            else:
                end_s = outer_s
        if end_s - start_s < _MIN_SPAN_S:
            return
        open_slices.append((start_s, end_s))
        self._begun[track_id] = start_s
        self._add({"ph": "X", "name": name, "args": arguments or {}}, track_id, start_s, end_s)

    def counter(self, process: str, name: str, time_s: float, values: dict[str, float]) -> None:
        """Add the values of a counter that hold from ``time_s`` on."""
        self._add({"ph": "C", "name": name, "args": values}, self._track(process, ""), time_s, time_s)

    def instant(self, process: str, track: str, name: str, time_s: float, arguments: dict[str, Any]) -> None:
        """Add an event at ``time_s``."""
        event = {"ph": "i", "s": "t", "name": name, "args": arguments}
        self._add(event, self._track(process, track), time_s, time_s)

    def as_json(self, about: dict[str, str]) -> dict[str, Any]:
        """Return the file's content as JSON types; may be called once."""
        events: list[dict[str, Any]] = []
        for name, number in self._processes.items():
            if not self._tracks[name]:
                continue
            events.append({"ph": "M", "pid": number, "name": "process_name", "args": {"name": name}})
            events.append({"ph": "M", "pid": number, "name": "process_sort_index", "args": {"sort_index": number}})
        for (_, track), (process_id, thread_id) in self._threads.items():
            if track:
                thread_fields = {"ph": "M", "pid": process_id, "tid": thread_id}
                events.append({**thread_fields, "name": "thread_name", "args": {"name": track}})
                events.append({**thread_fields, "name": "thread_sort_index", "args": {"sort_index": thread_id}})
        for event in self._events:
            start_us = self._microseconds(event.pop("start_s"))
            end_us = self._microseconds(event.pop("end_s"))
            events.append(event | {"ts": start_us} | ({"dur": end_us - start_us} if event["ph"] == "X" else {}))
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}

    def _microseconds(self, time_s: float) -> int:
        return round((time_s - self._first_s) * 1e6)

    def _track(self, process: str, track: str) -> tuple[int, int]:
        track_id = self._threads.get((process, track))
        if track_id is None:
            self._tracks[process] += 1
            process_number = self._processes.setdefault(process, len(self._processes) + 1)
            track_id = self._threads[process, track] = (process_number, self._tracks[process])
        return track_id

    def _add(self, event: dict[str, Any], track_id: tuple[int, int], start_s: float, end_s: float) -> None:
        self._first_s = min(self._first_s, start_s)
        self._last_s = max(self._last_s, end_s)
        self._events.append(event | {"pid": track_id[0], "tid": track_id[1], "start_s": start_s, "end_s": end_s})
