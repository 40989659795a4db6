"""Columns of the step records, binned so that a long run still makes a small page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from headway.records.ledger import StepRecord

MAX_POINTS = 400

Floats = npt.NDArray[np.float64]
Column = Callable[[StepRecord], float]


class Series:
    """The trained steps of a run in at most ``max_points`` bins of equally many steps. Arrays are [B], B bins.

    Skipped steps carry no version of their own, so they are left out here; the report counts them.
    """

    def __init__(self, steps: Sequence[StepRecord], max_points: int = MAX_POINTS) -> None:
        self.steps = [step for step in steps if not step.skipped]
        self.per_bin = max(1, math.ceil(len(self.steps) / max_points))
        self._bins = [self.steps[i : i + self.per_bin] for i in range(0, len(self.steps), self.per_bin)]
        self.x: Floats = np.array([(rows[0].version + rows[-1].version) / 2 for rows in self._bins])

    def __len__(self) -> int:
        return len(self._bins)

    def mean(self, column: Column) -> Floats:
        """Mean of the finite values of each bin; NaN where it has none."""
        return self._reduce(column, lambda values: float(np.mean(values)))

    def max(self, column: Column) -> Floats:
        return self._reduce(column, lambda values: float(np.max(values)))

    def metric_names(self) -> list[str]:
        return sorted({name for step in self.steps for name in step.metrics})

    def _reduce(self, column: Column, reduce: Callable[[Floats], float]) -> Floats:
        reduced: list[float] = []
        for rows in self._bins:
            values = np.array([float(column(row)) for row in rows])
            finite = values[np.isfinite(values)]
            reduced.append(reduce(finite) if finite.size else math.nan)
        return np.array(reduced, dtype=np.float64)


def metric(name: str) -> Column:
    """The column of a trainer metric; NaN where it wasn't measured."""
    return lambda step: step.metrics.get(name, math.nan)


def smoothed(values: Floats, window: int) -> Floats:
    """Centred moving mean of ``window`` points (fewer at the ends), of finite values; [B] -> [B]."""
    if window <= 1:
        return values
    kernel = np.ones(min(window, len(values)))
    finite = np.isfinite(values)
    total = np.convolve(np.where(finite, values, 0.0), kernel, mode="same")
    count = np.convolve(finite.astype(np.float64), kernel, mode="same")
    return np.where(count > 0.5, total / np.maximum(count, 1.0), math.nan)
