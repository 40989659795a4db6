"""The results that commands print at their end, for people or as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headway.records.ledger import EvaluationRecord, RunSummary
from headway.report.formats import duration, percent, quantity, score
from headway.report.live import evaluation_line
from headway.report.run_view import view_run


def print_summary(
    summary: RunSummary, *, as_json: bool = False, run_dir: str = "", console: Console | None = None
) -> None:
    """Print the table at the end of `headway train`; as JSON exactly the fields of RunSummary."""
    console = console or Console(highlight=False)
    if as_json:
        _print_json(console, summary)
        return
    table = Table.grid(padding=(0, 3))
    table.add_column(style="bold")
    table.add_column()
    for label, value in summary_rows(summary):
        table.add_row(label, value)
    console.print(table)
    if run_dir:
        console.print(Text(f"headway report {run_dir}   writes plots and a verdict"), soft_wrap=True)


def summary_rows(summary: RunSummary) -> list[tuple[str, str]]:
    rows = [
        (
            "steps",
            f"{summary.steps:,} in {steps_time(summary)}" + ("" if summary.finished else ", not finished"),
        ),
        ("samples trained", f"{summary.samples_trained:,} ({quantity(summary.trained_per_s)}/s)"),
        ("solve rate", f"{score(summary.solve_rate_before)} before → {score(summary.solve_rate_after)} after"),
        (
            "waits",
            f"trainer {percent(summary.trainer_wait_ratio)}, generator {percent(summary.generator_wait_ratio)}",
        ),
        (
            "rates, samples/s",
            f"consumption {quantity(summary.consumption_per_s)}, production {quantity(summary.production_per_s)}, "
            f"effective {quantity(summary.effective_production_per_s)}",
        ),
        ("worst staleness", f"{summary.max_trajectory_staleness} versions"),
        ("length bias (KS)", f"{summary.length_bias_ks:.4f}"),
        ("endings", ", ".join(f"{count:,} {ending}" for ending, count in summary.endings.items()) or "none"),
        ("books", "balanced" if summary.books_balanced else "NOT BALANCED"),
    ]
    if summary.simulated:
        rows.insert(0, ("simulated", "no model was trained: rates and waits are those of a scenario"))
    if summary.best_version is not None:
        rows.insert(3, ("best version", f"{summary.best_version:,}"))
    elif summary.finished and not summary.simulated:
        rows.insert(3, ("best version", "none was judged: best/ holds the last"))
    return rows


def steps_time(summary: RunSummary) -> str:
    """The duration of the steps, as far as the ledger has it, in words."""
    lost = f" and the time of {summary.untimed_steps:,} that the ledger has lost" if summary.untimed_steps else ""
    return duration(summary.duration_s) + lost


def print_evaluation(record: EvaluationRecord, *, as_json: bool = False, console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    if as_json:
        _print_json(console, record)
    else:
        console.print(Text(evaluation_line(record)), soft_wrap=True)


def print_verdict(run_dir: str | Path, console: Console | None = None) -> None:
    """Print the verdict of `headway report`, question by question."""
    console = console or Console(highlight=False)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for question, answer in view_run(run_dir).verdict.sentences:
        table.add_row(question, Text(answer))
    console.print(table)


def print_mapping(values: Mapping[str, Any], *, as_json: bool = False, console: Console | None = None) -> None:
    """Print names and values of a result, one a line."""
    console = console or Console(highlight=False)
    if as_json:
        _print_json(console, dict(values))
        return
    table = Table.grid(padding=(0, 3))
    table.add_column(style="bold")
    table.add_column()
    for name, value in values.items():
        table.add_row(Text(name.replace("_", " ")), Text(f"{value:.4g}" if isinstance(value, float) else str(value)))
    console.print(table)


def _print_json(console: Console, value: Any) -> None:
    console.print(Text(msgspec.json.encode(value).decode()), soft_wrap=True)
