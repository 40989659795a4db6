"""The report's plots of a curriculum; not drawn when the run has none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from matplotlib.axes import Axes

from headway.records.curriculum import DRAW_REASONS, REGIONS, CurriculumStep
from headway.report.plots import ALARM, GREY, THIRD, TRAINER, Draw, Plot, PlotData, plots_of, stacked

_COLOURS = {
    **{"unseen": "#d5d8dc", "unsolved": ALARM, "band": THIRD, "trivial": "#9ecae1"},
    **{"cursor": GREY, "explore": TRAINER, "replay": ALARM},
}


def _stack(
    labels: tuple[str, ...], values: Callable[[CurriculumStep], Mapping[str, float]], ylabel: str, *, shares: bool
) -> Draw:
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
        parts = [(label, _COLOURS[label], row) for label, row in zip(labels, drawn, strict=True)]
        stacked(axes, series, parts, ylabel, percent=shares)
        return True

    return draw


CURRICULUM_PLOTS: tuple[Plot, ...] = plots_of(
    {
        "Learning": {
            "Tasks by region": (
                "What the curriculum holds of them. Attempts of the band's tasks are likely to differ: that teaches.",
                _stack(REGIONS, lambda step: step.tasks, "tasks", shares=False),
            ),
            "Why tasks were drawn": (
                "Share of the groups opened. `headway explain-task` says more.",
                _stack(DRAW_REASONS, lambda step: step.draws, "groups", shares=True),
            ),
        }
    }
)
