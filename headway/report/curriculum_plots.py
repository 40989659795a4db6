"""The report's plots of a curriculum; not drawn when the run has none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from headway.records.curriculum import DRAW_REASONS, REGIONS, CurriculumStep
from headway.report.plots import ALARM, GREY, THIRD, TRAINER, Plot, PlotData

_COLOURS = {
    **{"unseen": "#d5d8dc", "unsolved": ALARM, "band": THIRD, "trivial": "#9ecae1"},
    **{"cursor": GREY, "explore": TRAINER, "replay": ALARM},
}


def _stack(
    labels: tuple[str, ...], values: Callable[[CurriculumStep], Mapping[str, float]], ylabel: str, *, shares: bool
) -> Callable[[Axes, PlotData], bool]:
    def draw(axes: Axes, evidence: PlotData) -> bool:
        series = evidence.series
        if not any(step.curriculum.tasks for step in series.steps):
            return False
        rows = [
            np.nan_to_num(series.mean(lambda step, label=label: values(step.curriculum).get(label, math.nan)))
            for label in labels
        ]
        total = np.sum(rows, axis=0)
        drawn = [np.divide(row, total, out=np.zeros_like(row), where=total > 0) for row in rows] if shares else rows
        axes.stackplot(series.x, *drawn, labels=labels, colors=[_COLOURS[name] for name in labels], linewidth=0)
        axes.set_xlabel("version")
        axes.set_ylabel(ylabel)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        if shares:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        figure = axes.get_figure()
        if isinstance(figure, Figure):
            figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=len(labels))
        return True

    return draw


CURRICULUM_PLOTS: tuple[Plot, ...] = (
    Plot(
        "Learning",
        "Tasks by region",
        "What the curriculum holds of them. Attempts of the band's tasks are likely to differ, which is what teaches.",
        _stack(REGIONS, lambda step: step.tasks, "tasks", shares=False),
    ),
    Plot(
        "Learning",
        "Why tasks were drawn",
        "Share of the groups opened. `headway explain-task` says more.",
        _stack(DRAW_REASONS, lambda step: step.draws, "groups", shares=True),
    ),
)
