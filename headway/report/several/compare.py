"""`headway report RUN RUN... --compare`: several runs over each other on one self-contained page, without scripts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from headway.records.errors import ConfigurationError, HeadwayError
from headway.report.formats import duration, quantity, score
from headway.report.page import html_page, html_table
from headway.report.plots import Draw, Plot, PlotData, render
from headway.report.progress import OnDone, unheard
from headway.report.run_view import RunView, as_json, view_run
from headway.report.series import Column, Series, metric, smoothed
from headway.report.several.axes import AXES, places_of
from headway.report.several.configurations import differences
from headway.report.show import KeptSample, KeptSamples, SampleSelection, visible
from headway.report.tables import summary_rows
from headway.runtime.run_directory import write_whole
from headway.telemetry.rollouts.joined import Decode

_COLOURS = ("#2166ac", "#d6730f", "#2a8a55", "#c0392b", "#7b4fa3", "#8a8f98", "#8c564b", "#17a2b8")
_CURVES: dict[str, tuple[str, Column | None]] = {
    "Solve rate, evaluations": ("With standard errors; lines: validation, squares: test.", None),
    "Solve rate, training tasks": ("As sampled.", lambda step: step.measured_solve_rate),
    "Reward": ("Mean over the rollouts that finished since the last step.", lambda step: step.reward_mean),
    "Response length": ("Mean, tokens.", lambda step: step.length_mean),
    "Entropy": ("A fall to zero means exploration has ended.", metric("entropy")),
    "Staleness": ("Versions between sampling and the gradient, mean.", lambda step: step.trajectory_staleness.mean),
}
_MOST_TASKS, _MOST_CHARACTERS = 3, 20_000  # of rollouts side by side
_MOST_ROLLOUTS = 1_000  # of a run, among which those of one task are looked for
_STYLE = """
.left { display: flex; flex-wrap: wrap; gap: 4px 20px; padding: 0; list-style: none; }
.left i { display: inline-block; width: 22px; height: 4px; margin-right: 6px; vertical-align: middle; }
.by { display: none; }
.axes > input { margin-left: 14px; }
.axes > .plots { margin-top: 10px; }
.pair pre { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 480px; overflow-y: auto; }
"""


class ComparedRun(NamedTuple):
    """A run on a page of several."""

    name: str
    view: RunView
    colour: str
    places: dict[str, dict[int, float]]  # axis -> version -> place on it; an axis that isn't known is missing


def compare(
    run_dirs: Sequence[str | Path],
    output: str | Path,
    price: float | None = None,
    on_progress: OnDone = unheard,
    decoder: Callable[[str], Decode | None] = lambda run: None,
) -> dict[str, str]:
    """Write the page of several runs to ``output``; returns the runs that are left out with what is wrong with each.
    ``price``: dollars of a device's hour, for the axis of dollars. ``decoder(run)``: of its tokens.

    Raises ConfigurationError when none of the runs can be read, HeadwayError when the page can't be written.
    """
    views, left_out = read_runs(run_dirs)
    names = [view.path.resolve().name for view in views]
    runs = [
        ComparedRun(
            name if names.count(name) == 1 else str(view.path),
            view,
            _COLOURS[number % len(_COLOURS)],
            places_of(view, price),
        )
        for number, (name, view) in enumerate(zip(names, views, strict=True))
    ]
    keys = "".join(f'<li><i style="background:{run.colour}"></i>{escape(visible(run.name))}</li>' for run in runs)
    body = [
        f"<h1>{len(runs)} runs</h1>",
        *(f'<p class="bad">Left out: {escape(visible(f"{run}: {why}"))}</p>' for run, why in left_out.items()),
        f'<ul class="left">{keys}</ul>',
        _plots(runs, on_progress),
        "<h2>Numbers</h2>" + _numbers(runs, price),
        "<h2>Configuration: the keys that differ</h2>" + _configuration(runs),
        _rollouts(runs, decoder),
    ]
    title = "Headway: " + ", ".join(visible(run.name) for run in runs)
    write_whole(Path(output), html_page(title, body, _STYLE).encode("utf-8", "replace"))
    return left_out


def compare_json(run_dirs: Sequence[str | Path]) -> dict[str, Any]:
    """Several runs as one JSON object: each as `headway report RUN --json` has it, and how their files differ."""
    views, left_out = read_runs(run_dirs)
    return {
        "runs": [as_json(view) for view in views],
        "configuration": differences([view.configuration for view in views]),
        "left_out": left_out,
    }


def read_runs(run_dirs: Sequence[str | Path]) -> tuple[list[RunView], dict[str, str]]:
    """The runs that can be read, and what is wrong with the others. Raises ConfigurationError when none can."""
    views, left_out = list[RunView](), dict[str, str]()
    for run in run_dirs:
        try:
            views.append(view_run(run))
        except (HeadwayError, OSError) as error:
            left_out[str(run)] = str(error)
    if not views:
        raise ConfigurationError("; ".join(left_out.values()))
    return views, left_out


# --- the parts of the page -------------------------------------------------------------------------------


def _plots(runs: Sequence[ComparedRun], on_progress: OnDone) -> str:
    axes = [axis for axis in AXES if any(axis in run.places for run in runs)]
    figures = ""
    for number, (title, (caption, column)) in enumerate(_CURVES.items()):
        drawn = ""
        for axis in axes:
            plot = Plot("", f"{title} {axis}", caption, _drawing(runs, axis, column))
            svg = render(plot, PlotData(Series([]), [], None))
            drawn += "" if svg is None else f'<div class="by by-{axis}">{svg}</div>'
        head = f"<figcaption><h3>{escape(title)}</h3><p>{escape(caption)}</p></figcaption>"
        figures += f"<figure>{head}{drawn}</figure>" if drawn else ""
        on_progress(number + 1, len(_CURVES))
    choices = "".join(
        f'<input type="radio" name="axis" id="axis-{axis}"{" checked" * (axis == "steps")}>'
        f'<label for="axis-{axis}"> {axis}</label>'
        for axis in axes
    )
    rules = "".join(f"#axis-{axis}:checked ~ .plots .by-{axis} {{ display: block; }}\n" for axis in axes)
    return f'<style>{rules}</style><div class="axes">Over {choices}<div class="plots">{figures}</div></div>'


def _drawing(runs: Sequence[ComparedRun], axis: str, column: Column | None) -> Draw:
    """Draws a curve for each run over ``axis``: of ``column``, or of its evaluations where that is None."""

    def draw(axes: Axes, evidence: PlotData) -> bool:
        axes.set_xlabel(AXES[axis])
        known = [run for run in runs if axis in run.places]
        return any([_curve(axes, run, axis, column) if column else _evaluations(axes, run, axis) for run in known])

    return draw


def _curve(axes: Axes, run: ComparedRun, axis: str, column: Column) -> bool:
    series, places = Series(run.view.steps), run.places[axis]
    x, y, window = series.mean(lambda step: places[step.version]), series.mean(column), len(series) // 25
    if window >= 3:
        axes.plot(x, y, color=run.colour, linewidth=0.7, alpha=0.3)
        y = smoothed(y, window)
    axes.plot(x, y, color=run.colour, linewidth=1.5, marker="." if len(series) < 30 else "")
    return bool(np.isfinite(y).any())


def _evaluations(axes: Axes, run: ComparedRun, axis: str) -> bool:
    versions, places = zip(*sorted(run.places[axis].items()), strict=True)
    measured = [record for record in run.view.evaluations if record.samples]
    for split, style in (("validation", "o-"), ("test", "s")):
        records = [record for record in measured if record.split == split]
        at = [(record.first_version + record.last_version) / 2 for record in records]
        rates, errors = [record.solve_rate for record in records], [record.standard_error for record in records]
        x = np.interp(at, versions, places)
        axes.errorbar(x, rates, errors, fmt=style, color=run.colour, markersize=4, linewidth=1.4, capsize=2.5)
    axes.set_ylim(0, 1.02)
    return bool(measured)


def _numbers(runs: Sequence[ComparedRun], price: float | None) -> str:
    columns = [_final(run, price) for run in runs]
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = [[label, *(column.get(label, "–") for column in columns)] for label in labels]
    return html_table(["", *(visible(run.name) for run in runs)], rows, text_columns=len(runs) + 1)


def _final(run: ComparedRun, price: float | None) -> dict[str, str]:
    view = run.view
    rows = {"state": view.state, "time": duration(view.summary.duration_s)}
    for record in view.evaluations:  # the last of each kind stays
        if record.samples:
            versions = f"version {record.last_version}" if record.held else f"to version {record.last_version}"
            rate = score(record.solve_rate, record.standard_error)
            failed = f"; {record.failures_text}" if record.failed else ""
            rows[f"solve rate, {record.split} {record.phase}"] = f"{rate} ({record.tasks} tasks, {versions}{failed})"
    for axis in ("tokens", "dollars"):
        if axis in run.places:
            rows[f"{axis}, to the last step"] = quantity(max(run.places[axis].values()))
    rows |= {label: text for label, text in summary_rows(view.summary).items() if label != "solve rate"}
    return rows | {"learning": view.verdict.learning_text}


def _configuration(runs: Sequence[ComparedRun]) -> str:
    found = differences([run.view.configuration for run in runs])
    missing = [run.name for run in runs if not run.view.configuration]
    said = "".join(f'<p class="bad">{escape(visible(name))}: its config.json can\'t be read.</p>' for name in missing)
    if not found:
        return said + "<p>None.</p>"
    rows = [[key, *map(visible, values)] for key, values in found.items()]
    return said + html_table(["key", *(visible(run.name) for run in runs)], rows, text_columns=len(runs) + 1)


def _rollouts(runs: Sequence[ComparedRun], decoder: Callable[[str], Decode | None]) -> str:
    """The newest kept rollouts of the same task, side by side; "" where no two runs have kept one."""
    kept: dict[str, dict[str, KeptSample]] = {}  # prompt -> run -> the newest
    for run in runs:
        try:
            samples = KeptSamples(run.view.path, decoder(str(run.view.path)))
            for sample in samples.read(samples.select(SampleSelection(limit=_MOST_ROLLOUTS))[0]):
                kept.setdefault(sample.prompt, {})[run.name] = sample
        except (HeadwayError, OSError):
            continue
    shared = [(prompt, found) for prompt, found in kept.items() if len(found) > 1]
    shared.sort(key=lambda entry: (-len(entry[1]), -min(sample.step or 0 for sample in entry[1].values())))
    parts = []
    for prompt, found in shared[:_MOST_TASKS]:
        sides = "".join(_rollout(name, sample) for name, sample in found.items())
        parts.append(f'<h3>Task</h3><div class="pair">{_pre(prompt)}</div><div class="plots pair">{sides}</div>')
    return "<h2>One task, each run's newest kept rollout</h2>" + "".join(parts) if parts else ""


def _rollout(name: str, sample: KeptSample) -> str:
    solved = "solved" if sample.solved else "not solved"
    step = "in no step" if sample.step is None else f"step {sample.step}"
    said = f"{solved}, reward {sample.reward:g}, {step}, {sample.tokens} tokens, {sample.finish_reason}"
    return f"<figure><h3>{escape(visible(name))}</h3><p>{escape(said)}</p>{_pre(sample.response)}</figure>"


def _pre(text: str) -> str:
    more = len(text) - _MOST_CHARACTERS
    shown = visible(text[:_MOST_CHARACTERS]) + (f"\n… {more:,} more characters" if more > 0 else "")
    return f"<pre>{escape(shown)}</pre>"
