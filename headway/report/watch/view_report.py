"""The view *Report* shows the verdict on a run, and its evaluations, incidents and histograms."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from headway.control.summaries import pooled
from headway.records.errors import ConfigurationError
from headway.records.ledger import EvaluationRecord, StepRecord
from headway.records.plan import PLAN_FILE, RunPlan
from headway.report.episodes import mean_text
from headway.report.formats import duration, format_kernel_shares, percent, quantity, score
from headway.report.incidents import HEADINGS, incident_rows
from headway.report.kernels import kernel_sentences
from headway.report.live_view import format_pass_at, format_score
from headway.report.plans.placements import STAGE_HEADINGS, changes_of, stage_rows, steps_by_placement
from headway.report.plans.run_plan import draw_plan
from headway.report.run_cost import with_cost
from headway.report.run_view import RunView
from headway.report.sandboxes import latency_rows, sandbox_sentences
from headway.report.tables import steps_time
from headway.report.watch.watched_runs import WatchedRun, is_inside

_MAX_VIDEO_BYTES = 4 << 20
_MAX_ROWS = 200  # newest events and incidents in a table
_BAD = ("NO,", "NO:", "BUDGET BROKEN")
_STATES = {
    "running": "running ({holder})",
    "finished": "finished",
    "stopped": "stopped before its end; it can be resumed",
}
_LAYOUT = ("title", "heads", "text_columns")  # a section with these keys alone is empty
_EVALUATION_HEADINGS = (
    *("phase", "split", "versions", "tasks", "samples", "solve rate", "pass@k", "reward", "length", "failed", "took"),
)
Section = dict[str, Any]  # title, and any of: sentences, rows under heads, bars, picture


def report(run: WatchedRun, price: float | None = None) -> dict[str, Any]:
    """Return the contents of `headway report RUN`; with ``price`` (dollars of a device-hour) also the run's cost."""
    with run.tail() as tail:
        view, problems = tail.view(), list(tail.problems)
    try:
        view = with_cost(view, price)
    except ConfigurationError as error:
        problems.append(f"its cost isn't known: {error}")
    sections = [
        _evaluations(view.evaluations),
        *_video(view),
        *_plan(view, problems),
        *_histograms(view.steps),
        {"title": "Kernels", "sentences": kernel_sentences(view.steps), "bars": _kernel_bars(view.steps)},
        {
            **{"title": "Sandboxes", "sentences": sandbox_sentences(view.steps)},
            **_table(("", "times", "p50, ms", "p99, ms"), latency_rows(view.steps), 1),
        },
        {"title": "Deaths, stalls, restarts, replays", **_table(HEADINGS, incident_rows(view.lines)[-_MAX_ROWS:], 2)},
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
        "sections": [part for part in sections if any(value for name, value in part.items() if name not in _LAYOUT)],
        "problems": problems,
    }


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int) -> Section:
    return {"heads": heads, "rows": rows, "text_columns": text_columns}


def _figures(view: RunView) -> dict[str, str]:
    totals, budget = view.summary, view.budget
    figures = {
        "trainer waits": percent(totals.trainer_wait_ratio),
        "generator waits": percent(totals.generator_wait_ratio),
        "trained, samples/s": quantity(totals.trained_per_s),
        "consumption, samples/s": quantity(totals.consumption_per_s),
        "production, samples/s": quantity(totals.production_per_s),
        "effective production, samples/s": quantity(totals.effective_production_per_s),
        "worst staleness, versions": f"{totals.max_trajectory_staleness}" + ("" if budget is None else f" of {budget}"),
        "length bias (KS)": f"{totals.length_bias_ks:.3f}",
    }
    if skipped := sum(step.skipped for step in view.steps):
        figures["steps skipped (not finite)"] = f"{skipped:,}"
    if totals.best_version is not None:
        figures["best version"] = f"{totals.best_version:,}"
    return figures


def _evaluations(records: Sequence[EvaluationRecord]) -> Section:
    rows: list[list[str]] = []
    for record in records:
        versions = f"{record.first_version} (held)" if record.held else f"{record.first_version}–{record.last_version}"
        score_cells = "–", "–", "–", "–"
        if record.samples:
            pass_text = ", ".join(format_pass_at(record.pass_at))
            rate_text = score(record.solve_rate, record.standard_error)
            has_episodes, mean = bool(record.return_interval), record.reward_mean
            reward_text = mean_text(mean, record.return_interval) if has_episodes else f"{mean:.3f}"
            score_cells = rate_text, pass_text, reward_text, f"{record.length_mean:.1f}"
        failed_text = f"{record.failed:,}" + (f": {record.failure_cause}" if record.failure_cause else "")
        count_cells = versions, f"{record.tasks:,}", f"{record.samples:,}"
        rows.append([record.phase, record.split, *count_cells, *score_cells, failed_text, duration(record.duration_s)])
        for label, source in record.by_source.items():
            rows.append(["", label, "", f"{source.tasks:,}", f"{source.samples:,}", format_score(source), *[""] * 5])
        for name, text in format_kernel_shares(record.kernels).items():
            rows.append(["", name, "", "", "", text, *[""] * 5])
    return {"title": "Evaluations", **_table(_EVALUATION_HEADINGS, rows, 2)}


def _video(view: RunView) -> list[Section]:
    """Return a section with the newest video of an evaluation's episode, if it is small enough for a page."""
    path = max((view.path / "videos").glob("*.gif"), default=None)
    if path is None or not is_inside(path, view.path) or path.stat().st_size > _MAX_VIDEO_BYTES:
        return []
    sentences = [f"Its first one ({path.name}); videos/ has those before."]
    picture = "data:image/gif;base64," + base64.b64encode(path.read_bytes()).decode("ascii")
    return [{"title": "An episode of the last evaluation", "sentences": sentences, "picture": picture}]


def _plan(view: RunView, problems: list[str]) -> list[Section]:
    """Return sections with the plan with which the run started, and the time of its stages by placement."""
    path, plan, sections = view.path / PLAN_FILE, None, list[Section]()
    if is_inside(path, view.path):
        try:
            plan = msgspec.json.decode(path.read_bytes(), type=RunPlan)
        except (OSError, msgspec.DecodeError) as error:
            problems.append(f"{path} can't be read: {error}")
    if plan is not None:
        summary = f"{plan.mode}, {plan.samples_per_s:,.3g} samples/s expected on {plan.pool}"
        picture = "data:image/svg+xml;base64," + base64.b64encode(draw_plan(plan).encode()).decode("ascii")
        sections.append({"title": "Plan: a steady step, device by device", "sentences": [summary], "picture": picture})
    if plan is not None or changes_of(view.lines):
        rows = stage_rows(steps_by_placement(view.lines, view.configuration, plan))
        sections.append({"title": "Stages by placement", **_table(STAGE_HEADINGS, rows, 2)})
    return sections


def _events(view: RunView) -> Section:
    rows = [
        [
            *(event.event, event.detail, ", ".join(f"{key} {value}" for key, value in event.data.items())),
            *(f"{event.step:,}", duration(event.time_s)),
        ]
        for event in view.events[-_MAX_ROWS:]
    ]
    left_out_texts = [f"The last {_MAX_ROWS} of {len(view.events):,}."] if len(view.events) > _MAX_ROWS else []
    heads = ("event", "detail", "data", "version", "time")
    return {"title": "Events", "sentences": left_out_texts, **_table(heads, rows, 3)}


# --- histograms ------------------------------------------------------------------------------------------


def _histograms(steps: Sequence[StepRecord]) -> list[Section]:
    staleness_by_kind = {
        "trajectories": pooled(step.trajectory_staleness.histogram for step in steps if not step.skipped),
        "tokens": pooled(step.tokens.staleness.histogram for step in steps if step.tokens and not step.skipped),
    }
    staleness_caption = "Share of everything trained on, by versions between sampling and the gradient."
    solve_histograms = [step.rewards.solve_rate_histogram for step in steps if step.rewards]
    bins = len(solve_histograms[0]) if solve_histograms else 0
    solved_by_fifth = _fifths([dict(enumerate(row)) for row in solve_histograms if len(row) == bins])

    def share(bin_index: float) -> str:
        return "none" if not bin_index else "all" if bin_index == bins - 1 else f"≤{bin_index * 100 / (bins - 1):.0f}%"

    solved_caption = "Groups by the share of their rollouts that solve the task. Those at either end carry no signal."
    return [
        {"title": "Groups by share solved", "bars": _bars("", solved_caption, solved_by_fifth, share)},
        {"title": "Staleness, whole run", "bars": _bars("", staleness_caption, staleness_by_kind)},
    ]


def _kernel_bars(steps: Sequence[StepRecord]) -> list[dict[str, Any]]:
    scored = [step.kernels for step in steps if step.kernels]
    rewards_caption = "Raw rewards of answers, in tenths: 0, 0.1 compiled, 0.3 correct, more by speed."
    speedup_caption = "Natural logarithm of reference time / answer's time of correct answers, in tenths; 0: as fast."
    return [
        *_bars("Raw rewards", rewards_caption, _fifths([kernels.rewards for kernels in scored])),
        *_bars("Speed-ups of correct answers", speedup_caption, _fifths([kernels.log_speedups for kernels in scored])),
    ]


Counts = Mapping[Any, int]


def _fifths(rows: Sequence[Counts]) -> dict[str, dict[float, int]]:
    """Sum the first fifth of the histograms, and the last fifth."""
    fifth_count = max(1, len(rows) // 5)
    return {"first fifth of the steps": _summed(rows[:fifth_count]), "last fifth": _summed(rows[-fifth_count:])}


def _summed(rows: Sequence[Counts]) -> dict[float, int]:
    count_by_value: dict[float, int] = {}
    for row in rows:
        for value, count in row.items():
            count_by_value[float(value)] = count_by_value.get(float(value), 0) + count
    return count_by_value


def _bars(
    title: str, caption: str, histograms: Mapping[str, Counts], label: Callable[[float], str] = "{:g}".format
) -> list[dict[str, Any]]:
    """Draw histograms side by side, each as shares of its total; [] where all are empty."""
    totals = {name: sum(counts.values()) for name, counts in histograms.items()}
    if not any(totals.values()):
        return []
    bucket_keys = sorted({key for counts in histograms.values() for key in counts})
    series_rows = [
        {"name": name, "shares": [counts.get(key, 0) / max(1, totals[name]) for key in bucket_keys]}
        for name, counts in histograms.items()
        if totals[name]
    ]
    return [{"title": title, "caption": caption, "labels": [label(key) for key in bucket_keys], "series": series_rows}]
