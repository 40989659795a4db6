"""The view *Run*: measured series over an axis, evaluations, events, logs, the configuration."""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from headway.records.errors import ConfigurationError
from headway.records.ledger import EventRecord
from headway.report.live import evaluation_line
from headway.report.series import Floats
from headway.report.several.axes import AXES
from headway.report.watch.runs import RunTail, WatchedRun, inside
from headway.runtime.run_directory import RunDirectory
from headway.telemetry.metrics import STALENESS, STEP_METRICS

_MOST_EVENTS, _MOST_LOGS = 2000, 500
_SECTIONS = {  # of the report's plots, by the first part of a name
    **dict.fromkeys(("reward", "by_source", "curriculum", "group_meta"), "Learning"),
    **dict.fromkeys(("wait", "rates", "queue", "control"), "Balance"),
    "staleness": "Staleness",
    **dict.fromkeys(("length", "length_bias", "endings", "failures", "filtered", "pruning", "pruning_by"), "Rollouts"),
    **dict.fromkeys(("loss", "ratio", "mismatch", "optimiser"), "Optimiser"),
    "agents": "Agents",
    **dict.fromkeys(("kernels", "router", "sandboxes"), ""),  # their own
}
_UNITS = ("samples_per_s", "tokens_per_s", "flop_per_s", "groups", "rollouts", "tokens", "steps", "bytes", "s")
_KINDS = {
    **dict.fromkeys(("start", "resume", "interrupt", "replaying", "restored", "books", "end"), "restart"),
    **dict.fromkeys(("stalled", "stall_ended", "worker_stalled"), "stall"),
    **dict.fromkeys(("alert", "alert_cleared", "step_skipped"), "alert"),
    **dict.fromkeys(("control", "plan_changed", "plan_kept", "plan_outcome"), "plan"),
    **dict.fromkeys(("best", "checkpoint", "last_kept"), "update"),
    "evaluation": "evaluation",
}
_RESTARTS = ("_died", "_restarted", "_lost", "_restored")
_TIME = re.compile(rb"^\[?(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)", re.MULTILINE)


def names(run: WatchedRun) -> dict[str, Any]:
    """The series that a run has measured: name, section of the report, title, unit, caption."""
    captions = {name: caption for name, (_, caption) in STEP_METRICS.items()}
    kinds = [name.removesuffix("_steps") for name in STALENESS]
    captions |= {f"{kind}_{of}_steps": "of what was trained on" for kind in kinds for of in ("mean", "max")}
    with run.tail() as tail:
        rows = [_named(name, captions.get(name, "")) for name in tail.names()]
        return {"series": rows, "problems": tail.problems}


def _named(name: str, caption: str) -> dict[str, str]:
    group, _, rest = name.partition("/")
    section = "Machine" if re.search("mfu|flop|tokens_per|computed", rest) or group == "time" else _SECTIONS.get(group)
    unit = next((unit for unit in _UNITS if rest.endswith(f"_{unit}") or rest == unit), "")
    title = rest.removesuffix(unit).strip("_").replace("_", " ") or rest
    return {
        "name": name,
        "section": section or group.replace("_", " ").capitalize(),
        "title": f"{group.replace('_', ' ')}: {title}",
        "unit": unit.replace("_per_", "/") if unit else "share" if rest.endswith(("share", "ratio")) else "",
        "caption": caption,
    }


def series(
    run: WatchedRun, wanted: Sequence[str], axis: str, points: int, since: float = 0.0, price: float | None = None
) -> dict[str, Any]:
    """Series over an axis in at most ``points`` bins of equally many steps, from version ``since`` on. Raises
    ConfigurationError for a name or an axis that the run doesn't have."""
    with run.tail() as tail:
        known = set(tail.names())
        if missing := [name for name in wanted if name not in known]:
            raise ConfigurationError(f"names = {missing[0]!r}: valid: {', '.join(sorted(known)) or 'none yet'}")
        chosen = tail.column("version") > since - 0.5
        chosen = chosen | (since <= 0)
        steps = int(chosen.sum())
        per = max(1, math.ceil(steps / points))
        places = tail.places(axis, price)
        found = {name: _binned(tail.column(name)[chosen], per) for name in wanted}
        if per == 1:
            found = {name: {**bins, "low": None, "high": None} for name, bins in found.items()}
        return {
            **{"axis": axis, "label": AXES[axis], "steps": steps, "per_point": per, "problems": tail.problems},
            "x": _binned(places[chosen], per)["mean"],
            "unix_s": _binned(tail.unix_column()[chosen], per)["mean"],
            "series": found,
            "evaluations": evaluations(tail, axis, price),
        }


def _binned(values: Floats, per: int) -> dict[str, Any]:
    """Mean, least and greatest of each ``per`` values; NaN where none is finite."""
    rows = np.full((math.ceil(len(values) / per), per), np.nan)
    rows.flat[: len(values)] = np.where(np.isfinite(values), values, np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # bins without a value
        found = {"mean": np.nanmean(rows, axis=1), "low": np.nanmin(rows, axis=1), "high": np.nanmax(rows, axis=1)}
    return {name: array.tolist() for name, array in found.items()}


def evaluations(tail: RunTail, axis: str, price: float | None) -> list[dict[str, Any]]:
    """The evaluations that measured something, at their places on an axis."""
    records = [record for record in tail.evaluations.values() if record.samples]
    at = [(record.first_version + record.last_version) / 2 for record in records]
    versions, places = np.append(0.0, tail.column("version")), np.append(0.0, tail.places(axis, price))
    fields = ("split", "phase", "solve_rate", "standard_error", "tasks")
    return [
        {"x": x, **{field: getattr(record, field) for field in fields}}
        for record, x in zip(records, np.interp(at, versions, places).tolist(), strict=True)
    ]


# --- events ----------------------------------------------------------------------------------------------


def event_of(tail: RunTail, number: int) -> dict[str, Any]:
    """An event or an evaluation of line ``number``, with its place on axes and its time of day."""
    event = tail.events.get(number)
    if event is None:
        record = tail.evaluations[number]
        event = EventRecord(event="evaluation", detail=evaluation_line(record), step=record.step, time_s=record.time_s)
    fields = ("event", "detail", "worker", "cause", "step", "time_s", "data")
    return {
        **{"n": number, "kind": _kind(event.event), "version": event.step, "unix_s": tail.unix_s(number, event.time_s)},
        **{field: getattr(event, field) for field in fields},
        "x": {"steps": event.step, "hours": tail.at_s[number] / 3600},
    }


def _kind(event: str) -> str:
    return _KINDS.get(event, "restart" if event.endswith(_RESTARTS) else "other")


def events(run: WatchedRun, after: int) -> dict[str, Any]:
    """Events and evaluations after line ``after``, the newest of them."""
    with run.tail() as tail:
        numbers = sorted(number for number in {*tail.events, *tail.evaluations} if number > after)
        found = [event_of(tail, number) for number in numbers[-_MOST_EVENTS:]]
        left_out = len(numbers) - len(found)
        problems = [*tail.problems, f"{left_out} older events are left out"] if left_out else tail.problems
        return {"events": found, "problems": problems}


# --- logs and configuration ------------------------------------------------------------------------------


def _log_files(run: WatchedRun) -> dict[str, Path]:
    folder = RunDirectory(run.path).logs
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if inside(path, run.path)}
    return {os.fsencode(name).decode("utf-8", "replace"): path for name, path in files.items()}


def logs(run: WatchedRun) -> dict[str, Any]:
    """The logs of a run's workers, those last written first."""
    found = [(name, path.stat()) for name, path in _log_files(run).items()]
    found.sort(key=lambda one: -one[1].st_mtime)
    rows = [{"name": name, "size_bytes": of.st_size, "modified_unix_s": of.st_mtime} for name, of in found[:_MOST_LOGS]]
    return {"logs": rows, "problems": [] if rows else ["no worker has written a log here"]}


def log(run: WatchedRun, name: str, end: int | None, unix_s: float | None, most_bytes: int) -> dict[str, Any]:
    """A part of a log: that before byte ``end`` (default: of the file), or that around a moment. Raises
    ConfigurationError for a log that isn't listed."""
    files = _log_files(run)
    if name not in files:
        raise ConfigurationError(f"name = {name!r}: valid: {', '.join(files) or 'there are no logs'}")
    problems = list[str]()
    with files[name].open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if unix_s is not None and (at := _place(file, size, unix_s)) is not None:
            end = at + most_bytes // 2
        elif unix_s is not None:
            problems.append("its lines have no times: this is its end")
        end = size if end is None else max(0, min(end, size))
        start = max(0, end - most_bytes)
        file.seek(start)
        text = file.read(end - start).decode("utf-8", "replace")
    return {"text": text, "start": start, "end": end, "size_bytes": size, "problems": problems}


def _place(file: BinaryIO, size: int, unix_s: float) -> int | None:
    """The place of the first line whose time is ``unix_s`` or later, to a block; None: no line has a time."""
    low, high, found = 0, size, None
    while low < high:
        middle = (low + high) // 2
        file.seek(middle)
        timed = _TIME.search(file.read(1 << 16))
        text = timed[1].decode().replace(",", ".") if timed else ""
        if not text:
            high = middle
            continue
        found = found or 0
        if datetime.fromisoformat(text).timestamp() < unix_s:
            low = found = middle + 1
        else:
            high = middle
    return found if found is None else low


def configuration(run: WatchedRun) -> dict[str, Any]:
    """The configuration as the run stored it; not validated: another release's keys may differ."""
    path = RunDirectory(run.path).config
    try:
        if not inside(path, run.path):
            raise FileNotFoundError(0, "there is none in the run's folder")
        return {"configuration": json.loads(path.read_text(encoding="utf-8")), "problems": []}
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        return {"configuration": {}, "problems": [f"{path.name} can't be read: {reason}"]}
