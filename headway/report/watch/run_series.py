"""The view *Run* shows measured series over an axis, evaluations, events, logs and the configuration."""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from bisect import bisect_left
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from headway.records.errors import ConfigurationError
from headway.records.ledger import EventRecord
from headway.report.live_view import evaluation_line
from headway.report.several.axes import AXES
from headway.report.watch.watched_runs import Floats, RunTail, WatchedRun, checked, is_inside
from headway.runtime.run_directory import RunDirectory
from headway.telemetry.metrics import STEP_METRICS

_MAX_EVENTS, _MAX_LOGS, _BLOCK_BYTES = 2000, 500, 1 << 16
_PLOTS = (  # section, title, patterns of names: the plots of several series, in the order of display
    ("Learning", "Solve rate", "reward/solve_rate"),
    ("Learning", "Return of the last 100 episodes", "episodes/return_*"),
    ("Learning", "Success rate of the last 100 episodes", "episodes/success_*"),
    ("Learning", "Reward", "reward/mean"),
    ("Learning", "pass@k", "reward/pass_at_*[0-9]"),
    ("Learning", "Groups without variance, truncated responses", "reward/zero_variance_share length/truncated_share"),
    ("Learning", "Values: variance of returns that they explain, error", "loss/explained_variance loss/value_error"),
    ("Learning", "Tasks by region", "curriculum/*_tasks"),
    ("Learning", "Why tasks were drawn", "curriculum/*_draw_share"),
    ("Balance", "Who waits", "wait/*"),
    ("Balance", "Rates", "rates/*samples_per_s"),
    ("Balance", "Environment steps per second", "rates/environment_steps_per_s"),
    ("Balance", "Queue depth", "queue/running_groups queue/buffered_groups queue/parked_groups"),
    ("Balance", "Oldest buffered group", "queue/oldest_age_s"),
    ("Balance", "Where a step's time goes", "time/trainer_*_s time/publish_s time/checkpoint_s time/switch_s"),
    ("Staleness", "Staleness", "staleness/t*"),
    ("Rollouts", "Response lengths", "length/*_tokens"),
    ("Rollouts", "Length bias", "length_bias/*"),
    ("Rollouts", "Endings", "endings/*_rollouts"),
    ("Optimiser", "Loss by stream", "loss/stream_*_loss"),
    ("Optimiser", "Tokens by stream, before masks", "loss/stream_*_tokens"),
    ("Optimiser", "Slope by stream: sum of |∂loss / ∂log-probability|", "loss/stream_*_slope"),
    ("Optimiser", "Importance ratio quantiles", "ratio/ratio_*"),
    ("Optimiser", "Trainer against generator", "mismatch/*"),
    ("Machine", "Tokens per second", "rates/*tokens_per_s"),
    ("Machine", "Model FLOP utilisation of the trainer", "rates/mfu_*"),
    ("Machine", "Weight updates", "time/apply_*"),
    ("Machine", "KV cache", "queue/kv_*"),
    ("Kernels", "What compiles, and what is correct", "kernels/*_pass_at_*[0-9]"),
    ("Kernels", "The evaluators' time", "kernels/wait_s kernels/busy_s"),
    ("Sandboxes", "How long they take", "sandboxes/*_p99_s"),
    ("Sandboxes", "How many there are", "sandboxes/capacity sandboxes/live sandboxes/paused sandboxes/waiters"),
    ("Machine", "Slots", "queue/slots queue/running_rollouts queue/waiting_rollouts"),
)
_SECTIONS = {  # section of other series by the first part of their names; a part that isn't listed is a section itself
    **{"reward": "Learning", "queue": "Balance", "control": "Balance", "rates": "Machine", "time": "Machine"},
    **dict.fromkeys(("loss", "ratio", "optimiser"), "Optimiser"),
    **dict.fromkeys(("length", "endings", "failures", "filtered", "pruning"), "Rollouts"),
}
_RATES = tuple(f"{counted}_per_s" for counted in ("samples", "tokens", "steps", "flop"))
_UNITS = (*_RATES, "groups", "rollouts", "tokens", "steps", "bytes", "s")
_KINDS = {
    **dict.fromkeys(("start", "resume", "interrupt", "replaying", "restored", "accounting", "end"), "restart"),
    **dict.fromkeys(("stalled", "stall_ended", "worker_stalled"), "stall"),
    **dict.fromkeys(("alert", "alert_cleared", "step_skipped", "value_update_skipped"), "alert"),
    **dict.fromkeys(("control", "plan_changed", "plan_kept", "plan_outcome"), "plan"),
    **dict.fromkeys(("best", "checkpoint", "last_kept"), "update"),
    "evaluation": "evaluation",
}
_RESTARTS = ("_died", "_restarted", "_lost", "_restored")
_TIME = re.compile(rb"^\[?(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)", re.MULTILINE)


def names(run: WatchedRun) -> dict[str, Any]:
    """List the series that a run has measured, in the order of display: name, section, title, unit, caption. Series of
    one plot share section and title."""
    with run.tail(wide=True) as tail:
        remaining, series_rows = tail.names(), list[dict[str, str]]()
        for section, title, patterns in _PLOTS:
            plot_names = [name for name in remaining if any(fnmatchcase(name, pattern) for pattern in patterns.split())]
            remaining = [name for name in remaining if name not in plot_names]
            series_rows += [_series_row(name, section, title) for name in plot_names]
        for name in remaining:
            name_group, _, series_title = (part.replace("_", " ") for part in name.partition("/"))
            section = _SECTIONS.get(name_group, name_group.capitalize())
            series_rows.append(_series_row(name, section, series_title))
        return {"series": series_rows, "problems": tail.problems}


def _series_row(name: str, section: str, title: str) -> dict[str, str]:
    unit = next((unit for unit in _UNITS if name.endswith(f"_{unit}")), "")
    displayed_unit = unit.replace("_per_", "/") if unit else "share" if name.endswith(("share", "ratio")) else ""
    _, description = STEP_METRICS.get(name, ("", ""))
    return {"name": name, "section": section, "title": title, "unit": displayed_unit, "caption": description}


def series(
    run: WatchedRun,
    names: str = "",
    axis: str = "steps",
    points: int = 800,
    since: float = 0.0,
    price: float | None = None,
) -> dict[str, Any]:
    """Return series (``names``: separated by commas) over an axis, from version ``since`` on, in at most ``points``
    bins of equally many steps. Raises ConfigurationError for a name or an axis that the run doesn't have."""
    requested = [name for name in names.split(",") if name]
    with run.tail(wide=True) as tail:
        known = set(tail.names())
        if missing_names := [name for name in requested if name not in known]:
            raise ConfigurationError(f"names = {missing_names[0]!r}: valid: {', '.join(sorted(known)) or 'none yet'}")
        is_selected = tail.column("version") >= since
        width = max(1, math.ceil(is_selected.sum() / checked("points", points, 2, 10_000)))
        ys = {name: _binned(tail.column(name)[is_selected], width) for name in requested}
        return {
            **{"axis": axis, "label": AXES.get(axis), "steps": int(is_selected.sum()), "per_point": width},
            "x": _binned(tail.axis_positions(axis, price)[is_selected], width)["mean"],
            "unix_s": _binned(tail.unix_column()[is_selected], width)["mean"],
            "series": ys if width > 1 else {name: {**curve, "low": None, "high": None} for name, curve in ys.items()},
            "evaluations": evaluations(tail, axis, price),
            "problems": tail.problems,
        }


def _binned(values: Floats, width: int) -> dict[str, Any]:
    """Return mean, minimum and maximum of every ``width`` values; NaN where none is finite."""
    rows = np.full((math.ceil(len(values) / width), width), np.nan)
    rows.flat[: len(values)] = np.where(np.isfinite(values), values, np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # bins without a value
        statistics = {"mean": np.nanmean(rows, axis=1), "low": np.nanmin(rows, axis=1), "high": np.nanmax(rows, axis=1)}
    return {name: array.tolist() for name, array in statistics.items()}


def evaluations(tail: RunTail, axis: str, price: float | None) -> list[dict[str, Any]]:
    """Return the evaluations with samples, at their positions on an axis."""
    records = [record for record in tail.evaluations.values() if record.samples]
    mean_versions = [(record.first_version + record.last_version) / 2 for record in records]
    versions, positions = np.append(0.0, tail.column("version")), np.append(0.0, tail.axis_positions(axis, price))
    field_names = ("split", "phase", "solve_rate", "standard_error", "tasks", "failures_text")
    return [
        {"x": x, **{field: getattr(record, field) for field in field_names}}
        for record, x in zip(records, np.interp(mean_versions, versions, positions).tolist(), strict=True)
    ]


# --- events ----------------------------------------------------------------------------------------------


def event_of(tail: RunTail, number: int) -> dict[str, Any]:
    """Convert the event or evaluation of line ``number``, with its positions on axes and its time of day."""
    event = tail.events.get(number)
    if event is None:
        record = tail.evaluations[number]
        event = EventRecord(event="evaluation", detail=evaluation_line(record), step=record.step, time_s=record.time_s)
    field_names = ("event", "detail", "worker", "cause", "step", "time_s", "data")
    return {
        **{"n": number, "kind": _kind(event.event), "version": event.step, "unix_s": tail.unix_s(number, event.time_s)},
        **{field: getattr(event, field) for field in field_names},
        "x": {"steps": event.step, "hours": tail.at_s[number] / 3600},
    }


def _kind(event: str) -> str:
    return _KINDS.get(event, "restart" if event.endswith(_RESTARTS) else "other")


def events(run: WatchedRun, after: int = -1) -> dict[str, Any]:
    """Return the newest events and evaluations after line ``after``."""
    with run.tail() as tail:
        numbers = sorted(number for number in {*tail.events, *tail.evaluations} if number > after)
        listed_events = [event_of(tail, number) for number in numbers[-_MAX_EVENTS:]]
        left_out_count = len(numbers) - len(listed_events)
        problems = [*tail.problems, f"{left_out_count} older events are left out"] if left_out_count else tail.problems
        return {"events": listed_events, "problems": problems}


# --- logs and configuration ------------------------------------------------------------------------------


def _log_files(run: WatchedRun) -> dict[str, Path]:
    folder = RunDirectory(run.path).logs
    paths = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if is_inside(path, run.path)}
    return {os.fsencode(name).decode("utf-8", "replace"): path for name, path in paths.items()}


def logs(run: WatchedRun) -> dict[str, Any]:
    """List the logs of a run's workers, those last written first."""
    stats = [(name, path.stat()) for name, path in _log_files(run).items()]
    stats.sort(key=lambda pair: -pair[1].st_mtime)
    rows = [{"name": name, "size_bytes": st.st_size, "modified_unix_s": st.st_mtime} for name, st in stats[:_MAX_LOGS]]
    return {"logs": rows, "problems": [] if rows else ["no worker has written a log here"]}


def log(
    run: WatchedRun, name: str, end: int | None = None, unix_s: float | None = None, bytes: int = 1 << 16
) -> dict[str, Any]:
    """Read ``bytes`` of a log: those before offset ``end`` (default: the end of the file), or those around ``unix_s``.
    Raises ConfigurationError for a log that isn't listed."""
    path_by_name, problems = _log_files(run), list[str]()
    if name not in path_by_name:
        raise ConfigurationError(f"name = {name!r}: valid: {', '.join(path_by_name) or 'there are no logs'}")
    with path_by_name[name].open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size

        def time_at(offset: int) -> float:
            file.seek(offset)
            match = _TIME.search(file.read(_BLOCK_BYTES))
            return (
                math.inf if match is None else datetime.fromisoformat(match[1].decode().replace(",", ".")).timestamp()
            )

        if unix_s is not None and time_at(0) == math.inf:
            problems.append("its lines have no times: this is its end")
        elif unix_s is not None:
            end = bisect_left(range(0, size_bytes, _BLOCK_BYTES), unix_s, key=time_at) * _BLOCK_BYTES + bytes // 2
        end = size_bytes if end is None else max(0, min(end, size_bytes))
        start = max(0, end - checked("bytes", bytes, 1, 1 << 20))
        file.seek(start)
        text = file.read(end - start).decode("utf-8", "replace")
    return {"text": text, "start": start, "end": end, "size_bytes": size_bytes, "problems": problems}


def configuration(run: WatchedRun) -> dict[str, Any]:
    """Read the configuration as the run stored it; it isn't validated."""
    path = RunDirectory(run.path).config
    try:
        if not is_inside(path, run.path):
            raise FileNotFoundError(0, "there is none in the run's folder")
        return {"configuration": json.loads(path.read_text(encoding="utf-8")), "problems": []}
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        return {"configuration": {}, "problems": [f"{path.name} can't be read: {reason}"]}
