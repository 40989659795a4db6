"""The view *Devices* draws a run's trace as lanes. The trace is indexed as it grows."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from headway.records.errors import ConfigurationError
from headway.records.trace import (
    EngineSteps,
    GroupEnd,
    GroupTrace,
    Mark,
    QueueSnapshot,
    Span,
    StepTrace,
    TraceLine,
    TraceSession,
)
from headway.report.trace import IDLE_SPANS, PROCESS_BY_WORKER_KIND
from headway.report.trace_groups import GroupLife, LaneAllocator, Phase, group_phases, rollout_phases
from headway.report.watch.cache import cache_folder
from headway.report.watch.spans import SEAL_ROWS, Row, SpanStore, StoredSpans
from headway.report.watch.watched_runs import is_inside
from headway.runtime.user_cache import write_cached
from headway.telemetry.trace_file import FILE_NAME, OLD_NAME

_CACHED = "lanes-1"  # prefix of the cache's files; the number is the format's version
_WAITING = (*IDLE_SPANS, "queued", "waits for its group", "buffered")  # names of spans that aren't work
_DEVICE = re.compile(r"(.*/)?(cuda|cpu):[^/]*")
_CHUNK_BYTES, _REFRESH_BYTES = 1 << 20, 1 << 23  # of a trace: decoded at once; read by one call of `lanes`
_MARK_BYTES = 256
_MAX_LINES = 20_000  # the newest steps, versions and marks are kept
_MAX_TRACKS, _MAX_PIXELS = 400, 16_384  # of one window
_MAX_INT = (1 << 31) - 1
_decoder, _lines_decoder = msgspec.json.Decoder(TraceLine), msgspec.json.Decoder(list[TraceLine])
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _State(msgspec.Struct):
    """The state of an index without its spans, as the cache keeps it."""

    spans: StoredSpans = StoredSpans()
    offset: int = 0  # bytes read so far, of the file that has ``mark`` before this offset
    mark: bytes | None = None  # last bytes that were read; None: nothing was read yet
    events: int = 0
    damaged: int = 0
    first_damage: str = ""
    session_s: float | None = None  # Unix time at which the session started; None: no line had it yet
    shift_s: float = 0.0  # from its clock to seconds since 1970
    from_s: float | None = None
    to_s: float = 0.0
    tracks: dict[str, int] = {}  # "group/name" -> id
    names: dict[str, int] = {}  # of spans -> code
    steps: list[dict[str, Any]] = []
    versions: list[dict[str, Any]] = []
    marks: list[dict[str, Any]] = []
    devices: dict[str, str] = {}  # worker -> its device
    ranks: int = 1
    version: int = 0
    groups: LaneAllocator = msgspec.field(default_factory=LaneAllocator)
    members: LaneAllocator = msgspec.field(default_factory=LaneAllocator)  # a group's lane has a track for each member
    lives: dict[int, tuple[GroupLife, int]] = {}  # finished groups and their lanes, until they end
    trained: list[tuple[GroupLife, int]] = []  # until their step's line


class RunLanes:
    """A run's trace as lanes: the spans of each device, worker, group and member of groups.

    A call reads only the lines appended since the last one, at most _REFRESH_BYTES. The index keeps all lines that it
    has read when the trace's files are rotated, and is cached: see `SpanStore`.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._problem, self._share = path, "", 0.0
        self._kept = cache_folder(path) / f"{_CACHED}.state"
        self._store = SpanStore(*(self._kept.with_suffix(suffix) for suffix in (".rows", ".blocks")))
        try:
            self._restart(msgspec.msgpack.decode(self._kept.read_bytes() * self._store.kept, type=_State))
        except (OSError, msgspec.DecodeError, ValueError):  # no cache, or a damaged one
            self._restart(_State())

    def _restart(self, state: _State) -> None:
        self._store.restore(state.spans)
        self._state, self._fresh = state, list[Row]()
        self._targets: dict[tuple[str, str], list[tuple[int, int, int]]] = {}

    def lanes(self, since_s: float | None = None) -> dict[str, Any]:
        """Return tracks, names of spans (``waiting``: those that aren't work), and the marks, ended steps and published
        versions after ``since_s``. Reads the trace's new lines first; ``indexed_share``: share of the trace's bytes
        read so far."""
        self._refresh()
        state, errors = self._state, [self._problem] if self._problem else []
        if state.damaged:
            errors.append(f"{state.damaged} lines of the trace can't be read and are left out: {state.first_damage}")
        if not errors and state.from_s is None:
            errors.append(f"the run has no trace: there is no {FILE_NAME}, or nothing in it; ledger.trace may be false")
        tracks = [key.partition("/")[::2] for key in state.tracks]
        answer = {
            "from_s": state.from_s,
            "to_s": None if state.from_s is None else state.to_s,
            "tracks": [{"id": track_id, "name": name, "group": group} for track_id, (group, name) in enumerate(tracks)],
            "names": list(state.names),
            "waiting": [code for name, code in state.names.items() if name in _WAITING],
            "events": state.events,
            "indexed_share": self._share,
            "problems": errors,
        }
        for kind, time_field in (("versions", "published_s"), ("marks", "time_s"), ("steps", "end_s")):
            answer[kind] = [event for event in getattr(state, kind) if since_s is None or event[time_field] > since_s]
        return answer

    def window(self, from_s: float, to_s: float, pixels: int, tracks: Iterable[int]) -> dict[str, Any]:
        """Return the spans of ``tracks`` between two moments, as `SpanStore.window` does. Raises ConfigurationError for
        invalid arguments."""
        valid_ids = [track for track in dict.fromkeys(tracks) if 0 <= track < len(self._state.tracks)]
        if not (from_s < to_s and np.isfinite(to_s - from_s)):
            raise ConfigurationError(f"from_s = {from_s}, to_s = {to_s}: valid: two moments, the earlier one first")
        if not 2 <= pixels <= _MAX_PIXELS or len(valid_ids) > _MAX_TRACKS:
            raise ConfigurationError(f"valid: 2 to {_MAX_PIXELS} pixels, at most {_MAX_TRACKS} tracks")
        is_work = self._work_flags()
        return {"tracks": {str(track): self._store.window(track, from_s, to_s, pixels, is_work) for track in valid_ids}}

    def _work_flags(self) -> np.ndarray:
        return np.array([name not in _WAITING for name in self._state.names], bool)

    # -- the files -----------------------------------------------------------------------------------

    def _refresh(self) -> None:
        self._problem, total_bytes, indexed_bytes, remaining_bytes = "", 0, 0, _REFRESH_BYTES
        try:
            with ExitStack() as stack:
                for index, file in enumerate(self._sources(stack)):
                    total_bytes += os.fstat(file.fileno()).st_size
                    if remaining_bytes > 0:
                        if index:
                            self._state.offset, self._state.mark = 0, b""
                        remaining_bytes -= self._read(file, remaining_bytes)
                        indexed_bytes += self._state.offset
            self._flush()
        except OSError as error:
            self._problem = f"reading of the trace has stopped: {error.filename or 'the cache'}: {error.strerror}"
        self._share = indexed_bytes / total_bytes if total_bytes else 1.0

    def _sources(self, stack: ExitStack) -> list[BinaryIO]:
        """Open the files to read, oldest first; the first is positioned at the first unread byte."""
        file_by_inode: dict[int, BinaryIO] = {}
        for path in (self.path / FILE_NAME, self.path / OLD_NAME):  # a rotation in between shows one file twice
            if is_inside(path, self.path):
                file = stack.enter_context(path.open("rb"))
                file_by_inode.setdefault(os.fstat(file.fileno()).st_ino, file)
        files, state = list(file_by_inode.values()), self._state
        for index, file in enumerate(files if state.mark is not None else ()):
            file.seek(state.offset - len(state.mark or b""))
            if file.read(len(state.mark or b"")) == state.mark:
                return files[index::-1]
            file.seek(0)
        if files and state.mark is not None:  # another trace, or rotated twice
            self._restart(_State())
        return files[::-1]

    def _read(self, file: BinaryIO, most_bytes: int) -> int:
        """Read whole lines of ``file``; returns the number of bytes."""
        state, taken_bytes = self._state, 0
        while taken_bytes < most_bytes and (chunk := file.read(_CHUNK_BYTES)):
            cut_index = chunk.rfind(b"\n") + 1
            if not cut_index and len(chunk) < _CHUNK_BYTES:
                break  # torn, or being written
            chunk = chunk[: cut_index or len(chunk)]
            self._take(chunk)
            state.offset, taken_bytes = state.offset + len(chunk), taken_bytes + len(chunk)
            state.mark = ((state.mark or b"") + chunk)[-_MARK_BYTES:]
            file.seek(state.offset)
            if len(self._fresh) >= SEAL_ROWS:
                self._flush()
        return taken_bytes

    def _flush(self) -> None:
        fresh_rows, self._fresh = self._fresh, []
        state = self._state
        if fresh_rows and self._store.add(fresh_rows, self._work_flags(), state.to_s) and self._store.kept:
            state.spans = self._store.stored
            write_cached(self._kept, lambda file: file.write(msgspec.msgpack.encode(state)))

    def _take(self, data: bytes) -> None:
        state, line_texts = self._state, list[bytes]()
        try:
            lines = _lines_decoder.decode(b"[" + data.rstrip(b"\n").replace(b"\n", b",") + b"]")
        except _UNREADABLE:
            lines, line_texts = [], data.split(b"\n")
        for line_text in filter(None, line_texts):
            try:
                lines.append(_decoder.decode(line_text))
            except _UNREADABLE as error:
                state.damaged, state.first_damage = state.damaged + 1, state.first_damage or str(error)[:120]
        state.events += len(lines)
        for line in lines:
            self._take_line(line)
        for bounded_list in (state.steps, state.versions, state.marks):
            del bounded_list[:-_MAX_LINES]

    # -- the lines -----------------------------------------------------------------------------------

    def _take_line(self, line: TraceLine) -> None:
        state = self._state
        if isinstance(line, Span) and state.session_s is not None:
            self._take_span(line.track, line.name, line.start_s + state.shift_s, line.end_s + state.shift_s)
        elif isinstance(line, TraceSession):
            state.session_s, state.shift_s = line.unix_s, line.unix_s - line.clock_s
            self._extend_range(line.unix_s, line.unix_s)
        elif state.session_s is None:
            return  # its time of day is unknown
        elif isinstance(line, GroupTrace):
            self._take_group(line, state.session_s)
        elif isinstance(line, GroupEnd):
            self._end_group(line, state.session_s)
        elif isinstance(line, StepTrace):
            self._take_step(line)
        elif isinstance(line, EngineSteps):
            for row in line.rows:
                end_s = row.end_s + state.shift_s
                self._take_span(f"{line.track} engine", f"decoding requests {row.running}", end_s - row.busy_s, end_s)
        elif isinstance(line, Mark):
            state.marks.append({"time_s": line.time_s + state.shift_s, "event": line.event, "detail": line.detail})
        elif isinstance(line, QueueSnapshot):
            self._set_devices({worker.name: worker.device for worker in line.workers if worker.device}, state.ranks)

    def _set_devices(self, devices: dict[str, str], ranks: int) -> None:
        if (devices, ranks) != (self._state.devices, self._state.ranks):
            self._state.devices, self._state.ranks = devices, ranks
            self._targets.clear()

    def _extend_range(self, start_s: float, end_s: float) -> None:
        state = self._state
        if state.from_s is None or start_s < state.from_s:
            state.from_s = start_s
        if end_s > state.to_s:
            state.to_s = end_s

    def _take_span(self, track: str, name: str, start_s: float, end_s: float) -> None:
        if (targets := self._targets.get((track, name))) is None:
            targets = self._targets[track, name] = self._find_targets(track, name)
        for name_number, track_id, code in targets:
            self._fresh.append((start_s, end_s, track_id, code, name_number, -1))
        self._extend_range(start_s, end_s)
        if track == "trainer-0" and name == "publish":
            self._state.versions.append({"version": self._state.version, "published_s": end_s, "applied_s": None})
        elif track == "weights" and name.startswith("apply version "):
            versions, version = self._state.versions, targets[0][0]
            if not versions or versions[-1]["version"] != version or versions[-1]["applied_s"] is not None:
                versions.append({"version": version, "published_s": start_s})
            versions[-1]["applied_s"] = end_s

    def _find_targets(self, track: str, name: str) -> list[tuple[int, int, int]]:
        """Return where spans of this name are drawn: (number at the end of the name, track, code of the name)."""
        state = self._state
        name_head = name.rstrip("0123456789")
        name_number, name_head = int(name[len(name_head) :][:9] or -1), name_head.strip() or name
        group = "devices" if _DEVICE.fullmatch(track) else PROCESS_BY_WORKER_KIND.get(track.rpartition("-")[0], "other")
        targets = [(name_number, self._track(group, track + " turns" * (group == "devices")), self._name(name_head))]
        if (device := state.devices.get(track)) and name not in IDLE_SPANS:
            targets.append((name_number, self._track("devices", device), self._name(f"{track}: {name_head}")))
        if track == "trainer-0" and name == "wait":
            targets += [(-1, self._track(group, f"trainer-{rank}"), targets[0][2]) for rank in range(1, state.ranks)]
        if len(self._targets) > 10_000:
            self._targets.clear()
        return targets

    def _track(self, group: str, name: str) -> int:
        return self._state.tracks.setdefault(f"{group}/{name}", len(self._state.tracks))

    def _name(self, name: str) -> int:
        return self._state.names.setdefault(name, len(self._state.names))

    def _take_step(self, line: StepTrace) -> None:
        state, step_name = self._state, f"skipped step {line.step}" if line.skipped else f"step {line.step}"
        start_s, end_s = line.start_s + state.shift_s, line.end_s + state.shift_s
        self._set_devices(state.devices, max(1, len(line.rank_compute_s)))
        for rank, compute_s in enumerate(line.rank_compute_s):
            self._take_span(f"trainer-{rank}", step_name, max(start_s, end_s - compute_s), end_s)
        state.steps.append({"step": line.step, "start_s": start_s, "end_s": end_s, "skipped": line.skipped})
        computing_s = max(start_s, end_s - max(line.rank_compute_s, default=0.0))
        for life, lane in state.trained:
            self._leave(life, lane, list(group_phases(life, computing_s if life.step == line.step else None))[2:])
        state.version, state.trained = line.version, []
        self._extend_range(start_s, end_s)

    def _take_group(self, line: GroupTrace, session_s: float) -> None:
        state, life = self._state, GroupLife.of(line, self._state.shift_s, session_s)
        if line.index in state.lives:  # the finished group was lost when the process was killed
            self._leave(*state.lives.pop(line.index), [])
        lane = state.groups.claim(life.start_s)
        state.lives[line.index] = (life, lane)
        self._draw("groups", f"{lane:03d}", line.index, -1, list(group_phases(life, None))[:2])
        lane = state.members.take(life.start_s, life.end_s)
        for rollout, phases in rollout_phases(life):
            self._draw("rollouts", f"{lane:03d}.{rollout.member:02d}", line.index, rollout.member, phases)
        self._extend_range(life.start_s, life.end_s)

    def _end_group(self, line: GroupEnd, session_s: float) -> None:
        state = self._state
        life, lane = state.lives.pop(line.index, (None, 0))
        if life is None:
            if not line.finished:  # a finished group's line was in a deleted part of the trace
                life = GroupLife.of(line, state.shift_s, session_s)
                self._leave(life, state.groups.claim(life.start_s), [(line.ending, life.start_s, life.end_s)])
            return
        life.ending, life.step, life.end_s = line.ending, line.step, max(life.end_s, line.time_s + state.shift_s)
        if line.ending == "trained":
            state.trained.append((life, lane))
        else:
            self._leave(life, lane, list(group_phases(life, None))[2:])

    def _leave(self, life: GroupLife, lane: int, phases: Sequence[Phase]) -> None:
        self._draw("groups", f"{lane:03d}", life.index, -1, phases)
        self._state.groups.release(lane, life.end_s)
        self._extend_range(life.start_s, life.end_s)

    def _draw(self, group: str, track: str, number: int, member: int, phases: Sequence[Phase]) -> None:
        track_id, number, member = self._track(group, track), min(number, _MAX_INT), min(member, _MAX_INT)
        for name, start_s, end_s in phases:
            if end_s > start_s:
                if (code := self._state.names.get(name)) is None:
                    code = self._name(name.rstrip("0123456789-").strip())
                self._fresh.append((start_s, end_s, track_id, code, number, member))
