"""The view *Compare* plots several runs over one axis, with their numbers and the keys in which they differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.records.errors import ConfigurationError
from headway.report.formats import duration, quantity, score
from headway.report.several.axes import AXES
from headway.report.several.compare import differences
from headway.report.several.run_list import holder_of
from headway.report.tables import summary_rows
from headway.report.watch.run_series import configuration, series
from headway.report.watch.watched_runs import RunTail, WatchedRun, checked
from headway.runtime.run_directory import RunDirectory

_MAX_RUNS = 16


def compare(
    runs: Sequence[WatchedRun], names: str = "", axis: str = "steps", points: int = 400, price: float | None = None
) -> dict[str, Any]:
    """Return the series of several runs; a run lacks the series that it hasn't measured. Raises ConfigurationError for
    an unknown axis, or too many runs."""
    checked("runs", len(runs), 1, _MAX_RUNS)
    rows, problems, configurations = list[dict[str, Any]](), list[str](), list[dict[str, Any]]()
    for run in dict.fromkeys(runs):
        with run.tail(wide=True) as tail:
            known_names = ",".join(set(tail.names()) & set(names.split(",")))
            state = tail.state(holder_of(RunDirectory(run.path)))
            row = {"id": run.id, "name": run.path.name, "numbers": _numbers(tail, state, price)}
        try:
            run_series = series(run, known_names, axis, points, price=price)
        except ConfigurationError as error:
            if axis not in AXES:
                raise
            run_series = {"x": [], "series": {}, "evaluations": [], "problems": [str(error)]}
        rows.append(row | {name: run_series[name] for name in ("x", "series", "evaluations")})
        stored_settings = configuration(run)
        configurations.append(stored_settings["configuration"])
        problems += [f"{run.id}: {problem}" for problem in (*run_series["problems"], *stored_settings["problems"])]
    return {
        **{"runs": rows, "differences": differences(configurations), "problems": problems},
        **{"axis": axis, "label": AXES[axis], "axes": [key for key in AXES if key != "dollars" or price is not None]},
    }


def _numbers(tail: RunTail, state: str, price: float | None) -> dict[str, str]:
    """Return the numbers of `headway report`, and the last evaluation of each kind."""
    view, cost = tail.view(), tail.cost(price)
    rows = {"state": state, "time": duration(view.summary.duration_s)}
    for record in view.evaluations:  # the last of each kind stays
        if record.samples:
            versions = f"version {record.last_version}" if record.held else f"to version {record.last_version}"
            rate = score(record.solve_rate, record.standard_error)
            failed = f"; {record.failures_text}" if record.failed else ""
            rows[f"solve rate, {record.split} {record.phase}"] = f"{rate} ({record.tasks} tasks, {versions}{failed})"
    rows["tokens trained"] = quantity(sum(step.flow.trained_tokens for step in view.steps if not step.skipped))
    rows |= {label: text for label, text in summary_rows(view.summary).items() if label != "solve rate"}
    rows |= {"learning": view.verdict.learning_text}
    return rows if cost is None else rows | {"cost": f"${cost.usd:,.2f}"}
