"""The report's section on kernels: rewards, what compiles and is correct, speed-ups, faults, the evaluators' time."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from headway.records.ledger import KernelScores, PassAt, StepRecord
from headway.report.formats import percent
from headway.report.plots import GENERATOR, GREY, THIRD, TRAINER, Plot, PlotData, curves, plots_of
from headway.report.series import Column

KERNELS = "Kernels"
BOUND = 0.5  # share of the evaluators' time that answers wait for a device: more names the run


def kernel_sentences(steps: Sequence[StepRecord]) -> list[str]:
    """Summarise the kernels of all steps in sentences; [] where no step has any."""
    found = [step.kernels for step in steps if step.kernels.evaluations]
    if not found:
        return []
    count, repeated = sum(one.evaluations for one in found), sum(one.repeated for one in found)
    faults = Counter[str]()
    for one in found:
        faults.update(one.faults)
    shares = ", ".join(f"{name.replace('_', ' ')} {percent(n / max(1, count))}" for name, n in faults.most_common())
    wait_s, busy_s = sum(one.wait_s for one in found), sum(one.busy_s for one in found)
    waited = f"They waited {wait_s:,.0f} s for a device and were evaluated for {busy_s:,.0f} s."
    if wait_s > BOUND * (wait_s + busy_s):
        waited += " The evaluators are what this run waits for: give it more of them, or fewer timed trials."
    return [
        f"{count:,} answers were evaluated, {repeated:,} of them by an equal one's evaluation.",
        f"Of all answers: {shares}." if shares else "No answer failed.",
        waited,
    ]


def _scored(of: Callable[[KernelScores], float]) -> Column:
    return lambda step: of(step.kernels) if step.kernels.evaluations else math.nan


def _best(shares: Mapping[str, PassAt]) -> float:
    """pass@k of the largest k; NaN where there is none."""
    return shares[max(shares, key=int)].value if shares else math.nan


def _first(shares: Mapping[str, PassAt]) -> float:
    return shares["1"].value if "1" in shares else math.nan


def _spread(pick: Callable[[KernelScores], Mapping[str, int]]) -> Callable[[Axes, PlotData], bool]:
    """Draw a histogram at each version: darker cells have more of its answers."""

    def draw(axes: Axes, evidence: PlotData) -> bool:
        steps = [step for step in evidence.series.steps if pick(step.kernels)]
        if not steps:
            return False
        points = defaultdict[tuple[int, float], float](float)
        for step in steps:
            counts = pick(step.kernels)
            for value, count in counts.items():
                points[step.version, float(value)] += count / sum(counts.values())
        versions, values = np.array(list(points)).T
        shares = np.array(list(points.values()))
        axes.scatter(versions, values, c=shares, cmap="Blues", vmin=-0.2, vmax=1, marker="s", s=14, linewidths=0)
        axes.set_xlabel("version")
        return True

    return draw


KERNEL_PLOTS: tuple[Plot, ...] = plots_of(
    {
        KERNELS: {
            "Raw rewards": (
                "Of each answer, in tenths: 0, 0.1 compiled, 0.3 correct, more by speed. Darker: more of a step's.",
                _spread(lambda scores: scores.rewards),
            ),
            "What compiles, and what is correct": (
                "pass@1, and pass@k of the largest k that groups allow.",
                curves(
                    ("compiles, 1", GREY, _scored(lambda s: _first(s.compiled_at))),
                    ("compiles, k", GENERATOR, _scored(lambda s: _best(s.compiled_at))),
                    ("correct, 1", TRAINER, _scored(lambda s: _first(s.correct_at))),
                    ("correct, k", THIRD, _scored(lambda s: _best(s.correct_at))),
                    percent=True,
                    top=1.0,
                    skip_zero=False,
                ),
            ),
            "Speed-ups of correct answers": (
                "Natural logarithm of reference time / answer's time, in tenths; 0: as fast. Darker: more of a step's.",
                _spread(lambda scores: scores.log_speedups),
            ),
            "The evaluators' time": (
                "Seconds a step, summed over answers: waiting for a device, and being evaluated.",
                curves(
                    ("waits", GENERATOR, _scored(lambda s: s.wait_s)),
                    ("evaluated", TRAINER, _scored(lambda s: s.busy_s)),
                    ylabel="s",
                ),
            ),
        }
    }
)
