"""Prints the results of commands as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headway.records.ledger import EpisodeStatistics, RunSummary
from headway.report.episodes import returns_text
from headway.report.formats import duration, format_kernel_shares, percent, quantity, score

Rows = dict[str, str]  # label -> text


def print_rows(rows: Mapping[str, str], title: str = "", console: Console | None = None, *, gap: int = 3) -> None:
    """Print ``rows`` with bold labels, below ``title`` unless it is empty. ``gap``: blanks between label and text."""
    console = console or Console(highlight=False)
    table = Table.grid(padding=(0, gap))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for label, text in rows.items():
        table.add_row(Text(label), Text(text))
    if title:
        console.print(Text(f"\n{title}", style="bold underline"))
    console.print(table)


def print_summary(summary: RunSummary, run_dir: str, console: Console | None = None) -> None:
    """Print the table at the end of `headway train`."""
    console = console or Console(highlight=False)
    print_rows(summary_rows(summary), console=console)
    console.print(Text(f"headway report {run_dir}   judges the run; its page: {run_dir}/report.html"), soft_wrap=True)


def summary_rows(summary: RunSummary) -> Rows:
    rows: Rows = {}
    if summary.simulated:
        rows["simulated"] = "no model was trained: rates and waits are those of a scenario"
    if summary.ended:
        rows["ended"] = summary.ended
    rows["steps"] = f"{summary.steps:,} in {steps_time(summary)}" + ("" if summary.finished else ", not finished")
    if (episodes := summary.episodes) is not None:
        return rows | _episode_rows(summary, episodes)
    rows |= {
        "samples trained": f"{summary.samples_trained:,} ({quantity(summary.trained_per_s)}/s)",
        "solve rate": f"{score(summary.solve_rate_before)} before → {score(summary.solve_rate_after)} after"
        + (f", of version {summary.version_after:,}" if summary.version_after is not None else ""),
    }
    failed_by_phase = {"before": summary.failed_before, "after": summary.failed_after}
    if any(failed_by_phase.values()):
        rows["failed"] = "; ".join(f"{phase}: {text}" for phase, text in failed_by_phase.items() if text)
    if summary.best_version is not None:
        rows["best version"] = f"{summary.best_version:,}"
    elif summary.finished and not summary.simulated:
        rows["best version"] = "none was judged: best/ holds the last"
    return rows | {
        "waits": f"trainer {percent(summary.trainer_wait_ratio)}, generator {percent(summary.generator_wait_ratio)}",
        "rates, samples/s": (
            f"consumption {quantity(summary.consumption_per_s)}, production {quantity(summary.production_per_s)}, "
            f"effective {quantity(summary.effective_production_per_s)}"
        ),
        "worst staleness": f"{summary.max_trajectory_staleness} versions",
        "length bias (KS)": f"{summary.length_bias_ks:.4f}",
        "endings": ", ".join(f"{count:,} {ending}" for ending, count in summary.endings.items()) or "none",
        "accounting": "balanced" if summary.accounting_balanced else "NOT BALANCED",
    }


def _episode_rows(summary: RunSummary, episodes: EpisodeStatistics) -> Rows:
    """Describe a run of a policy in simulators."""
    rate = summary.environment_steps / summary.duration_s if summary.duration_s else 0.0
    return {
        "environment steps": f"{summary.environment_steps:,} ({quantity(rate)}/s, starts and evaluations included)",
        "last 100 episodes": returns_text(episodes),
        "best version": "none was evaluated" if summary.best_version is None else f"{summary.best_version:,}",
        "waits": f"learner {percent(summary.trainer_wait_ratio)}, simulators {percent(summary.generator_wait_ratio)}",
        "worst staleness": f"{summary.max_trajectory_staleness} versions",
        "fragments": ", ".join(f"{count:,} {ending}" for ending, count in summary.endings.items()) or "none",
        "accounting": "balanced" if summary.accounting_balanced else "NOT BALANCED",
    }


def steps_time(summary: RunSummary) -> str:
    """Describe the duration of the steps, as far as the ledger has it."""
    lost_text = f" and the time of {summary.untimed_steps:,} that the ledger has lost" if summary.untimed_steps else ""
    return duration(summary.duration_s) + lost_text


def sft_rows(result: Mapping[str, Any]) -> Rows:
    """Describe the result of `headway sft` as rows, without its evaluations, which were printed during the run."""
    displayed_values = {name: value for name, value in result.items() if name not in ("evaluations", "kernels")}
    return mapping_rows(displayed_values | format_kernel_shares(result.get("kernels", {})))


def mapping_rows(values: Mapping[str, Any]) -> Rows:
    """Describe the names and values of a result as rows."""
    return {
        name.replace("_", " "): f"{value:.4g}" if isinstance(value, float) else str(value)
        for name, value in values.items()
    }
