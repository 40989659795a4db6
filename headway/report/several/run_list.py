"""`headway runs` lists runs with their problems; each is read from the end of its ledger."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headway.control.cost import step_usd
from headway.control.summaries import weighted_mean
from headway.records.errors import ConfigurationError
from headway.records.ledger import EvaluationRecord, LedgerLine, RewardStatistics, StepRecord
from headway.records.trace import TraceSession
from headway.report.doctor import costs_of
from headway.report.formats import duration, quantity, score
from headway.report.live_view import WINDOW
from headway.report.progress_bars import ProgressFn, no_progress
from headway.report.recorded_samples import visible
from headway.runtime.run_directory import RunDirectory, require_schema
from headway.telemetry.ledger import EVENT_ACCOUNTING, EVENT_END, EVENT_RESUME, EVENT_START, LedgerTail
from headway.telemetry.summary import last_event

TAIL_BYTES = 1 << 18  # of a ledger that are read, about the last 50 steps
_DEPTH = 4  # levels of folders below a given one that are searched for runs
_RUN_FILES = {"ledger.jsonl", "epoch", "buffer.db"}
_INTERRUPT = "interrupt"

RunState = Literal["running", "ended", "interrupted", "died", "unknown"]


class ListedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run in the list of `headway runs`."""

    run: str
    state: RunState = "unknown"  # died: no process runs it, and it neither ended nor was interrupted; unknown: no line
    holder: str = ""  # process that runs it
    step: int = 0  # completed
    steps: int | None = None  # configured
    solve_rate: float | None = None
    standard_error: float | None = None
    solve_rate_of: str = ""  # source of the rate: split and phase of the last evaluation, best, or training
    reward: float | None = None  # mean over the last steps
    device_hours: float | None = None  # of all sessions, waits included; None: unknown, or a simulation
    usd: float | None = None  # None: no price is given
    disk_bytes: int = 0
    started_unix_s: float | None = None  # by its trace, else by the ledger's last change minus its duration
    last_unix_s: float | None = None  # when the ledger was last written
    problems: tuple[str, ...] = ()  # files that couldn't be read, with reasons


def find_runs(folders: Sequence[str | Path]) -> list[Path]:
    """Return the run folders among and below ``folders``, sorted by path. Raises ConfigurationError for a path that
    isn't a folder."""
    run_by_resolved_path: dict[Path, Path] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise ConfigurationError(f"{folder}: no such folder; valid: a run's folder, or one that holds some")
        run_by_resolved_path |= {path.resolve(): path for path in _runs_below(folder, _DEPTH)}
    return sorted(run_by_resolved_path.values())


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    if any(entry.name in _RUN_FILES for entry in entries):
        yield folder
    elif depth:
        for entry in entries:
            if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                yield from _runs_below(folder / entry.name, depth - 1)


def list_runs(runs: Sequence[Path], price: float | None = None, progress: ProgressFn = no_progress) -> list[ListedRun]:
    """Summarise each run; running ones come first, then the newest. ``price``: dollars of a device-hour."""
    listed_runs = list[ListedRun]()
    for path in runs:
        try:
            listed_runs.append(_list_run(path, price))
        except Exception as error:
            # The boundary to folders that anyone may have written: the error is listed as the run's problem.
            is_known = isinstance(error, ConfigurationError)
            problem = str(error) if is_known else f"can't be read: {type(error).__name__}: {error}"
            listed_runs.append(ListedRun(run=_path_text(path), problems=(problem,)))
        progress(len(listed_runs), len(runs))
    return sorted(listed_runs, key=lambda run: (run.state != "running", -(run.started_unix_s or 0.0), run.run))


def _list_run(path: Path, price: float | None) -> ListedRun:
    require_schema(path)
    directory, problems = RunDirectory(path), list[str]()
    raw_settings = _read_object(directory.config, problems)
    # The hours include all sessions, so the whole ledger is read of runs that were resumed (by the epoch's number).
    ledger = LedgerTail(directory.ledger, TAIL_BYTES if any(path.glob("epoch/1-*")) else None)
    try:
        ledger.read()
    except OSError as error:
        problems.append(f"{directory.ledger.name} can't be read: {error.strerror}")
    problems += ledger.problems
    lines = list(ledger.lines.values())
    holder = holder_of(directory)
    state = state_of(lines, holder)
    if holder and state != "running":
        problems.append("it is being started or resumed: this session has recorded nothing yet")
    steps = [line for line in lines if isinstance(line, StepRecord)]
    recent = [(step.rewards, step.samples) for step in steps[-WINDOW:] if step.rewards]
    duration_s, device_hours = ledger.duration_s, None
    if lines and not (path / "scenario.json").exists():
        try:
            device_hours = costs_of([], directory.read_any_experiment(), None).devices * duration_s / 3600
        except ConfigurationError as error:
            problems.append(f"device-hours aren't known: {error}")
    last_unix_s = directory.ledger.stat().st_mtime if directory.ledger.exists() else None
    solve_rate, standard_error, rate_source = _solve_rate(lines, recent, path)
    reward = weighted_mean(recent, lambda pair: pair[0].mean, lambda pair: pair[1]) if recent else None
    if steps and (episodes := steps[-1].episodes):
        reward = episodes.return_mean
    return ListedRun(
        run=_path_text(path),
        state="running" if holder else state,
        holder=holder,
        step=max((step.version for step in steps), default=0),
        steps=raw_settings.get("run", {}).get("steps"),
        solve_rate=solve_rate,
        standard_error=standard_error,
        solve_rate_of=rate_source,
        reward=reward,
        device_hours=device_hours,
        usd=None if device_hours is None or price is None else step_usd(device_hours * 3600, 1, price),
        disk_bytes=_disk_bytes(path),
        started_unix_s=None if last_unix_s is None else trace_start_s(path, last_unix_s - duration_s),
        last_unix_s=last_unix_s,
        problems=tuple(problems),
    )


def _path_text(path: Path) -> str:
    return os.fsencode(path).decode("utf-8", "replace")


def _read_object(path: Path, problems: list[str]) -> dict[str, Any]:
    """Read a file's JSON object; {} where it can't be read, with the reason added to ``problems``."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        problems.append(f"{path.name} can't be read: {getattr(error, 'strerror', None) or error}")
        return {}


def state_of(lines: Sequence[LedgerLine], holder: str) -> RunState:
    """Return the run's state by the end of its ledger; ``running``: ``holder`` is in a session that has begun."""
    last_record = last_event(lines, EVENT_START, EVENT_RESUME, EVENT_END, EVENT_ACCOUNTING, _INTERRUPT)
    event_name = last_record.event if last_record is not None else ""
    if event_name == EVENT_END:
        return "ended"
    if event_name == EVENT_ACCOUNTING or (event_name == _INTERRUPT and not holder):
        return "interrupted"
    return "unknown" if not lines else "running" if holder else "died"


def holder_of(directory: RunDirectory) -> str:
    """Describe the process that runs it, by its lock, or by another machine's renewals of the epoch; "": none."""
    if (pid := directory.holder()) is not None:
        return f"process {pid}"
    folder = directory.path / "epoch"
    register_parts = [path.name.split("-") for path in folder.glob("*-*-*")]
    newest_parts = max(register_parts, key=lambda parts: (int(parts[0]), int(parts[1]), len(parts)), default=[])
    if len(newest_parts) != 3:  # released, or none
        return ""
    owner, status = _read_object(folder / f"{newest_parts[2]}.json", []), folder.stat()
    # This machine's lock was free; a copied folder has another inode.
    if owner.get("host") in (None, socket.gethostname()) or owner.get("inode") != status.st_ino:
        return ""
    return f"process {owner['pid']} on {owner['host']}" if time.time() - status.st_mtime < owner["orphan_s"] else ""


def _solve_rate(
    lines: Sequence[LedgerLine], recent: Sequence[tuple[RewardStatistics, int]], path: Path
) -> tuple[float | None, float | None, str]:
    """Return (solve rate, its standard error, its source): of the last evaluation with samples, else of the best
    weights, else of training."""
    for line in reversed(lines):
        if isinstance(line, EvaluationRecord) and line.samples:
            failed_text = f", {line.failed:,} of {line.failed + line.samples:,} failed" if line.failed else ""
            return line.solve_rate, line.standard_error, f"{line.split} {line.phase}{failed_text}"
    if (best_rate := _read_object(path / "best" / "evaluation.json", []).get("solve_rate")) is not None:
        return float(best_rate), None, "best"
    success_rates = [line.episodes.success_rate for line in lines if isinstance(line, StepRecord) and line.episodes]
    if success_rates:
        return success_rates[-1], None, "training"
    training_rate = weighted_mean(recent, lambda pair: pair[0].solve_rate, lambda pair: pair[1]) if recent else None
    return training_rate, None, "training" if recent else ""


def trace_start_s(path: Path, otherwise_s: float) -> float:
    """Return the start of a run's trace in seconds since 1970, ``otherwise_s`` at most and where there is no trace."""
    for name in ("trace.old.jsonl", "trace.jsonl"):
        try:
            with (path / name).open("rb") as file:
                return min(otherwise_s, msgspec.json.decode(file.readline(1 << 12), type=TraceSession).unix_s)
        except (OSError, msgspec.DecodeError):
            continue
    return otherwise_s


def _disk_bytes(folder: Path) -> int:
    """Return the bytes that a folder takes on its disk; files that vanish meanwhile don't count."""
    total_bytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total_bytes += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return total_bytes


# --- the table -------------------------------------------------------------------------------------------


def print_runs(runs: Sequence[ListedRun], console: Console | None = None) -> None:
    """Print the list as a table, and the problems of each run below it."""
    console, priced = console or Console(highlight=False), any(run.usd is not None for run in runs)
    console.width = console.width if console.is_terminal else 1000
    table = Table(box=None, padding=(0, 3, 0, 0))
    heads = ("run", "state", "step", "solve rate", "reward", "cost" if priced else "device-h", "disk", "started", "age")
    for name in (*heads, "last line"):
        table.add_column(name, no_wrap=name != "run", overflow="fold")
    for run in runs:
        hours_text = quantity(run.device_hours or math.nan)
        cells = (
            visible(run.run),
            run.state,
            f"{run.step:,} of {'?' if run.steps is None else f'{run.steps:,}'}",
            f"{score(run.solve_rate, run.standard_error)} {run.solve_rate_of}",
            score(run.reward),
            hours_text if not priced else "–" if run.usd is None else f"${run.usd:,.2f}",
            f"{quantity(run.disk_bytes)}B",
            "–" if run.started_unix_s is None else f"{datetime.fromtimestamp(run.started_unix_s):%Y-%m-%d %H:%M}",
            _since(run.started_unix_s),
            f"{_since(run.last_unix_s)} ago",
        )
        table.add_row(*map(Text, cells))
    console.print(table)
    for run in runs:
        for problem in run.problems:
            console.print(Text(f"{visible(run.run)}: {visible(problem)}", style="yellow"), soft_wrap=True)


def _since(unix_s: float | None) -> str:
    return duration(math.nan if unix_s is None else max(0.0, time.time() - unix_s))
