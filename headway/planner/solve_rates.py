"""Estimates the solve rates of a run's tasks from the outcomes of its groups.

A group of G attempts has k solved ones, binomial in the unknown solve rate p of its task. The distribution of p that
makes the observed histogram most likely (nonparametric maximum likelihood; Laird 1978) is estimated on a grid, by
expectation maximisation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from headway.control.summaries import SOLVE_RATE_BINS, solve_rate_bin
from headway.planner.quantities import Quantity, constant

_GRID = tuple(index / 20 for index in range(21))
_ROUNDS = 300
_LEAST_WEIGHT = 0.002  # lighter points of the grid are left out
_RAMP = 1e-6  # width of the step between two values of a quantity, as a share


class SolveRates(msgspec.Struct, frozen=True, kw_only=True):
    """A workload's keys for solve rates."""

    trivial_share: float  # share of tasks that are always solved
    impossible_share: float  # share of tasks that are never solved
    solve_rate: Quantity  # solve rate of the other tasks
    among: float = 1.0  # share of the other tasks' groups with both solved and unsolved attempts

    @property
    def mixed_groups(self) -> float:
        """Share of all groups with both solved and unsolved attempts."""
        return self.mixed_share * self.among

    @property
    def mixed_share(self) -> float:
        return max(0.0, 1.0 - self.trivial_share - self.impossible_share)


def solve_rates(histogram: Sequence[int], size: int, mixed: float | None) -> SolveRates:
    """Estimate solve rates from a histogram of groups of ``size`` by share solved (`solve_rate_histogram`). ``mixed``:
    the target share of groups with both solved and unsolved attempts, met as far as the shares of trivial and
    impossible tasks allow; None: as in the histogram."""
    weights = _maximum_likelihood(histogram, size)
    if weights is None:
        return SolveRates(trivial_share=0.0, impossible_share=0.0, solve_rate=constant(0.5))
    middle_weights = [(rate, weight) for rate, weight in weights if 0.0 < rate < 1.0 and weight >= _LEAST_WEIGHT]
    middle_total = sum(weight for _, weight in middle_weights)
    if not middle_total:
        middle_weights, middle_total = [(0.5, 1.0)], 1.0
    middle_weights = [(rate, weight / middle_total) for rate, weight in middle_weights]
    weight_by_end = {rate: weight for rate, weight in weights if rate in (0.0, 1.0)}
    extreme_share = max(0.0, 1.0 - sum(weight for rate, weight in weights if 0.0 < rate < 1.0))
    among = sum(weight * (1.0 - rate**size - (1.0 - rate) ** size) for rate, weight in middle_weights)
    if mixed is not None:
        extreme_share = max(0.0, 1.0 - mixed / among)
    solved_weight, unsolved_weight = weight_by_end.get(1.0, 0.0), weight_by_end.get(0.0, 0.0)
    trivial_part = solved_weight / (solved_weight + unsolved_weight) if solved_weight + unsolved_weight else 0.0
    return SolveRates(
        trivial_share=round(extreme_share * trivial_part, 4),
        impossible_share=round(extreme_share * (1.0 - trivial_part), 4),
        solve_rate=_steps(middle_weights),
        among=among,
    )


def _maximum_likelihood(histogram: Sequence[int], size: int) -> list[tuple[float, float]] | None:
    """(rate, weight) pairs on the grid; None where no group was seen."""
    group_count = sum(histogram)
    if not group_count or len(histogram) != SOLVE_RATE_BINS:
        return None
    chances_by_rate = [_bins(rate, size) for rate in _GRID]
    weights = [1.0 / len(_GRID)] * len(_GRID)
    for _ in range(_ROUNDS):
        expected = [0.0] * len(_GRID)
        for number, count in enumerate(histogram):
            if not count:
                continue
            joint_chances = [weight * chances[number] for weight, chances in zip(weights, chances_by_rate, strict=True)]
            total = sum(joint_chances)
            if total:
                expected = [prior + count * part / total for prior, part in zip(expected, joint_chances, strict=True)]
        expected_total = sum(expected)
        if not expected_total:
            return None
        weights = [groups_at_rate / expected_total for groups_at_rate in expected]
    return list(zip(_GRID, weights, strict=True))


def _bins(rate: float, size: int) -> list[float]:
    """[11] probabilities of the histogram's bins for a group of ``size`` attempts at this rate."""
    chances = [0.0] * SOLVE_RATE_BINS
    for solved in range(size + 1):
        chances[solve_rate_bin(solved, size)] += math.comb(size, solved) * rate**solved * (1 - rate) ** (size - solved)
    return chances


def _steps(points: Sequence[tuple[float, float]]) -> Quantity:
    """A quantity that takes each value with its weight (weights sum to 1, values rise)."""
    if len(points) == 1:
        return constant(points[0][0])
    quantile_points: list[tuple[float, float]] = []
    share_below = 0.0
    for point_index, (rate, weight) in enumerate(points):
        quantile_points.append((round(share_below, 6), rate))
        share_below += weight
        quantile_points.append((1.0 if point_index == len(points) - 1 else round(share_below - _RAMP, 6), rate))
    return Quantity(kind="quantiles", at=tuple(quantile_points))
