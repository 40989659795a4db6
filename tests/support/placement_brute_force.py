"""The best plan of a small workflow by trying every plan: no bounds, no frontiers, no formula for a pipeline's time.

Written from the description of plans alone (`headway/control/placement/search.py`, first paragraph), and shares only
the records with the package. States that are equal in every respect are merged; nothing else is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import product

from headway.records.plan import DevicePool, Objective, Workflow

Vector = tuple[int, ...]


@cache
def pipeline_s(levels: tuple[float, ...], chunks: int, rounds: int) -> float:
    """When the last visit of the last level ends: visit v of a level is that of chunk v mod chunks, in round v div
    chunks."""
    visits = chunks * rounds
    ends = [[0.0] * visits for _ in levels]
    for visit in range(visits):  # of the first level: it needs the last level's visit of the round before
        for level, seconds in enumerate(levels):
            before = ends[level][visit - 1] if visit else 0.0
            around = ends[-1][visit - chunks] if visit >= chunks else 0.0
            ready = ends[level - 1][visit] if level else around
            ends[level][visit] = max(before, ready) + seconds
    return ends[-1][-1]


def set_partitions(items: tuple[str, ...]) -> Iterator[list[tuple[str, ...]]]:
    if not items:
        yield []
        return
    for rest in set_partitions(items[1:]):
        yield [(items[0],), *rest]
        for position, part in enumerate(rest):
            yield [*rest[:position], (items[0], *part), *rest[position + 1 :]]


def subsets(items: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for chosen in product((False, True), repeat=len(items)):
        if any(chosen):
            yield tuple(item for item, wanted in zip(items, chosen, strict=True) if wanted)


class BruteForce:
    """Every plan of one workflow on one pool."""

    def __init__(self, workflow: Workflow, pool: DevicePool) -> None:
        self.workflow = workflow
        self.pool = pool
        self.stages = {stage.name: stage for stage in workflow.stages}
        self.chunks = sorted({*workflow.granularities, workflow.items})
        self.inside = {loop.name: self._inside(loop.name) for loop in workflow.loops}  # stages of each loop
        self.rounds = {loop.name: loop.rounds for loop in workflow.loops}
        self.most: Vector = tuple(kind.devices for kind in pool.classes)
        self.vectors = [v for v in product(*(range(most + 1) for most in self.most)) if any(v)]
        self.unit_s = cache(self._unit_s)
        self.part_s = cache(self._part_s)
        self.units_of = cache(self._units_of)
        self.allocations = cache(self._allocations)

    def _inside(self, loop: str) -> frozenset[str]:
        edges = [(e.source, e.to) for e in self.workflow.edges if e.loop in (None, loop)]

        def reached(start: str) -> set[str]:
            found: set[str] = set()
            fresh = [to for source, to in edges if source == start]
            while fresh:
                at = fresh.pop()
                if at not in found:
                    found.add(at)
                    fresh += [to for source, to in edges if source == at]
            return found

        back = [e for e in self.workflow.edges if e.loop == loop]
        start = back[0].to
        return frozenset(stage for stage in reached(start) if start in reached(stage))

    def members(self, unit: str) -> frozenset[str]:
        return self.inside[unit] if unit in self.inside else frozenset((unit,))

    def _units_of(self, loop: str | None) -> tuple[str, ...]:
        """Units of a loop's inside, or of the whole workflow."""
        names = [name.name for name in self.workflow.loops]
        own = frozenset(self.stages) if loop is None else self.inside[loop]

        def outer(first: str, second: str) -> bool:  # of loops with the same stages the one declared first
            a, b = self.inside[first], self.inside[second]
            return a > b or (a == b and names.index(first) < names.index(second))

        within = [n for n in names if self.inside[n] <= own and n != loop and (loop is None or outer(loop, n))]
        tops = [n for n in within if not any(outer(other, n) for other in within if other != n)]
        covered = frozenset().union(*(self.inside[n] for n in tops))
        return (*tops, *sorted(own - covered))

    def _unit_s(self, unit: str, devices: Vector, items: int) -> float:
        if unit not in self.inside:
            return self._stage_s(unit, devices, items)
        best = math.inf
        for chunk in self.chunks:
            if items % chunk == 0:
                for used, levels in self.allocations(self.units_of(unit), unit, chunk):
                    if all(u <= d for u, d in zip(used, devices, strict=True)):
                        best = min(best, pipeline_s(levels, items // chunk, self.rounds[unit]))
        return best

    def _stage_s(self, name: str, devices: Vector, items: int) -> float:
        stage, best = self.stages[name], math.inf
        for kind, count in zip(self.pool.classes, devices, strict=True):
            for point in stage.times:
                if point.device != kind.device or point.devices > count:
                    continue
                at = {p.items: p.seconds for p in stage.times if (p.device, p.devices) == (kind.device, point.devices)}
                below, above = [i for i in at if i <= items], [i for i in at if i >= items]
                if not below or not above:
                    continue
                low, high = max(below), min(above)
                fixed = stage.fixed_bytes if point.fixed_bytes is None else point.fixed_bytes
                if fixed + stage.bytes_per_item * -(-items // point.devices) > kind.memory_bytes:
                    continue
                share = (items - low) / (high - low) if high > low else 0.0
                best = min(best, at[low] + share * (at[high] - at[low]))
        return best

    def switch_s(self, unit: str) -> float:
        return max(self.stages[stage].switch_s for stage in self.members(unit))

    def _part_s(self, units: tuple[str, ...], loop: str | None, devices: Vector, items: int) -> float:
        own = frozenset(self.stages) if loop is None else self.inside[loop]
        here = frozenset().union(*(self.members(unit) for unit in units))
        size = sum(
            edge.bytes_per_item
            for edge in self.workflow.edges
            if edge.source in own - here and edge.to in here and edge.loop in (None, loop)
        )
        seconds = size * items / self.pool.link_bytes_per_s if size and self.pool.link_bytes_per_s else 0.0
        for unit in units:
            seconds += self.unit_s(unit, devices, items) + (self.switch_s(unit) if len(units) > 1 else 0.0)
        return seconds

    def joined(self, first: str, second: str) -> bool:
        """Whether an edge goes from one unit to the other."""
        return any(
            edge.loop is None and edge.source in self.members(first) and edge.to in self.members(second)
            for edge in self.workflow.edges
        )

    def _allocations(
        self, units: tuple[str, ...], loop: str | None, items: int
    ) -> frozenset[tuple[Vector, tuple[float, ...]]]:
        """Devices used and seconds of each level, for every way to run ``units`` as levels of parts."""
        if not units:
            return frozenset({((0,) * len(self.most), ())})
        found: set[tuple[Vector, tuple[float, ...]]] = set()
        for last in subsets(units):  # the last level: nothing else needs it
            rest = tuple(unit for unit in units if unit not in last)
            if any(self.joined(unit, other) for unit in last for other in rest):
                continue
            levels = self.level_states(last, loop, items)
            for used, seconds in self.allocations(rest, loop, items):
                for more, slowest in levels:
                    total = tuple(a + b for a, b in zip(used, more, strict=True))
                    if all(a <= b for a, b in zip(total, self.most, strict=True)):
                        found.add((total, (*seconds, slowest)))
        return frozenset(found)

    def level_states(self, units: tuple[str, ...], loop: str | None, items: int) -> set[tuple[Vector, float]]:
        """Devices and seconds of one level, for every way to divide ``units`` into parts without edges between them."""
        found: set[tuple[Vector, float]] = set()
        for parts in set_partitions(units):
            if any(
                self.joined(a, b) for one in parts for other in parts if one is not other for a in one for b in other
            ):
                continue
            states: set[tuple[Vector, float]] = {((0,) * len(self.most), 0.0)}
            for part in parts:
                timed = [(v, s) for v in self.vectors if (s := self.part_s(part, loop, v, items)) < math.inf]
                states = {
                    (tuple(map(sum, zip(used, vector, strict=True))), max(slowest, seconds))
                    for used, slowest in states
                    for vector, seconds in timed
                    if all(a + b <= most for a, b, most in zip(used, vector, self.most, strict=True))
                }
            found |= states
        return found

    def fastest_s(self, devices: Vector) -> float:
        """Seconds of the fastest plan on ``devices``."""
        whole = self.units_of(None)

        @cache
        def phase_s(units: tuple[str, ...]) -> float:
            best = math.inf
            for chunk in self.chunks:
                for used, levels in self.allocations(units, None, chunk):
                    if all(a <= b for a, b in zip(used, devices, strict=True)):
                        best = min(best, pipeline_s(levels, self.workflow.items // chunk, 1))
            return best

        @cache
        def phases_s(units: tuple[str, ...]) -> float:
            if not units:
                return 0.0
            best = math.inf
            for last in subsets(units):
                rest = tuple(unit for unit in units if unit not in last)
                if not any(self.joined(unit, other) for unit in last for other in rest):
                    best = min(best, phases_s(rest) + phase_s(last) + max(map(self.switch_s, last)))
            return best

        return min(phase_s(whole), phases_s(whole))

    def best(self, objective: Objective) -> float:
        """Seconds of the fastest plan, or US dollars of the cheapest; infinite where none fits."""
        if objective == "time":
            return self.fastest_s(self.most)
        prices = [kind.usd_per_hour or 0.0 for kind in self.pool.classes]
        return min(
            self.fastest_s(v) * sum(price * count for price, count in zip(prices, v, strict=True)) / 3600
            for v in self.vectors
        )
