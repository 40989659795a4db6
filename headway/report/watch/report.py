"""The view *Report*: the run judged in words, and what no curve shows: evaluations, incidents, histograms."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from headway.control.summaries import pooled
from headway.records.errors import ConfigurationError
from headway.records.ledger import EvaluationRecord, StepRecord
from headway.records.plan import PLAN_FILE, RunPlan
from headway.report.formats import duration, percent, quantity, score, shown_kernels
from headway.report.incidents import HEADS, incident_rows
from headway.report.kernels import kernel_sentences
from headway.report.live import shown_pass_at, shown_score
from headway.report.plans.placements import STAGE_HEADS, changes_of, placed_steps, stage_rows
from headway.report.plans.run_plan import draw_plan
from headway.report.run_cost import with_cost
from headway.report.run_view import RunView
from headway.report.sandboxes import latency_rows, sandbox_sentences
from headway.report.tables import steps_time
from headway.report.watch.runs import WatchedRun, inside

_MOST_ROWS = 200  # of events, the newest
_BAD = ("NO,", "NOT BALANCED", "BUDGET BROKEN")
_STATES = {
    "running": "running ({holder})",
    "finished": "finished",
    "stopped": "stopped before its end; it can be resumed",
}
_HEADS_ALONE = ("title", "heads", "text_columns")  # say nothing
_EVALUATION_HEADS = (
    *("phase", "split", "versions", "tasks", "samples", "solve rate", "pass@k", "reward", "length", "failed", "took"),
)
Section = dict[str, Any]  # title, and of sentences, rows under heads, bars and a picture those that it has


def report(run: WatchedRun, price: float | None = None) -> dict[str, Any]:
    """The facts of `headway report RUN`, with ``price`` (dollars of a device's hour) what the run has cost too."""
    with run.tail() as tail:
        view, problems = tail.view(), list(tail.problems)
    try:
        view = with_cost(view, price)
    except ConfigurationError as error:
        problems.append(f"its cost isn't known: {error}")
    sections = [
        _evaluations(view.evaluations),
        *_plan(view, problems),
        *_histograms(view.steps),
        {"title": "Kernels", "sentences": kernel_sentences(view.steps), "bars": _kernel_bars(view.steps)},
        {
            **{"title": "Sandboxes", "sentences": sandbox_sentences(view.steps)},
            **_table(("", "times", "p50, ms", "p99, ms"), latency_rows(view.steps), 1),
        },
        {"title": "Deaths, stalls, restarts, replays", **_table(HEADS, incident_rows(view.lines)[-_MOST_ROWS:], 2)},
        _events(view),
    ]
    summary = view.summary
    return {
        "path": str(view.path),
        "state": _STATES[view.state].format(holder=f"process {view.holder}"),
        "summary": f"{summary.steps:,} steps, {summary.samples_trained:,} samples in {steps_time(summary)}",
        "verdict": [
            {"question": question, "answer": answer, "bad": answer.startswith(_BAD)}
            for question, answer in view.verdict.sentences.items()
        ],
        "pages": view.verdict.pages,
        "figures": _figures(view),
        "sections": [one for one in sections if any(value for name, value in one.items() if name not in _HEADS_ALONE)],
        "problems": problems,
    }


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int) -> Section:
    return {"heads": heads, "rows": rows, "text_columns": text_columns}


def _figures(view: RunView) -> dict[str, str]:
    s, budget = view.summary, view.budget
    figures = {
        "trainer waits": percent(s.trainer_wait_ratio),
        "generator waits": percent(s.generator_wait_ratio),
        "trained, samples/s": quantity(s.trained_per_s),
        "consumption, samples/s": quantity(s.consumption_per_s),
        "production, samples/s": quantity(s.production_per_s),
        "effective production, samples/s": quantity(s.effective_production_per_s),
        "worst staleness, versions": f"{s.max_trajectory_staleness}" + ("" if budget is None else f" of {budget}"),
        "length bias (KS)": f"{s.length_bias_ks:.3f}",
    }
    if skipped := sum(step.skipped for step in view.steps):
        figures["steps skipped (not finite)"] = f"{skipped:,}"
    if s.best_version is not None:
        figures["best version"] = f"{s.best_version:,}"
    return figures


def _evaluations(records: Sequence[EvaluationRecord]) -> Section:
    rows: list[list[str]] = []
    for record in records:
        versions = f"{record.first_version} (held)" if record.held else f"{record.first_version}–{record.last_version}"
        shown = "–", "–", "–", "–"
        if record.samples:
            best = ", ".join(shown_pass_at(record.pass_at))
            rate = score(record.solve_rate, record.standard_error)
            shown = rate, best, f"{record.reward_mean:.3f}", f"{record.length_mean:.1f}"
        failed = f"{record.failed:,}" + (f": {record.failure_cause}" if record.failure_cause else "")
        counts = versions, f"{record.tasks:,}", f"{record.samples:,}"
        rows.append([record.phase, record.split, *counts, *shown, failed, duration(record.duration_s)])
        for label, of in record.by_source.items():
            rows.append(["", label, "", f"{of.tasks:,}", f"{of.samples:,}", shown_score(of), *[""] * 5])
        for name, text in shown_kernels(record.kernels).items():
            rows.append(["", name, "", "", "", text, *[""] * 5])
    return {"title": "Evaluations", **_table(_EVALUATION_HEADS, rows, 2)}


def _plan(view: RunView, problems: list[str]) -> list[Section]:
    """The plan that the run was begun with, and its stages' time placement by placement."""
    path, plan, sections = view.path / PLAN_FILE, None, list[Section]()
    if inside(path, view.path):
        try:
            plan = msgspec.json.decode(path.read_bytes(), type=RunPlan)
        except (OSError, msgspec.DecodeError) as error:
            problems.append(f"{path} can't be read: {error}")
    if plan is not None:
        said = f"{plan.mode}, {plan.samples_per_s:,.3g} samples/s expected on {plan.pool}"
        picture = "data:image/svg+xml;base64," + base64.b64encode(draw_plan(plan).encode()).decode("ascii")
        sections.append({"title": "Plan: a steady step, device by device", "sentences": [said], "picture": picture})
    if plan is not None or changes_of(view.lines):
        rows = stage_rows(placed_steps(view.lines, view.configuration, plan))
        sections.append({"title": "Stages by placement", **_table(STAGE_HEADS, rows, 2)})
    return sections


def _events(view: RunView) -> Section:
    rows = [
        [
            *(event.event, event.detail, ", ".join(f"{key} {value}" for key, value in event.data.items())),
            *(f"{event.step:,}", duration(event.time_s)),
        ]
        for event in view.events[-_MOST_ROWS:]
    ]
    left_out = [f"The last {_MOST_ROWS} of {len(view.events):,}."] if len(view.events) > _MOST_ROWS else []
    heads = ("event", "detail", "data", "version", "time")
    return {"title": "Events", "sentences": left_out, **_table(heads, rows, 3)}


# --- histograms ------------------------------------------------------------------------------------------


def _histograms(steps: Sequence[StepRecord]) -> list[Section]:
    staleness = {
        "trajectories": pooled(step.trajectory_staleness.histogram for step in steps if not step.skipped),
        "tokens": pooled(step.tokens.staleness.histogram for step in steps if step.tokens and not step.skipped),
    }
    said = "Share of everything trained on, by versions between sampling and the gradient."
    rows = [step.rewards.solve_rate_histogram for step in steps if step.rewards]
    bins = len(rows[0]) if rows else 0
    solved = _ends_of([dict(enumerate(row)) for row in rows if len(row) == bins])

    def share(place: float) -> str:
        return "none" if not place else "all" if place == bins - 1 else f"≤{place * 100 / (bins - 1):.0f}%"

    teaches = "Groups by the share of their rollouts that solve the task. Those at either end carry no signal."
    return [
        {"title": "Groups by share solved", "bars": _bars("", teaches, solved, share)},
        {"title": "Staleness, whole run", "bars": _bars("", said, staleness)},
    ]


def _kernel_bars(steps: Sequence[StepRecord]) -> list[dict[str, Any]]:
    scored = [step.kernels for step in steps if step.kernels]
    said = "Raw rewards of answers, in tenths: 0, 0.1 compiled, 0.3 correct, more by speed."
    faster = "Natural logarithm of reference time / answer's time of correct answers, in tenths; 0: as fast."
    return [
        *_bars("Raw rewards", said, _ends_of([one.rewards for one in scored])),
        *_bars("Speed-ups of correct answers", faster, _ends_of([one.log_speedups for one in scored])),
    ]


Counts = Mapping[Any, int]


def _ends_of(rows: Sequence[Counts]) -> dict[str, dict[float, int]]:
    """The sums of the first fifth of some histograms, and of the last."""
    part = max(1, len(rows) // 5)
    return {"first fifth of the steps": _summed(rows[:part]), "last fifth": _summed(rows[-part:])}


def _summed(rows: Sequence[Counts]) -> dict[float, int]:
    total: dict[float, int] = {}
    for row in rows:
        for value, count in row.items():
            total[float(value)] = total.get(float(value), 0) + count
    return total


def _bars(
    title: str, caption: str, histograms: Mapping[str, Counts], label: Callable[[float], str] = "{:g}".format
) -> list[dict[str, Any]]:
    """Histograms side by side, each as shares of its total; [] where all are empty."""
    totals = {name: sum(counts.values()) for name, counts in histograms.items()}
    if not any(totals.values()):
        return []
    places = sorted({place for counts in histograms.values() for place in counts})
    series = [
        {"name": name, "shares": [counts.get(place, 0) / max(1, totals[name]) for place in places]}
        for name, counts in histograms.items()
        if totals[name]
    ]
    return [{"title": title, "caption": caption, "labels": [label(place) for place in places], "series": series}]
