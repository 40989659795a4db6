"""`headway report`: a run as one self-contained HTML page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

import msgspec

from headway.records.ledger import EvaluationRecord, EventRecord
from headway.records.plan import PLAN_FILE, RunPlan
from headway.report.curriculum_plots import CURRICULUM_PLOTS
from headway.report.formats import duration, percent, quantity, score, shown_kernels
from headway.report.incidents import HEADS, incident_rows
from headway.report.kernels import KERNEL_PLOTS, KERNELS, kernel_sentences
from headway.report.live import shown_pass_at, shown_score
from headway.report.plans.placements import STAGE_HEADS, changes_of, placed_steps, stage_rows
from headway.report.plans.run_plan import draw_plan
from headway.report.plots import PLOTS, TRAINER, Plot, PlotData, metric_plot, render
from headway.report.progress import OnDone, unheard
from headway.report.run_cost import with_cost
from headway.report.run_view import RunView, view_run
from headway.report.sandboxes import SANDBOX_PLOTS, SECTION, latency_rows, sandbox_sentences
from headway.report.series import Series
from headway.report.tables import steps_time
from headway.runtime.run_directory import write_whole

MAX_EVENTS = 200
_BAD = ("NO,", "NOT BALANCED", "BUDGET BROKEN")

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
       color: #1c2530; background: #f6f7f9; margin: 0; }
main { max-width: 1160px; margin: 0 auto; padding: 28px 24px 60px; }
h1 { font-size: 25px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 34px 0 10px; border-bottom: 1px solid #d8dce2; padding-bottom: 4px; }
h3 { font-size: 14px; margin: 0; }
.state { color: #55606e; margin: 2px 0 18px; }
.verdict, figure, .tiles div { background: #fff; border: 1px solid #dfe3e8; border-radius: 6px; }
.verdict { padding: 6px 20px; border-left: 5px solid #2166ac; }
.verdict dl { display: grid; grid-template-columns: max-content 1fr; gap: 6px 20px; margin: 10px 0; }
.verdict dt { font-weight: 600; color: #3a4654; }
.verdict dd { margin: 0; }
.bad { color: #a52a1c; font-weight: 600; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(165px, 1fr)); gap: 10px; margin-top: 14px; }
.tiles div { padding: 9px 13px; }
.tiles b { display: block; font-size: 20px; font-variant-numeric: tabular-nums; }
.tiles span { color: #55606e; font-size: 12.5px; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(440px, 1fr)); gap: 14px; }
figure { margin: 0; padding: 12px 14px 6px; break-inside: avoid; }
figcaption p { margin: 0; color: #55606e; font-size: 12.5px; }
figure svg { width: 100%; height: auto; display: block; }
table { border-collapse: collapse; width: 100%; background: #fff; font-size: 13.5px;
        font-variant-numeric: tabular-nums; }
th, td { padding: 5px 10px; border-bottom: 1px solid #e6e9ed; text-align: right; }
th { background: #eef1f4; font-weight: 600; }
th.text, td.text { text-align: left; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
summary { cursor: pointer; color: #2166ac; }
pre { background: #fff; border: 1px solid #dfe3e8; border-radius: 6px; padding: 12px; overflow-x: auto;
      font-size: 12.5px; }
@media (max-width: 620px) { .plots, .verdict dl { grid-template-columns: 1fr; } }
@media print {
  body { background: #fff; font-size: 11px; }
  main { max-width: none; padding: 0; }
  .plots { grid-template-columns: 1fr 1fr; }
  .verdict, .tiles { break-inside: avoid; }
  h2 { break-after: avoid; }
  @page { margin: 14mm; }
}
"""


def report(
    run_dir: str | Path,
    output: str | Path | None = None,
    usd_per_device_hour: float | None = None,
    on_progress: OnDone = unheard,
) -> Path:
    """Write the page of the run at ``run_dir`` to ``output`` (default: ``RUN/report.html``) and return its path. With a
    price it also says what the run has cost.

    Needs only the run's ledger, so it also works for a run that is running or was killed. The page is self-contained.
    Raises ConfigurationError when there is no ledger, HeadwayError when the page can't be written.
    """
    path = Path(output) if output is not None else Path(run_dir) / "report.html"
    page = render_page(with_cost(view_run(run_dir), usd_per_device_hour), on_progress)
    write_whole(path, page.encode("utf-8", "replace"))
    return path


def render_page(view: RunView, on_progress: OnDone = unheard) -> str:
    """Render the whole page as HTML."""
    body = [
        f"<h1>{escape(view.path.resolve().name)}</h1>",
        f'<p class="state">{_state(view)}</p>',
        _verdict(view),
        _tiles(view),
        _plan(view),
        _evaluations(view.evaluations),
        *_plots(view, on_progress),
        _incidents(view),
        _events(view.events),
        _configuration(view),
    ]
    return html_page(f"Headway report: {view.path}", body)


def html_page(title: str, body: Sequence[str], style: str = "") -> str:
    """A whole page with the report's style, and ``style`` after it. ``body``: HTML; ``title``: text."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}{style}</style></head>\n<body><main>\n" + "\n".join(body) + "\n</main></body></html>\n"
    )


def _state(view: RunView) -> str:
    words = {
        "running": f"running (process {view.holder})",
        "finished": "finished",
        "stopped": "stopped before its end; it can be resumed",
    }
    summary = view.summary
    return (
        f"{escape(str(view.path))} · {words[view.state]} · {summary.steps:,} steps, {summary.samples_trained:,} "
        f"samples in {steps_time(summary)}"
    )


def _plan(view: RunView) -> str:
    """The plan that the run was begun with, beside what it reaches."""
    path = view.path / PLAN_FILE
    if not path.is_file():
        return _placements(view, None)
    try:
        plan = msgspec.json.decode(path.read_bytes(), type=RunPlan)
    except (OSError, msgspec.DecodeError) as error:
        return f'<p class="state">{escape(str(path))} can\'t be read: {escape(str(error))}</p>'
    said = f"{plan.mode}, {plan.samples_per_s:,.3g} samples/s expected on {plan.pool}"
    head = f"<figcaption><h3>Plan: a steady step, device by device</h3><p>{escape(said)}</p></figcaption>"
    drawing = draw_plan(plan)
    return f"<figure>{head}{drawing[drawing.index('<svg') :]}</figure>" + _placements(view, plan)


def _placements(view: RunView, plan: RunPlan | None) -> str:
    """The stages' time placement by placement; "" without plan and changes, which are among the events."""
    if plan is None and not changes_of(view.lines):
        return ""
    stages = stage_rows(placed_steps(view.lines, view.configuration, plan))
    return "<h2>Stages by placement</h2>" + html_table(STAGE_HEADS, stages, text_columns=2)


def _verdict(view: RunView) -> str:
    rows = []
    for question, answer in view.verdict.sentences.items():
        bad = ' class="bad"' if answer.startswith(_BAD) else ""
        rows.append(f"<dt>{escape(question)}</dt><dd{bad}>{escape(answer)}</dd>")
    return '<section class="verdict"><dl>' + "".join(rows) + "</dl></section>"


def _tiles(view: RunView) -> str:
    s = view.summary
    tiles = {
        "trainer waits": percent(s.trainer_wait_ratio),
        "generator waits": percent(s.generator_wait_ratio),
        "trained, samples/s": quantity(s.trained_per_s),
        "consumption, samples/s": quantity(s.consumption_per_s),
        "production, samples/s": quantity(s.production_per_s),
        "effective production, samples/s": quantity(s.effective_production_per_s),
        "worst staleness, versions": _of(s.max_trajectory_staleness, view.budget),
        "length bias (KS)": f"{s.length_bias_ks:.3f}",
    }
    skipped = sum(step.skipped for step in view.steps)
    if skipped:
        tiles["steps skipped (not finite)"] = f"{skipped:,}"
    if s.best_version is not None:
        tiles["best version"] = f"{s.best_version:,}"
    cells = [f"<div><b>{escape(value)}</b><span>{escape(label)}</span></div>" for label, value in tiles.items()]
    return f'<div class="tiles">{"".join(cells)}</div>'


def _of(value: int, limit: int | None) -> str:
    return f"{value} of {limit}" if limit is not None else str(value)


def _evaluations(records: Sequence[EvaluationRecord]) -> str:
    if not records:
        return ""
    heads = [
        "phase",
        "split",
        "versions",
        "tasks",
        "samples",
        "solve rate",
        "pass@k",
        "reward",
        "length",
        "failed",
        "took",
    ]
    rows: list[list[str]] = []
    for record in records:
        versions = f"{record.first_version}" if record.held else f"{record.first_version}–{record.last_version}"
        row = [
            record.phase,
            record.split,
            versions + (" (held)" if record.held else ""),
            f"{record.tasks:,}",
            f"{record.samples:,}",
            *(_scores(record) if record.samples else ("–", "–", "–", "–")),
            f"{record.failed:,}" + (f": {record.failure_cause}" if record.failure_cause else ""),
            duration(record.duration_s),
        ]
        rows.append(row)
        for label, source in record.by_source.items():
            solved = shown_score(source)
            rows.append(["", label, "", f"{source.tasks:,}", f"{source.samples:,}", solved, "", "", "", "", ""])
        for name, shown in shown_kernels(record.kernels).items():
            rows.append(["", name, "", "", "", shown, "", "", "", "", ""])
    return "<h2>Evaluations</h2>" + html_table(heads, rows, text_columns=2)


def _scores(record: EvaluationRecord) -> tuple[str, str, str, str]:
    solved, best = score(record.solve_rate, record.standard_error), ", ".join(shown_pass_at(record.pass_at))
    return solved, best, f"{record.reward_mean:.3f}", f"{record.length_mean:.1f}"


def _plots(view: RunView, on_progress: OnDone) -> list[str]:
    evidence = PlotData(Series(view.steps), view.evaluations, view.budget)
    if not len(evidence.series) and not view.evaluations:
        return ["<p>No step is recorded yet.</p>"]
    figures: dict[str, list[str]] = {}
    plots = [*PLOTS, *CURRICULUM_PLOTS, *KERNEL_PLOTS, *SANDBOX_PLOTS, *_further_metrics(evidence.series)]
    for number, plot in enumerate(plots):
        on_progress(number, len(plots))
        svg = render(plot, evidence)
        if svg is not None:
            figures.setdefault(plot.section, []).append(
                f"<figure><figcaption><h3>{escape(plot.title)}</h3><p>{escape(plot.caption)}</p></figcaption>{svg}</figure>"
            )
    note = ""
    if evidence.series.per_bin > 1:
        note = f'<p class="state">Each point of a curve stands for {evidence.series.per_bin} steps.</p>'
    kernels = "".join(f"<p>{escape(sentence)}</p>" for sentence in kernel_sentences(view.steps))
    words = {SECTION: _sandboxes(view), KERNELS: kernels}
    sections = [
        f'<h2>{escape(section)}</h2>{words.get(section, "")}<div class="plots">{"".join(drawn)}</div>'
        for section, drawn in figures.items()
    ]
    return [note, *sections]


def _sandboxes(view: RunView) -> str:
    heads = ["", "times", "p50, ms", "p99, ms"]
    rows = latency_rows(view.steps)
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in sandbox_sentences(view.steps))
    return said + (html_table(heads, rows, text_columns=1) if rows else "")


def _further_metrics(series: Series) -> list[Plot]:
    """A plot for each metric of the trainer that no other plot shows."""
    shown = {"loss", "entropy", "grad_norm", "clip_fraction", "learning_rate"}
    names = [
        name for name in series.metric_names() if name not in shown and not name.startswith(("ratio_", "mismatch_"))
    ]
    return [Plot("Optimiser", name, "As the trainer reports it.", metric_plot((name, TRAINER, name))) for name in names]


def _incidents(view: RunView) -> str:
    rows = incident_rows(view.lines)[-MAX_EVENTS:]
    return "<h2>Deaths, stalls, restarts, replays</h2>" + html_table(HEADS, rows, text_columns=2) if rows else ""


def _events(events: Sequence[EventRecord]) -> str:
    if not events:
        return ""
    rows = []
    for event in events[-MAX_EVENTS:]:
        data = ", ".join(f"{key} {value}" for key, value in event.data.items())
        rows.append([event.event, event.detail, data, f"{event.step:,}", duration(event.time_s)])
    heads = ["event", "detail", "data", "version", "time"]
    left_out = f"<p>The last {MAX_EVENTS} of {len(events):,}.</p>" if len(events) > MAX_EVENTS else ""
    return "<h2>Events</h2>" + left_out + html_table(heads, rows, text_columns=3)


def _configuration(view: RunView) -> str:
    if not view.configuration:
        return ""
    text = escape(json.dumps(view.configuration, indent=2, ensure_ascii=False))
    return f"<h2>Configuration</h2><details><summary>show</summary><pre>{text}</pre></details>"


def html_table(heads: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int) -> str:
    """A table whose first ``text_columns`` are aligned as text. Escapes every cell."""
    body = "".join(_row(row, text_columns) for row in rows)
    return f'<div class="wide"><table>{_row(heads, text_columns, "th")}{body}</table></div>'


def _row(cells: Sequence[str], text_columns: int, tag: str = "td") -> str:
    parts = [
        f"<{tag}{' class=text' if column < text_columns else ''}>{escape(cell)}</{tag}>"
        for column, cell in enumerate(cells)
    ]
    return "<tr>" + "".join(parts) + "</tr>"
