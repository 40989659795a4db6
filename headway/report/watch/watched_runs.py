"""Watched runs are found in folders and opened by id; their ledgers are read as they grow."""

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

from headway.config.simulation import AnyExperiment, SimulatorExperiment
from headway.records.errors import ConfigurationError
from headway.records.ledger import EvaluationRecord, EventRecord, LedgerLine, StepRecord
from headway.report.doctor import costs_of
from headway.report.run_cost import LiveCost, live_cost
from headway.report.run_view import RunView, view_from
from headway.report.several.axes import AXES
from headway.report.several.run_list import ListedRun, RunState, find_runs, list_runs, state_of, trace_start_s
from headway.runtime.run_directory import RunDirectory, require_schema, with_saved_placement
from headway.telemetry import ledger
from headway.telemetry.metrics import scalars

RECENT = 60  # newest steps whose rates are drawn
_RESCAN_S, _RELIST_S = 3.0, 60.0  # until folders are searched again, and until a run's disk space is measured again
_LISTING_SHARE = 20  # a run isn't listed again before this multiple of the time of its last listing has passed
_WATCHED_FILES = (ledger.FILE_NAME, "config.json")
_MAX_RUNS = 16  # runs whose readers are kept in memory
T = TypeVar("T")
Floats = npt.NDArray[np.float64]


class NoSuchRun(ConfigurationError):
    """Raised when no watched run has the id."""


def is_inside(path: Path, folder: Path) -> bool:
    """Return whether ``path`` is a file in ``folder``; links are followed."""
    resolved = path.resolve()
    return resolved.is_file() and resolved.is_relative_to(folder.resolve())


def checked(name: str, value: int, minimum: int, maximum: int) -> int:
    """Return ``value``. Raises ConfigurationError unless it lies within the limits."""
    if not minimum <= value <= maximum:
        raise ConfigurationError(f"{name} = {value}: valid: {minimum} to {maximum}")
    return value


class RunTail:
    """The state of a run after the lines of its ledger so far (`LedgerTail`). The numbers of steps are kept as columns,
    with a row for each recorded step."""

    def __init__(self, path: Path) -> None:
        self.path, self._wide = path, False
        self._restart()

    def _restart(self) -> None:
        self._ledger = ledger.LedgerTail(self.path / ledger.FILE_NAME)
        self._numbers, self._dropped = array("q"), set[int]()  # numbers of the steps' lines; rows that were replaced
        self._columns: dict[str, array[float]] = {}
        self._unread = ""
        self._derived: dict[str, tuple[int, Any]] = {}
        self._sessions: list[tuple[int, float | None]] = []  # first line, Unix time at which its clock began
        self._lost_h, self._configuration_problem = Counter[str](), ""
        self.experiment = self._experiment()
        self.evaluations: dict[int, EvaluationRecord] = {}  # by line
        self.events: dict[int, EventRecord] = {}
        self.at_s: dict[int, float] = {}  # time of all sessions until the event or evaluation, by line
        self.recent: deque[StepRecord] = deque(maxlen=RECENT)
        self.last: LedgerLine | None = None
        self.stalls: dict[str, tuple[int, EventRecord]] = {}  # worker -> its stall, while it lasts
        self.alerts: dict[str, tuple[int, EventRecord]] = {}  # rule -> its alert, while it holds

    def _experiment(self) -> AnyExperiment | None:
        directory = RunDirectory(self.path)
        try:
            if directory.config.exists() and not is_inside(directory.config, self.path):
                raise ConfigurationError(f"{directory.config} lies outside the run's folder")
            experiment = directory.read_any_experiment()
            is_simulated = isinstance(experiment, SimulatorExperiment)
            return experiment if is_simulated else with_saved_placement(experiment, directory)
        except (ConfigurationError, OSError, ValueError, RecursionError) as error:
            self._configuration_problem = f"cost and time left aren't known: {error}"
            return None

    @property
    def problems(self) -> list[str]:
        """Return sentences about the files and lines that couldn't be read."""
        problems = [f"{ledger.FILE_NAME} can't be read: {self._unread}"] if self._unread else []
        return problems + self._ledger.problems + [self._configuration_problem] * bool(self._configuration_problem)

    def refresh(self, *, wide: bool = False) -> None:
        """Read the lines appended since the last call. ``wide``: keep all series, not only those of the view *Now*; the
        first such call reads the whole ledger again."""
        if wide and not self._wide:
            self._wide = True
            self._restart()
        try:
            if not is_inside(self._ledger.path, self.path):
                raise FileNotFoundError(0, "there is no such file in the run's folder")
            if self._ledger.replaced():
                self._restart()
            lines_before = self._ledger.read_lines
            steps = [step for line in self._ledger.refresh() for step in self._take_line(*line)]
        except OSError as error:
            self._unread = error.strerror or str(error)
            return
        self._unread = ""
        if steps and self.experiment is not None:  # a step that was replayed took its devices twice
            self._lost_h.update(costs_of(steps, self.experiment, None).lost_h)
        if self._sessions and self.last and self.written_unix_s is not None and self._ledger.read_lines > lines_before:
            began_s = self.written_unix_s - self.last.time_s
            if len(self._sessions) == 1:
                began_s = trace_start_s(self.path, began_s)
            first_line, known_s = self._sessions[-1]
            self._sessions[-1] = (first_line, began_s if known_s is None else min(known_s, began_s))

    @property
    def lines(self) -> dict[int, LedgerLine]:
        """Return the ledger's lines by number, replays resolved."""
        return self._ledger.lines

    @property
    def written_unix_s(self) -> float | None:
        """Return when the ledger was last written, as of the last read; None: it wasn't read."""
        return self._ledger.written_unix_s

    def _take_line(self, number: int, line: LedgerLine, replaced: Sequence[int]) -> list[StepRecord]:
        for replaced_number in replaced:
            if self.evaluations.pop(replaced_number, None) is None:
                self._dropped.add(bisect_left(self._numbers, replaced_number))
        self.last = line
        if isinstance(line, EventRecord):
            self._take_event(number, line)
        if isinstance(line, EvaluationRecord):
            self.evaluations[number] = line
        if not isinstance(line, StepRecord):
            self.at_s[number] = self._ledger.earlier_s + line.time_s
            return []
        self.recent.append(line)
        row_index = len(self._numbers)
        self._numbers.append(number)
        row_values = {"version": line.version, "skipped": line.skipped, "samples": line.samples, "clock_s": line.time_s}
        row_values |= {"time_s": self.duration_s, "tokens": line.flow.trained_tokens}
        for name, value in (row_values | (scalars(line) if self._wide else _rate_series(line))).items():
            if (column := self._columns.get(name)) is None:
                column = self._columns[name] = array("d")
            if len(column) < row_index:
                column.extend([np.nan] * (row_index - len(column)))
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
        """Return the names of the measured series, as in `telemetry.metrics.scalars`."""
        return sorted(name for name in self._columns if "/" in name)

    def column(self, name: str) -> Floats:
        """Return the values of a series, [S] for S trained steps in order; NaN where it wasn't measured."""
        values = np.full(len(self._numbers), np.nan)
        recorded = self._columns.get(name, ())
        values[: len(recorded)] = recorded
        return values[self._kept_rows()]

    def _kept_rows(self) -> npt.NDArray[np.bool_]:
        is_kept = ~np.array(self._columns.get("skipped", ()), dtype=bool)
        is_kept[list(self._dropped)] = False
        return is_kept

    def axis_positions(self, axis: str, price: float | None) -> Floats:
        """Return the position of each trained step on an axis, [S]. Raises ConfigurationError for an unknown axis."""
        if axis not in AXES:
            raise ConfigurationError(f"axis = {axis!r}: valid: {', '.join(AXES)}")
        if axis == "steps":
            return self.column("version")
        if axis in ("samples", "tokens"):
            positions = np.cumsum(self.column(axis))
            if len(positions) and not positions[-1]:
                raise ConfigurationError(f"axis = {axis!r}: the run's ledger doesn't say")
            return positions
        hours = self.column("time_s") / 3600
        if axis == "hours":
            return hours
        if price is None or self.experiment is None:
            raise ConfigurationError("axis = 'dollars': needs --usd-per-device-hour and the run's configuration")
        return hours * price * costs_of([], self.experiment, None).devices

    @property
    def duration_s(self) -> float:
        """Return the time of all sessions so far."""
        return self._ledger.duration_s

    def state(self, holder: str) -> RunState:
        """Return the state of the run, as in `headway runs`; ``holder``: the process that runs it."""
        return state_of([*self.events.values(), *self.recent], holder)

    def unix_s(self, number: int, time_s: float) -> float | None:
        """Convert ``time_s`` of line ``number`` to seconds since 1970; None: the start of its session isn't known."""
        session_starts_s = [began_s for first, began_s in self._sessions if first <= number]
        return None if not session_starts_s or session_starts_s[-1] is None else session_starts_s[-1] + time_s

    def unix_column(self) -> Floats:
        """Return when each trained step ended, [S], seconds since 1970; NaN where that isn't known."""
        session_lines, began_s = zip(*[(-1, None), *self._sessions], strict=True)
        session_index = np.searchsorted(session_lines, np.array(self._numbers), side="right") - 1
        return np.array(began_s, dtype=np.float64)[session_index][self._kept_rows()] + self.column("clock_s")

    def cached(self, name: str, make: Callable[[], T]) -> T:
        """Return ``make()``, which is called again only after further lines have been read."""
        if name not in self._derived or self._derived[name][0] != self._ledger.read_lines:
            self._derived[name] = (self._ledger.read_lines, make())
        return self._derived[name][1]

    def view(self) -> RunView:
        """Return the view of the run that `headway report` has, from the lines that have been read."""
        cached_view = self.cached("view", lambda: view_from(self.path, self._ledger))
        return replace(cached_view, holder=RunDirectory(self.path).holder())

    def cost(self, price: float | None) -> LiveCost | None:
        """Return the cost of all sessions and replays so far; None without a price or a configuration."""
        if price is None or self.experiment is None:
            return None
        costs = msgspec.structs.replace(costs_of([], self.experiment, None), lost_h=dict(self._lost_h))
        totals = {"steps": len(self.column("version")), "trained_tokens": int(np.nansum(self.column("tokens")))}
        return live_cost(costs, price, duration_s=self.duration_s, **totals)


def _rate_series(step: StepRecord) -> dict[str, float]:
    """Return the series that the view *Now* needs; making all takes five times as long as reading the line."""
    return {
        "rates/production_samples_per_s": step.production_per_s,
        "rates/consumption_samples_per_s": step.consumption_per_s,
    }


class WatchedRun:
    """A run with its readers. Each reader is made when it is first needed, and used by one thread at a time."""

    def __init__(self, run_id: str, path: Path) -> None:
        self.id, self.path = run_id, path
        self._lock, self._readers = threading.Lock(), dict[Any, list[Any]]()

    @contextmanager
    def reader(self, make: Callable[[Path], T]) -> Iterator[T]:
        """Yield the reader that ``make`` makes of the run's folder, for this thread alone inside the block."""
        with self._lock:
            locked_reader = self._readers.setdefault(make, [threading.Lock(), None])
        with locked_reader[0]:
            if locked_reader[1] is None:
                locked_reader[1] = make(self.path)
            yield locked_reader[1]

    @contextmanager
    def tail(self, *, wide: bool = False) -> Iterator[RunTail]:
        """Yield the run's ledger, read to the end; ``wide``: with all series."""
        with self.reader(RunTail) as tail:
            tail.refresh(wide=wide)
            yield tail

    def close(self) -> None:
        """Close the readers that have a method ``close``."""
        for _, reader in self._readers.values():
            if hasattr(reader, "close"):
                reader.close()

    def stamp(self) -> tuple[Any, ...]:
        """Return a value that changes when the run's ledger or configuration has changed."""
        return tuple(stamp_of(self.path / name) for name in _WATCHED_FILES)


def stamp_of(path: Path) -> tuple[int, ...]:
    """Return inode, size and time of a file's last change; () where there is no file."""
    try:
        file_stat = path.stat()
    except OSError:
        return ()
    return file_stat.st_ino, file_stat.st_size, file_stat.st_mtime_ns


class WatchedRuns:
    """The runs in some folders, also those that appear later. Thread-safe."""

    def __init__(self, roots: Sequence[str | Path], price: float | None = None) -> None:
        """Check the folders. ``price``: dollars of a device-hour. Raises ConfigurationError for other roots."""
        find_runs(roots)
        self.roots, self.price = [Path(root) for root in roots], price
        self._lock, self._path_by_id, self._searched_s = threading.Lock(), dict[str, Path](), -_RESCAN_S
        self._open: OrderedDict[str, WatchedRun] = OrderedDict()
        self._listed: dict[Path, tuple[Any, float, float, ListedRun]] = {}
        self._problems = list[str]()

    def _paths(self) -> dict[str, Path]:
        with self._lock:
            if time.monotonic() - self._searched_s < _RESCAN_S:
                return self._path_by_id
            name_by_path, self._problems = dict[Path, str](), []
            for root in self.roots:
                try:
                    for path in find_runs([root]):
                        name = str(path.relative_to(root)) if path != root else root.resolve().name
                        name = name if name not in name_by_path.values() else str(path)
                        name_by_path.setdefault(path.resolve(), os.fsencode(name).decode("utf-8", "replace"))
                except (ConfigurationError, OSError) as error:
                    self._problems.append(str(error))
            self._path_by_id, self._searched_s = {name: path for path, name in name_by_path.items()}, time.monotonic()
            return self._path_by_id

    def run(self, run_id: str) -> WatchedRun:
        """Return the run with the id. Raises NoSuchRun for an unknown id, ConfigurationError for a run of another
        schema."""
        path = self._paths().get(run_id)
        if path is None:
            known_ids = ", ".join(list(self._path_by_id)[:20]) or "none yet"
            raise NoSuchRun(f"run = {run_id!r}: no such run is watched; valid: {known_ids}")
        with self._lock:
            run = self._open.get(run_id)
            if run is None or run.path != path:
                require_schema(path)
                run = self._open[run_id] = WatchedRun(run_id, path)
            self._open.move_to_end(run_id)
            while len(self._open) > _MAX_RUNS:
                self._open.popitem(last=False)[1].close()
            return run

    def close(self) -> None:
        """Close the readers of all runs."""
        for run in self._open.values():
            run.close()

    def listing(self) -> dict[str, Any]:
        """List all runs as `headway runs` does, with their ids, and the errors of folders that couldn't be read."""
        id_by_path, listed_runs = {path: run_id for run_id, path in self._paths().items()}, []
        for path in id_by_path:
            file_paths = (path / ledger.FILE_NAME, path / "config.json", path / "epoch")
            stamp = (*map(stamp_of, file_paths), RunDirectory(path).holder())
            cached = self._listed.get(path)
            age_s = time.monotonic() - cached[1] if cached is not None else 0.0
            if cached is None or age_s > _RELIST_S or (cached[0] != stamp and age_s > _LISTING_SHARE * cached[2]):
                began_s = time.monotonic()
                run = list_runs([path], self.price)[0]
                cached = self._listed[path] = (stamp, began_s, time.monotonic() - began_s, run)
            listed_runs.append((path, cached[3]))
        listed_runs.sort(key=lambda pair: (pair[1].state != "running", -(pair[1].started_unix_s or 0.0), pair[1].run))
        runs = [{"id": id_by_path[path], "name": path.name, **msgspec.to_builtins(run)} for path, run in listed_runs]
        return {"runs": runs, "roots": list(map(str, self.roots)), "problems": list(self._problems)}
