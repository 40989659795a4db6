"""Runs that are watched: found in folders, opened by id alone, their ledgers read as they grow."""

from __future__ import annotations

import os
import threading
import time
from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from headway.config.schema import Experiment
from headway.records.errors import ConfigurationError
from headway.records.ledger import EvaluationRecord, EventRecord, LedgerLine, StepRecord
from headway.report.doctor import costs_of
from headway.report.run_cost import LiveCost, live_cost
from headway.report.run_view import RunView, view_of
from headway.report.several.axes import AXES
from headway.report.several.listing import ListedRun, RunState, find_runs, list_runs, state_of, traced_s
from headway.runtime.run_directory import RunDirectory, placed_as_before, require_schema
from headway.telemetry import ledger
from headway.telemetry.metrics import scalars

RECENT = 60  # steps that rates are drawn of
_RESCAN_S, _RELIST_S = 3.0, 60.0  # folders are searched again; what a run takes of the disk is counted again
_LISTING_SHARE = 20  # a run isn't listed again before this many times what that took have passed
_WRITTEN = (ledger.FILE_NAME, "config.json")
_MOST_RUNS = 16  # whose readers are kept in memory
T = TypeVar("T")
Floats = npt.NDArray[np.float64]


class NoSuchRun(ConfigurationError):
    """No run that is watched has this id."""


def inside(path: Path, folder: Path) -> bool:
    """Whether ``path``, links followed, is a file in ``folder``."""
    found = path.resolve()
    return found.is_file() and found.is_relative_to(folder.resolve())


def within(name: str, value: int, least: int, most: int) -> int:
    """``value``; raises ConfigurationError unless it lies within the limits."""
    if not least <= value <= most:
        raise ConfigurationError(f"{name} = {value}: valid: {least} to {most}")
    return value


class RunTail:
    """A run as the lines of its ledger (`LedgerTail`) tell it so far. The numbers of steps are kept as columns, with a
    row for each recorded step."""

    def __init__(self, path: Path) -> None:
        self.path, self._wide = path, False
        self._restart()

    def _restart(self) -> None:
        self._ledger = ledger.LedgerTail(self.path / ledger.FILE_NAME)
        self._numbers, self._dropped = array("q"), set[int]()  # of the steps' lines; rows that were replaced
        self._columns: dict[str, array[float]] = {}
        self._unread = ""
        self._derived: dict[str, tuple[int, Any]] = {}
        self._sessions: list[tuple[int, float | None]] = []  # first line, Unix time at which its clock began
        self._lost_h, self._configuration_problem = Counter[str](), ""
        self.experiment = self._experiment()
        self.evaluations: dict[int, EvaluationRecord] = {}  # by line
        self.events: dict[int, EventRecord] = {}
        self.at_s: dict[int, float] = {}  # of those, by line: time of all sessions until then
        self.recent: deque[StepRecord] = deque(maxlen=RECENT)
        self.last: LedgerLine | None = None
        self.stalls: dict[str, tuple[int, EventRecord]] = {}  # worker -> its stall, while it lasts
        self.alerts: dict[str, tuple[int, EventRecord]] = {}  # rule -> what it found, while it holds

    def _experiment(self) -> Experiment | None:
        directory = RunDirectory(self.path)
        try:
            if directory.config.exists() and not inside(directory.config, self.path):
                raise ConfigurationError(f"{directory.config} lies outside the run's folder")
            return placed_as_before(directory.read_experiment(), directory)
        except (ConfigurationError, OSError, ValueError, RecursionError) as error:
            self._configuration_problem = f"cost and time left aren't known: {error}"
            return None

    @property
    def problems(self) -> list[str]:
        """Sentences about what couldn't be read."""
        found = [f"{ledger.FILE_NAME} can't be read: {self._unread}"] if self._unread else []
        return found + self._ledger.problems + [self._configuration_problem] * bool(self._configuration_problem)

    def refresh(self, *, wide: bool = False) -> None:
        """Read what was appended since the last call. ``wide``: with all series, not only those of the view of now; the
        first such call reads everything once more."""
        if wide and not self._wide:
            self._wide = True
            self._restart()
        try:
            if not inside(self._ledger.path, self.path):
                raise FileNotFoundError(0, "there is no such file in the run's folder")
            if self._ledger.replaced():
                self._restart()
            read = self._ledger.read_lines
            steps = [step for line in self._ledger.refresh() for step in self._take_line(*line)]
        except OSError as error:
            self._unread = error.strerror or str(error)
            return
        self._unread = ""
        if steps and self.experiment is not None:  # a step that was replayed took its devices twice
            self._lost_h.update(costs_of(steps, self.experiment, None).lost_h)
        if self._sessions and self.last and self.written_unix_s is not None and self._ledger.read_lines > read:
            began_s = self.written_unix_s - self.last.time_s
            if len(self._sessions) == 1:
                began_s = traced_s(self.path, began_s)
            first, known_s = self._sessions[-1]
            self._sessions[-1] = (first, began_s if known_s is None else min(known_s, began_s))

    @property
    def lines(self) -> dict[int, LedgerLine]:
        """The ledger's lines by number, replays resolved."""
        return self._ledger.lines

    @property
    def written_unix_s(self) -> float | None:
        """When the ledger was last written, as far as it was read; None: it wasn't."""
        return self._ledger.written_unix_s

    def _take_line(self, number: int, line: LedgerLine, replaced: Sequence[int]) -> list[StepRecord]:
        for old in replaced:
            if self.evaluations.pop(old, None) is None:
                self._dropped.add(bisect_left(self._numbers, old))
        self.last = line
        if isinstance(line, EventRecord):
            self._take_event(number, line)
        if isinstance(line, EvaluationRecord):
            self.evaluations[number] = line
        if not isinstance(line, StepRecord):
            self.at_s[number] = self._ledger.earlier_s + line.time_s
            return []
        self.recent.append(line)
        row = len(self._numbers)
        self._numbers.append(number)
        more = {"version": line.version, "skipped": line.skipped, "samples": line.samples, "clock_s": line.time_s}
        more |= {"time_s": self.duration_s, "tokens": line.flow.trained_tokens}
        for name, value in (more | (scalars(line) if self._wide else _narrow(line))).items():
            if (column := self._columns.get(name)) is None:
                column = self._columns[name] = array("d")
            if len(column) < row:
                column.extend([np.nan] * (row - len(column)))
            column.append(value)
        return [line]

    def _take_event(self, number: int, line: EventRecord) -> None:
        self.events[number] = line
        if line.event in (ledger.EVENT_START, ledger.EVENT_RESUME):
            self._sessions.append((number, None))
            self.stalls.clear()
        if line.event == ledger.EVENT_STALLED:
            self.stalls[line.worker] = (number, line)
        elif line.event == ledger.EVENT_STALL_ENDED or line.event.endswith(("_restarted", "_restored")):
            self.stalls.pop(line.worker, None)
        if (rule := line.data.get("rule")) is not None:
            self.alerts.pop(str(rule), None)
            if line.event == ledger.EVENT_ALERT:
                self.alerts[str(rule)] = (number, line)

    def names(self) -> list[str]:
        """Names of the measured series, as `telemetry.metrics.scalars` has them."""
        return sorted(name for name in self._columns if "/" in name)

    def column(self, name: str) -> Floats:
        """Values of one series, [S]: S trained steps, in order; NaN where it wasn't measured."""
        values = np.full(len(self._numbers), np.nan)
        found = self._columns.get(name, ())
        values[: len(found)] = found
        return values[self._kept()]

    def _kept(self) -> npt.NDArray[np.bool_]:
        kept = ~np.array(self._columns.get("skipped", ()), dtype=bool)
        kept[list(self._dropped)] = False
        return kept

    def places(self, axis: str, price: float | None) -> Floats:
        """Place of each trained step on an axis, [S]. Raises ConfigurationError for one that isn't known."""
        if axis not in AXES:
            raise ConfigurationError(f"axis = {axis!r}: valid: {', '.join(AXES)}")
        if axis == "steps":
            return self.column("version")
        if axis in ("samples", "tokens"):
            places = np.cumsum(self.column(axis))
            if len(places) and not places[-1]:
                raise ConfigurationError(f"axis = {axis!r}: the run's ledger doesn't say")
            return places
        hours = self.column("time_s") / 3600
        if axis == "hours":
            return hours
        if price is None or self.experiment is None:
            raise ConfigurationError("axis = 'dollars': needs --usd-per-device-hour and the run's configuration")
        return hours * price * costs_of([], self.experiment, None).devices

    @property
    def duration_s(self) -> float:
        """Time of all sessions so far."""
        return self._ledger.duration_s

    def state(self, holder: str) -> RunState:
        """State of the run, as `headway runs` has it; ``holder``: the process that runs it."""
        return state_of([*self.events.values(), *self.recent], holder)

    def unix_s(self, number: int, time_s: float) -> float | None:
        """Time of day of what line ``number`` says of ``time_s``; None: of a session whose beginning isn't known."""
        before = [began_s for first, began_s in self._sessions if first <= number]
        return None if not before or before[-1] is None else before[-1] + time_s

    def unix_column(self) -> Floats:
        """When each trained step ended, [S], seconds since 1970; NaN where that isn't known."""
        starts, began_s = zip(*[(-1, None), *self._sessions], strict=True)
        of = np.searchsorted(starts, np.array(self._numbers), side="right") - 1
        return np.array(began_s, dtype=np.float64)[of][self._kept()] + self.column("clock_s")

    def once(self, name: str, make: Callable[[], T]) -> T:
        """``make()``, made again when a line has been read since."""
        if name not in self._derived or self._derived[name][0] != self._ledger.read_lines:
            self._derived[name] = (self._ledger.read_lines, make())
        return self._derived[name][1]

    def view(self) -> RunView:
        """The facts of the run as `headway report` has them, of the lines that have been read."""
        found = self.once("view", lambda: view_of(self.path, self._ledger))
        return replace(found, holder=RunDirectory(self.path).holder())

    def cost(self, price: float | None) -> LiveCost | None:
        """Cost so far, all sessions and replays; None without a price or a configuration."""
        if price is None or self.experiment is None:
            return None
        costs = msgspec.structs.replace(costs_of([], self.experiment, None), lost_h=dict(self._lost_h))
        totals = {"steps": len(self.column("version")), "trained_tokens": int(np.nansum(self.column("tokens")))}
        return live_cost(costs, price, duration_s=self.duration_s, **totals)


def _narrow(step: StepRecord) -> dict[str, float]:
    """The series that the view of now needs: making all takes five times as long as reading the line."""
    return {
        "rates/production_samples_per_s": step.production_per_s,
        "rates/consumption_samples_per_s": step.consumption_per_s,
    }


class WatchedRun:
    """A run with its readers, each made when it is first wanted and used by one thread at a time."""

    def __init__(self, run_id: str, path: Path) -> None:
        self.id, self.path = run_id, path
        self._lock, self._parts = threading.Lock(), dict[Any, list[Any]]()

    @contextmanager
    def part(self, make: Callable[[Path], T]) -> Iterator[T]:
        """The reader that ``make`` makes of the run's folder, for this thread alone inside the block."""
        with self._lock:
            part = self._parts.setdefault(make, [threading.Lock(), None])
        with part[0]:
            if part[1] is None:
                part[1] = make(self.path)
            yield part[1]

    @contextmanager
    def tail(self, *, wide: bool = False) -> Iterator[RunTail]:
        """Its ledger, read to the end; ``wide``: with all series."""
        with self.part(RunTail) as tail:
            tail.refresh(wide=wide)
            yield tail

    def close(self) -> None:
        """Close the readers that have something to close."""
        for _, part in self._parts.values():
            if hasattr(part, "close"):
                part.close()

    def stamp(self) -> tuple[Any, ...]:
        """Changes when its ledger or configuration has."""
        return tuple(stamp_of(self.path / name) for name in _WRITTEN)


def stamp_of(path: Path) -> tuple[int, ...]:
    """Inode, size and time of a file's last change; () where there is none."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns


class WatchedRuns:
    """The runs in some folders, those included that appear later. For all threads."""

    def __init__(self, roots: Sequence[str | Path], price: float | None = None) -> None:
        """``price``: dollars of a device's hour. Raises ConfigurationError for a root that is no folder."""
        find_runs(roots)
        self.roots, self.price = [Path(root) for root in roots], price
        self._lock, self._found, self._searched_s = threading.Lock(), dict[str, Path](), -_RESCAN_S
        self._open: OrderedDict[str, WatchedRun] = OrderedDict()
        self._listed: dict[Path, tuple[Any, float, float, ListedRun]] = {}
        self._problems = list[str]()

    def _paths(self) -> dict[str, Path]:
        with self._lock:
            if time.monotonic() - self._searched_s < _RESCAN_S:
                return self._found
            found, self._problems = dict[Path, str](), []
            for root in self.roots:
                try:
                    for path in find_runs([root]):
                        name = str(path.relative_to(root)) if path != root else root.resolve().name
                        name = name if name not in found.values() else str(path)
                        found.setdefault(path.resolve(), os.fsencode(name).decode("utf-8", "replace"))
                except (ConfigurationError, OSError) as error:
                    self._problems.append(str(error))
            self._found, self._searched_s = {name: path for path, name in found.items()}, time.monotonic()
            return self._found

    def run(self, run_id: str) -> WatchedRun:
        """The run of that id. Raises NoSuchRun for anything else, ConfigurationError for a run of another schema."""
        path = self._paths().get(run_id)
        if path is None:
            known = ", ".join(list(self._found)[:20]) or "none yet"
            raise NoSuchRun(f"run = {run_id!r}: no such run is watched; valid: {known}")
        with self._lock:
            run = self._open.get(run_id)
            if run is None or run.path != path:
                require_schema(path)
                run = self._open[run_id] = WatchedRun(run_id, path)
            self._open.move_to_end(run_id)
            while len(self._open) > _MOST_RUNS:
                self._open.popitem(last=False)[1].close()
            return run

    def close(self) -> None:
        """Close the readers of all runs."""
        for run in self._open.values():
            run.close()

    def listing(self) -> dict[str, Any]:
        """All runs as `headway runs` lists them, with their ids, and what couldn't be read."""
        ids, listed = {path: run_id for run_id, path in self._paths().items()}, []
        for path in ids:
            files = (path / ledger.FILE_NAME, path / "config.json", path / "epoch")
            stamp = (*map(stamp_of, files), RunDirectory(path).holder())
            known = self._listed.get(path)
            age_s = time.monotonic() - known[1] if known is not None else 0.0
            if known is None or age_s > _RELIST_S or (known[0] != stamp and age_s > _LISTING_SHARE * known[2]):
                began_s = time.monotonic()
                run = list_runs([path], self.price)[0]
                known = self._listed[path] = (stamp, began_s, time.monotonic() - began_s, run)
            listed.append((path, known[3]))
        listed.sort(key=lambda one: (one[1].state != "running", -(one[1].started_unix_s or 0.0), one[1].run))
        runs = [{"id": ids[path], "name": path.name, **msgspec.to_builtins(run)} for path, run in listed]
        return {"runs": runs, "roots": list(map(str, self.roots)), "problems": list(self._problems)}
