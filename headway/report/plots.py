"""The report's plots: each is a function of the ledger that makes one SVG, or none when there is nothing to show."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from headway.control.summaries import pooled
from headway.records.ledger import EvaluationRecord
from headway.records.rollout import ENDINGS
from headway.report.series import Column, Floats, Series, metric, smoothed

TRAINER, GENERATOR, THIRD, GREY, ALARM = "#2166ac", "#d6730f", "#2a8a55", "#8a8f98", "#c0392b"
_ENDING_COLOURS = {
    "trained": THIRD,
    "filtered": "#9ecae1",
    "pruned": "#bcbddc",
    "discarded": GREY,
    "overdue": GENERATOR,
    "failed": ALARM,
}
STYLE = {
    "svg.fonttype": "none",  # text stays text: smaller, searchable, and it prints sharp
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e6ea",
    "grid.linewidth": 0.6,
    "axes.edgecolor": "#8a8f98",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


class PlotData(NamedTuple):
    """The data of all plots: steps, evaluations and the staleness budget."""

    series: Series
    evaluations: Sequence[EvaluationRecord]
    budget: int | None


Draw = Callable[[Axes, PlotData], bool]  # False: nothing to show


class Plot(NamedTuple):
    """A plot of the page: its place, its caption and the function that draws it."""

    section: str
    title: str
    caption: str  # how to read it
    draw: Draw


def plots_of(sections: Mapping[str, Mapping[str, tuple[str, Draw]]]) -> tuple[Plot, ...]:
    """Make plots from section -> title -> (caption, draw)."""
    return tuple(Plot(section, title, *of) for section, plots in sections.items() for title, of in plots.items())


def render(plot: Plot, evidence: PlotData) -> str | None:
    """Render a plot as a self-contained ``<svg>`` element; None when there is nothing to show."""
    # The salt makes ids distinct between the plots of a page, and equal from one rendering to the next.
    style: Any = {**STYLE, "svg.hashsalt": plot.title}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(5.4, 2.7), layout="constrained")
        axes = figure.subplots()
        if not plot.draw(axes, evidence):
            return None
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _line(axes: Axes, series: Series, y: Floats, colour: str, label: str, style: str = "-") -> bool:
    """Draw a curve, a long one with its moving mean. False (nothing drawn) when no value is finite."""
    if not np.isfinite(y).any():
        return False
    window = len(series) // 25
    if window < 3:
        axes.plot(series.x, y, style, color=colour, label=label, linewidth=1.4, marker="." if len(series) < 30 else "")
    else:
        axes.plot(series.x, y, style, color=colour, linewidth=0.7, alpha=0.3)
        axes.plot(series.x, smoothed(y, window), style, color=colour, label=label, linewidth=1.6)
    return True


def _finish(axes: Axes, *, percent: bool = False, bottom: float | None = 0.0, ylabel: str = "") -> None:
    axes.set_xlabel("version")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    if ylabel:
        axes.set_ylabel(ylabel)
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    if bottom is not None:
        axes.set_ylim(bottom=bottom)
        if axes.get_ylim()[1] <= bottom:
            axes.set_ylim(bottom, bottom + 1.0)
    _legend(axes)


def _legend(axes: Axes) -> None:
    """Add a legend above the plot, so that it never covers a curve; none for a single curve."""
    handles, labels = axes.get_legend_handles_labels()
    figure = axes.get_figure()
    if len(labels) > 1 and isinstance(figure, Figure):
        figure.legend(handles, labels, loc="outside upper left", ncols=len(labels), handlelength=1.4, columnspacing=1.2)


def curves(
    *curves: tuple[str, str, Column],
    percent: bool = False,
    top: float | None = None,
    bottom: float | None = 0.0,
    ylabel: str = "",
    skip_zero: bool = True,
    log: bool = False,
) -> Draw:
    """Make a plot of the means of (label, colour, column). ``skip_zero``: leave out curves that are zero throughout."""

    def draw(axes: Axes, evidence: PlotData) -> bool:
        drawn = False
        for label, colour, column in curves:
            values = evidence.series.mean(column)
            if log:
                values = np.where(values > 0, values, math.nan)
            if not skip_zero or np.nan_to_num(values).any():
                drawn |= _line(axes, evidence.series, values, colour, label)
        if drawn and log:
            axes.set_yscale("log")
        _finish(axes, percent=percent, bottom=bottom, ylabel=ylabel)
        if top is not None:
            axes.set_ylim(top=top)
        return drawn

    return draw


def metric_plot(*curves_: tuple[str, str, str], log: bool = False) -> Draw:
    """Make a plot of trainer metrics (label, colour, metric name)."""
    columns = ((label, colour, metric(name)) for label, colour, name in curves_)
    return curves(*columns, bottom=None, skip_zero=False, log=log)


def stacked(axes: Axes, series: Series, parts: Sequence[tuple[str, str, Floats]], ylabel: str, **scale: bool) -> None:
    """Draw (label, colour, values) on top of each other; ``scale``: see `_finish`."""
    labels, colours, values = zip(*parts, strict=True)
    axes.stackplot(series.x, *values, labels=labels, colors=colours, linewidth=0)
    _finish(axes, ylabel=ylabel, **scale)


def _bars(axes: Axes, *histograms: tuple[str, str, Mapping[int, int]]) -> bool:
    """Draw two histograms (label, colour, value -> count) side by side, each as shares of its total. False (nothing
    drawn) when both are empty."""
    drawn = False
    for offset, (label, colour, counts) in enumerate(histograms):
        if total := sum(counts.values()):
            drawn = True
            places, shares = np.array(list(counts)), np.array(list(counts.values())) / total
            axes.bar(places + 0.4 * offset - 0.2, shares, 0.4, color=colour, label=label)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return drawn


def _solve_rate(axes: Axes, evidence: PlotData) -> bool:
    series = evidence.series
    drawn = _line(axes, series, series.mean(lambda step: step.measured_solve_rate), GREY, "training tasks (as sampled)")
    for split, colour, marker in (("validation", TRAINER, "o"), ("test", ALARM, "s")):
        records = [record for record in evidence.evaluations if record.split == split and record.samples]
        if records:
            drawn = True
            axes.errorbar(
                [(record.first_version + record.last_version) / 2 for record in records],
                [record.solve_rate for record in records],
                yerr=[record.standard_error for record in records],
                color=colour,
                marker=marker,
                markersize=4,
                linewidth=1.4 if split == "validation" else 0,
                elinewidth=1.0,
                capsize=2.5,
                label=f"{split} (± standard error)",
            )
    _finish(axes, ylabel="solve rate")
    axes.set_ylim(0, 1.02)
    return drawn


def _pass_at(axes: Axes, evidence: PlotData) -> bool:
    series, drawn = evidence.series, False
    ks = sorted({int(k) for step in series.steps for k in step.pass_at} - {1})
    for number, k in enumerate(ks):
        values = series.mean(lambda step, k=str(k): step.pass_at[k].value if k in step.pass_at else math.nan)
        shade = f"C{number}" if len(ks) > 1 else TRAINER
        drawn |= _line(axes, series, values, shade, f"pass@{k}")
    _finish(axes, ylabel="tasks solved by the best of k")
    axes.set_ylim(0, 1.02)
    return drawn


def _reward(axes: Axes, evidence: PlotData) -> bool:
    series = evidence.series
    mean = series.mean(lambda step: step.reward_mean)
    std = series.mean(lambda step: step.reward_std)
    axes.fill_between(series.x, mean - std, mean + std, color=THIRD, alpha=0.12, linewidth=0, label="± std")
    drawn = _line(axes, series, mean, THIRD, "mean")
    _finish(axes, bottom=None, ylabel="reward")
    return drawn


def _solve_rate_histogram(axes: Axes, evidence: PlotData) -> bool:
    rows = [step.solve_rate_histogram for step in evidence.series.steps if step.solve_rate_histogram]
    if not rows:
        return False
    part, bins = max(1, len(rows) // 5), len(rows[0])
    counts = [dict(enumerate(row)) for row in rows if len(row) == bins]
    first, last = (
        ("first fifth of the steps", GREY, pooled(counts[:part])),
        ("last fifth", THIRD, pooled(counts[-part:])),
    )
    drawn = _bars(axes, first, last)
    labels = ["none", *(f"≤{i * 100 // (bins - 1)}%" for i in range(1, bins - 1)), "all"]
    axes.set_xticks(range(bins), labels, fontsize=7)
    axes.set_xlabel("share of the group's rollouts that solve the task")
    axes.set_ylabel("groups")
    _legend(axes)
    return drawn


def _queue(axes: Axes, evidence: PlotData) -> bool:
    series = evidence.series
    drawn = _line(axes, series, series.mean(lambda step: step.running_groups), GENERATOR, "running")
    drawn |= _line(axes, series, series.mean(lambda step: step.buffered_groups), TRAINER, "buffered")
    parked = series.mean(lambda step: step.parked_groups)
    if np.nan_to_num(parked).any():
        drawn |= _line(axes, series, parked, GREY, "parked")
    capacity = max((step.buffer_capacity_groups for step in series.steps), default=0)
    if capacity:
        axes.axhline(capacity, color=ALARM, linewidth=0.9, linestyle="--", label="buffer capacity")
    _finish(axes, ylabel="groups")
    return drawn


def _staleness(axes: Axes, evidence: PlotData) -> bool:
    series = evidence.series
    drawn = _line(axes, series, series.max(lambda s: s.trajectory_staleness.max), ALARM, "trajectory, worst")
    drawn |= _line(axes, series, series.mean(lambda s: s.trajectory_staleness.mean), TRAINER, "trajectory, mean")
    drawn |= _line(axes, series, series.mean(lambda s: s.token_staleness.mean), THIRD, "token, mean")
    if any(step.optimizer_step_staleness != step.trajectory_staleness for step in series.steps):
        worst = series.max(lambda s: s.optimizer_step_staleness.max)
        drawn |= _line(axes, series, worst, GREY, "trajectory, worst, in optimiser steps")
    if evidence.budget is not None:
        axes.axhline(evidence.budget, color="black", linewidth=0.9, linestyle="--", label="budget")
    _finish(axes, ylabel="versions")
    return drawn


def _staleness_histogram(axes: Axes, evidence: PlotData) -> bool:
    steps = evidence.series.steps
    drawn = _bars(
        axes,
        ("trajectories", TRAINER, pooled(step.trajectory_staleness.histogram for step in steps)),
        ("tokens", THIRD, pooled(step.token_staleness.histogram for step in steps)),
    )
    if drawn and evidence.budget is not None:
        axes.axvline(evidence.budget + 0.5, color="black", linewidth=0.9, linestyle="--", label="budget")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("staleness when trained (versions)")
    _legend(axes)
    return drawn


def _endings(axes: Axes, evidence: PlotData) -> bool:
    series = evidence.series
    known = [*ENDINGS, *sorted({e for step in series.steps for e in step.endings} - set(ENDINGS))]
    means = {ending: series.mean(lambda step, e=ending: step.endings.get(e, 0)) for ending in known}
    shown = [(ending, _ENDING_COLOURS.get(ending, "black"), mean) for ending, mean in means.items() if mean.any()]
    if shown:
        stacked(axes, series, shown, "rollouts per step")
    return bool(shown)


def _step_time(axes: Axes, evidence: PlotData) -> bool:
    series = evidence.series
    total = series.mean(lambda step: step.step_s)
    parts: list[tuple[str, str, Floats]] = [
        ("compute", TRAINER, series.mean(lambda step: step.trainer_compute_s)),
        ("waiting for samples", "#9ecae1", series.mean(lambda step: step.trainer_wait_s)),
        ("publish", GENERATOR, series.mean(lambda step: step.publish_s)),
        ("checkpoint", "#bcbddc", series.mean(lambda step: step.checkpoint_s)),
    ]
    rest = np.maximum(total - np.sum([values for _, _, values in parts], axis=0), 0.0)
    parts = [part for part in (*parts, ("the rest", "#d5d8dc", rest)) if np.nan_to_num(part[2]).any()]
    if parts:
        stacked(axes, series, parts, "seconds per step")
    return bool(parts)


def _ratio_quantiles(axes: Axes, evidence: PlotData) -> bool:
    series = evidence.series
    names = [name for name in series.metric_names() if name.startswith("ratio_")]
    colours = [GREY, THIRD, ALARM, TRAINER, GENERATOR, "black"]
    drawn = False
    for name, colour in zip(names, colours * 2, strict=False):
        drawn |= _line(axes, series, series.mean(metric(name)), colour, name.removeprefix("ratio_"))
    if drawn:
        axes.axhline(1.0, color="black", linewidth=0.6, linestyle=":")
    _finish(axes, bottom=None)
    return drawn


def _share(part: Column, whole: Column) -> Column:
    return lambda step: part(step) / whole(step) if whole(step) else math.nan


PLOTS: tuple[Plot, ...] = plots_of(
    {
        "Learning": {
            "Solve rate": ("Evaluations are what counts; training tasks come as sampled.", _solve_rate),
            "pass@k": ("Training tasks: the chance that one of k attempts solves its task, unbiased.", _pass_at),
            "Reward": ("Mean and spread over the rollouts that finished since the last step.", _reward),
            "Groups by share solved": (
                "Groups at either end carry no signal: all their advantages are zero.",
                _solve_rate_histogram,
            ),
            "Groups without variance, truncated responses": (
                "Share of groups whose rewards are all equal; share of responses cut at the token limit.",
                curves(
                    ("zero variance", GREY, lambda step: step.zero_variance_share),
                    ("truncated", ALARM, lambda step: step.truncated_share),
                    percent=True,
                    skip_zero=False,
                ),
            ),
        },
        "Balance": {
            "Who waits": (
                "Share of each step that a side has nothing to do. The side that waits more is not the bottleneck.",
                curves(
                    ("trainer", TRAINER, lambda step: step.trainer_wait_ratio),
                    ("generator", GENERATOR, lambda step: step.generator_wait_ratio),
                    percent=True,
                    top=1.0,
                    skip_zero=False,
                ),
            ),
            "Rates": (
                "Consumption: what the trainer takes if it never waits. Effective: the production that is accepted.",
                curves(
                    ("consumption", TRAINER, lambda step: step.consumption_per_s),
                    ("production", GENERATOR, lambda step: step.production_per_s),
                    ("effective production", THIRD, lambda step: step.effective_production_per_s),
                    ylabel="samples/s",
                ),
            ),
            "Queue depth": ("Groups in the system at the end of each step.", _queue),
            "Oldest buffered group": (
                "Grows without end when the trainer can't keep up.",
                curves(("age", TRAINER, lambda step: step.oldest_age_s), ylabel="seconds"),
            ),
            "Where a step's time goes": ("Seen from the trainer.", _step_time),
        },
        "Staleness": {
            "Staleness": ("Versions between sampling and the gradient.", _staleness),
            "Staleness, whole run": ("Share of everything trained on.", _staleness_histogram),
        },
        "Rollouts": {
            "Response lengths": (
                "Of the rollouts that finished since the last step.",
                curves(
                    ("99th percentile", ALARM, lambda step: step.length_p99),
                    ("mean", THIRD, lambda step: step.length_mean),
                    ("median", TRAINER, lambda step: step.length_p50),
                    ylabel="tokens",
                ),
            ),
            "Length bias": (
                "Distance (KS) between the lengths trained on and all lengths, by cause. Zero: no bias.",
                curves(
                    ("total", "black", lambda step: step.length_bias_ks),
                    ("scheduling", TRAINER, lambda step: step.length_bias_scheduling_ks),
                    ("filter", GENERATOR, lambda step: step.length_bias_filter_ks),
                    ("pruning", THIRD, lambda step: step.length_bias_pruning_ks),
                    ("censored share", GREY, lambda step: step.censored_share),
                ),
            ),
            "Endings": ("How rollouts ended; each ends exactly once.", _endings),
        },
        "Optimiser": {
            "Loss": ("A policy-gradient loss need not fall.", metric_plot(("loss", TRAINER, "loss"))),
            "Entropy": ("A fall to zero means exploration has ended.", metric_plot(("entropy", THIRD, "entropy"))),
            "Gradient norm": ("Before clipping.", metric_plot(("norm", GENERATOR, "grad_norm"), log=True)),
            "Importance ratio quantiles": ("Current over behaviour policy, per token.", _ratio_quantiles),
            "Clip fraction": (
                "Share of tokens whose gradient the clip removes.",
                metric_plot(("clip fraction", ALARM, "clip_fraction")),
            ),
            "Trainer against generator": (
                "Difference of the two log-probabilities of the same tokens: staleness and numerics together.",
                metric_plot(
                    ("k3", TRAINER, "mismatch_k3"),
                    ("k3 without replay of kept sets", THIRD, "mismatch_k3_unreplayed"),
                    ("max", ALARM, "mismatch_max"),
                    log=True,
                ),
            ),
            "Masked tokens": (
                "Share of the loss tokens that staleness or importance masks take.",
                metric_plot(("masked", ALARM, "masked_share")),
            ),
            "Distance from the reference": (
                "KL per token from the reference model, nats.",
                metric_plot(("KL", THIRD, "kl_reference")),
            ),
            "Learning rate": ("As applied.", metric_plot(("learning rate", TRAINER, "learning_rate"))),
        },
        "Machine": {
            "Tokens per second": (
                "Trained: tokens that carry loss.",
                curves(
                    ("generated", GENERATOR, lambda step: step.generated_tokens_per_s),
                    ("trained", TRAINER, lambda step: step.trained_tokens_per_s),
                ),
            ),
            "Model FLOP utilisation of the trainer": (
                "Against the measured matrix-multiplication peak of its device.",
                curves(
                    ("over the step, waits included", TRAINER, lambda step: step.mfu_step),
                    ("over compute", THIRD, lambda step: step.mfu_compute),
                    percent=True,
                ),
            ),
            "Weight updates": (
                "Publish: by the trainer. Apply: until every replica has it. Pause: no token could be generated.",
                curves(
                    ("publish", TRAINER, lambda step: step.publish_s * 1e3),
                    ("apply", GENERATOR, lambda step: step.apply_s * 1e3),
                    ("pause", ALARM, lambda step: step.apply_pause_s * 1e3),
                    ylabel="ms",
                ),
            ),
            "KV cache and slots in use": (
                "Share of capacity at the end of each step.",
                curves(
                    ("KV tokens", TRAINER, _share(lambda s: s.kv_used_tokens, lambda s: s.kv_capacity_tokens)),
                    ("slots", GENERATOR, _share(lambda s: s.running_rollouts, lambda s: s.slots)),
                    percent=True,
                ),
            ),
            "Everything but the models": (
                "Share of one core: the orchestrator, and verification summed over its workers.",
                curves(
                    ("orchestrator", GREY, _share(lambda s: s.orchestrator_cpu_s, lambda s: s.step_s)),
                    ("verification", THIRD, _share(lambda s: s.verify_s, lambda s: s.step_s)),
                    percent=True,
                ),
            ),
        },
    }
)
