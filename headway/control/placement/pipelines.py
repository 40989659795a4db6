"""Searches pipelines over parts: partial allocations are extended along the cuts of a graph, dominated ones dropped.

A *label* is a partial allocation: the levels of a down-closed set of units, the devices they use, their *fill* (the sum
of their seconds, one chunk's way through) and the *slowest* of them. K chunks take fill + (K - 1) * slowest; in a loop
of r rounds max(fill + (r K - 1) * slowest, r * fill + (K - 1) * slowest): the longest path through the grid of chunks
and levels either stays in the slowest level for all visits, or follows one chunk through all rounds. Both grow with
fill, slowest and devices, so a label that is no better than another in any of the three is dropped.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from headway.control.placement.graph import Cuts, UnitGraph, members
from headway.control.placement.options import Frontier, Option, OptionTable, ParetoFront, Vector, fits, vector_sum

ROUNDING = 1e-12  # relative: sums of the same terms in different order differ by less


class Label(NamedTuple):
    """A partial allocation, which extends ``previous`` by ``level``."""

    fill: float
    slowest: float
    used: Vector
    previous: Label | None
    level: Option | None

    def levels(self) -> list[Option]:
        label, levels = self, list[Option]()
        while label.previous is not None and label.level is not None:
            levels.append(label.level)
            label = label.previous
        return levels[::-1]


def elapsed_s(fill: float, slowest: float, chunks: int, rounds: int = 1) -> float:
    """Return the seconds for ``chunks`` chunks to pass ``rounds`` times through levels that sum up to ``fill``."""
    single_pass_s = fill + (rounds * chunks - 1) * slowest
    return single_pass_s if rounds == 1 else max(single_pass_s, rounds * fill + (chunks - 1) * slowest)


class BudgetSpentError(Exception):
    """The budget of expansions is spent, so the current computation is incomplete."""


class Expansions:
    """Counts the work of a search against its budget."""

    def __init__(self, budget: int) -> None:
        self.done = 0
        self.budget = budget

    @property
    def spent(self) -> bool:
        return self.done >= self.budget

    def require(self) -> None:
        """Raise BudgetSpentError where the budget is spent."""
        if self.spent:
            raise BudgetSpentError


class Limits(NamedTuple):
    """Bounds on the completion of a partial allocation, for one pool, chunk and set of units."""

    devices: Vector
    slowest: float  # no level may take longer
    weight: int  # K - 1
    least: float  # lower bound of the slowest level
    share: dict[int, float]  # by down-closed set, the least share of the pool that the levels after it need
    fill: dict[int, float]  # ... and the least fill that they add


class _Edge(NamedTuple):
    """A level that may follow: the labels it leads to, its options, and bounds of the levels after it."""

    reached: list[Label]
    options: Frontier
    complete: bool  # no level comes after it
    share: float
    fill: float


class Pipelines:
    """Frontiers and allocations for the units of one graph; each loop inside it has a separate instance."""

    def __init__(
        self, body: UnitGraph, choices: OptionTable, chunks: Sequence[int], expansions: Expansions, bounded: bool = True
    ) -> None:
        self.body = body
        self.choices = choices
        self.chunks = chunks  # granularities, ascending
        self.expansions = expansions
        self.bounded = bounded  # by the budget; not inside loops, which every plan needs
        self.inner = {
            index: Pipelines(unit.loop, choices, chunks, expansions, bounded=False)
            for index, unit in enumerate(body.units)
            if unit.loop is not None
        }
        self._units: dict[int, dict[int, Frontier]] = {}
        self._parts: dict[tuple[int, int], Frontier] = {}
        self._levels: dict[tuple[int, int], Frontier] = {}
        self._seconds: dict[tuple[int, int], list[float]] = {}
        self._around: dict[int, list[Label]] = {}

    def cuts(self, within: int) -> Cuts:
        """Return the down-closed subsets between a pipeline's levels: of a temporal plan only the two ends."""
        if self.choices.settings.mode == "temporal":
            return [(0, [(within, within)]), (within, [])]
        return self.body.steps(within)

    def units(self, items: int) -> Mapping[int, Frontier]:
        """Return the frontier of every unit for ``items`` items at once."""
        if items not in self._units:
            self._units[items] = {
                index: self.inner[index].loop(items)
                if index in self.inner
                else self.choices.of_stage(unit.stages[0], items)
                for index, unit in enumerate(self.body.units)
            }
        return self._units[items]

    def part(self, part: int, items: int) -> Frontier:
        """Return the frontier of the set ``part`` whose units take turns."""
        if (part, items) not in self._parts:
            is_impossible = self.choices.settings.mode == "spatial" and part & (part - 1)
            units = self.units(items)
            self._parts[part, items] = (
                Frontier([], [], []) if is_impossible else self.choices.turns(self.body, part, items, units)
            )
        return self._parts[part, items]

    def level(self, units: int, items: int) -> Frontier:
        """Return the frontier of the set ``units``: as one part, or as unconnected parts side by side."""
        if (units, items) in self._levels:
            return self._levels[units, items]
        options = [Option(*option[:2], ((units, option),)) for option in self.part(units, items).options]
        mode = self.choices.settings.mode
        components = self.body.components(units) if mode != "temporal" else [units]
        for component_mask in range(1, 1 << len(components) - 1):
            if self.bounded:
                self.expansions.require()
            # The first component always stays in the remaining set, so that each split is visited once.
            rest_units = sum(components[bit + 1] for bit in members(component_mask))
            alone = [Option(*option[:2], ((rest_units, option),)) for option in self.part(rest_units, items).options]
            options += self.choices.side_by_side(self.choices.frontier(alone), self.level(units ^ rest_units, items))
        self.expansions.done += len(options)
        self._levels[units, items] = self.choices.frontier(options)
        return self._levels[units, items]

    def loop(self, items: int) -> Frontier:
        """Return the frontier of this graph as a loop over ``items`` items, in chunks of any granularity."""
        options: list[Option] = []
        for chunk in self.chunks:
            if items % chunk:
                continue
            if chunk not in self._around:
                self._around[chunk] = self.allocations(self.body.all_units, chunk, None, math.inf)
            for label in self._around[chunk]:
                seconds = elapsed_s(label.fill, label.slowest, items // chunk, self.body.rounds)
                options.append(Option(seconds, label.used, (chunk, label)))
        return self.choices.frontier(options)

    def level_seconds(self, within: int, items: int) -> list[float]:
        """Return every time that a level of ``within`` may take, ascending."""
        if (within, items) not in self._seconds:
            unit_sets = {units for _, above in self.cuts(within) for _, units in above}
            level_times = {seconds for units in unit_sets for seconds in self.level(units, items).seconds}
            self._seconds[within, items] = sorted(level_times)
        return self._seconds[within, items]

    def least_slowest(self, within: int, items: int, share: float) -> float:
        """Return the least limit on a level's seconds for which a pipeline fits on ``share`` of the pool.

        The pipeline is over ``within``; the limit is infinite where none fits."""
        level_times = self.level_seconds(within, items)
        position = bisect_left(level_times, True, key=lambda seconds: self._shares(within, items, seconds)[0] <= share)
        return level_times[position] if position < len(level_times) else math.inf

    def _shares(self, within: int, items: int, slowest: float) -> dict[int, float]:
        """Return the least share of the pool for the levels after each down-closed set of ``within``."""
        least_shares = {within: 0.0}
        share_by_units: dict[int, float] = {}
        for lower_set, steps_above in reversed(self.cuts(within)[:-1]):
            best_share = math.inf
            for larger_set, units in steps_above:
                if units not in share_by_units:
                    share_by_units[units] = self.level(units, items).share_within(slowest)
                best_share = min(best_share, share_by_units[units] + least_shares[larger_set])
            least_shares[lower_set] = best_share
        return least_shares

    def limits(self, within: int, items: int, devices: Vector, weight: int, slowest: float, least: float) -> Limits:
        """Compute bounds for pipelines of ``within`` on ``devices`` in which no level takes longer than ``slowest``."""
        unit_cuts = self.cuts(within)
        share_after = self._shares(within, items, slowest)
        prefix = dict.fromkeys(share_after, math.inf) | {0: 0.0}
        for lower_set, steps_above in unit_cuts[:-1]:
            for upper, units in steps_above:
                prefix[upper] = min(prefix[upper], prefix[lower_set] + self.level(units, items).share_within(slowest))
        share = self.choices.share(devices) * (1 + ROUNDING)
        fill = {within: 0.0}
        for lower_set, steps_above in reversed(unit_cuts[:-1]):
            fill[lower_set] = min(
                self.level(units, items).seconds_within(share - prefix[lower_set] - share_after[upper]) + fill[upper]
                for upper, units in steps_above
            )
        return Limits(devices, slowest, weight, least, share_after, fill)

    def allocations(self, within: int, items: int, limits: Limits | None, threshold: float) -> list[Label]:
        """Return the undominated allocations of ``within`` for chunks of ``items``.

        With limits: those whose pipeline takes less than ``threshold`` seconds, and at least the fastest of them.
        Raises BudgetSpentError; without limits, as for a loop, which every plan needs, the budget isn't checked.
        """
        devices = self.choices.total if limits is None else limits.devices
        has_one_class, weight, slowest_limit_s, slowest_least_s = len(devices) == 1, 0, math.inf, 0.0
        share_behind, fill_behind = dict[int, float](), dict[int, float]()
        if limits is not None:
            weight, slowest_limit_s, slowest_least_s = limits.weight, limits.slowest, limits.least
            share_behind, fill_behind = limits.share, limits.fill
        share_limit = self.choices.share(devices) * (1 + ROUNDING)
        labels: dict[int, list[Label]] = {0: [Label(0.0, slowest_least_s, tuple(0 for _ in devices), None, None)]}
        for lower_set, steps_above in self.cuts(within)[:-1]:
            edges = [
                _Edge(
                    labels.setdefault(larger_set, []),
                    self.level(units, items),
                    larger_set == within and limits is not None,
                    share_behind.get(larger_set, 0.0),
                    fill_behind.get(larger_set, 0.0),
                )
                for larger_set, units in steps_above
            ]
            for label in undominated(labels.pop(lower_set)):
                if limits is not None:
                    self.expansions.require()
                fill_so_far, slowest_so_far, used_so_far, *_ = label
                free_share = share_limit - self.choices.share(used_so_far)
                for reached, (options, seconds, shares), is_complete, share, fill_rest in edges:
                    first_index, previous_count = bisect_left(shares, share - free_share), len(reached)
                    for option in options[first_index : bisect_right(seconds, slowest_limit_s)]:
                        fill = fill_so_far + option.seconds
                        slowest = slowest_so_far if slowest_so_far > option.seconds else option.seconds
                        if fill + fill_rest + weight * slowest >= threshold:
                            break  # later options of this level are slower
                        used = vector_sum(used_so_far, option.devices)
                        if has_one_class or fits(used, devices):
                            reached.append(Label(fill, slowest, used, label, option))
                            if is_complete:
                                threshold = min(threshold, fill + weight * slowest)
                    self.expansions.done += len(reached) - previous_count
        return undominated(labels.get(within, []))


def undominated(labels: list[Label]) -> list[Label]:
    """Return the labels that none dominates in fill, slowest and devices at once; of equal ones the first stays."""
    kept_labels: list[Label] = []
    pareto_front = ParetoFront()
    for label in sorted(labels, key=itemgetter(0, 1, 2)):
        if len(label.used) > 1:
            if not any(other.slowest <= label.slowest and fits(other.used, label.used) for other in kept_labels):
                kept_labels.append(label)
        elif pareto_front.add(sum(label.used), label.slowest):
            kept_labels.append(label)
    return kept_labels
