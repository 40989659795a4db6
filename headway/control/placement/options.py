"""Device counts that are worth giving to a stage, a part or a level, with the time of one chunk on them."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from operator import itemgetter
from typing import Any, NamedTuple

from headway.control.placement.graph import Body
from headway.records.errors import ConfigurationError
from headway.records.plan import DevicePool, Mode, PoolDevices, TimePoint, Workflow, WorkflowStage

Vector = tuple[int, ...]  # devices of each class, in the pool's order


class Option(NamedTuple):
    """Seconds of one chunk on ``devices``; ``made`` is what a plan is written from."""

    seconds: float
    devices: Vector
    made: Any


class Options(NamedTuple):
    """A Pareto frontier: options sorted by seconds, none of which needs as much as a faster one.

    ``shares`` is the least share of the pool (`Choices.share`) among the options up to each, negated to be ascending.
    """

    options: list[Option]
    seconds: list[float]
    shares: list[float]

    def share_within(self, seconds: float) -> float:
        """Least share of the pool that does a chunk within ``seconds``."""
        place = bisect_right(self.seconds, seconds)
        return -self.shares[place - 1] if place else math.inf

    def seconds_within(self, share: float) -> float:
        """Least time of a chunk on options of at most ``share`` of the pool."""
        place = bisect_left(self.shares, -share)
        return self.seconds[place] if place < len(self.seconds) else math.inf

    def at(self, devices: Vector) -> Option | None:
        """The fastest option that ``devices`` have room for."""
        if len(devices) == 1:
            place = bisect_left(self.shares, -devices[0])
            return self.options[place] if place < len(self.options) else None
        return next((option for option in self.options if fits(option.devices, devices)), None)


def fits(small: Vector, large: Vector) -> bool:
    return all(map(int.__le__, small, large))


def added(left: Vector, right: Vector) -> Vector:
    return tuple(map(int.__add__, left, right))


class Front:
    """A staircase of pairs of numbers, none of which is at most as large as another in both."""

    def __init__(self) -> None:
        self._pairs: list[tuple[float, float]] = []  # the first number ascending, the second descending

    def add(self, first: float, second: float) -> bool:
        """Add a pair; False where one that is at most as large in both numbers is there already."""
        pairs = self._pairs
        place = bisect_right(pairs, (first, second))
        if place and pairs[place - 1][1] <= second:
            return False
        end = place
        while end < len(pairs) and pairs[end][1] >= second:
            end += 1
        pairs[place:end] = [(first, second)]
        return True


class SearchSettings(NamedTuple):
    """How long and how exactly to search; plans and limits to leave out, so that a plan can be compared with others."""

    tolerance: float = 0.0  # a plan proven to be within this share of the best will do
    expansions: int = 2_000_000  # budget; a search that spends it returns its best plan, with the gap that is left
    memory_limits: bool = True
    switch_costs: bool = True
    mode: Mode | None = None  # temporal or spatial: plans of that mode alone
    without: frozenset[tuple[frozenset[str], int]] = frozenset()  # no phase of these units in chunks of so many items


class Choices:
    """Options of stages, parts and levels in one pool; each is computed when it is first asked for."""

    def __init__(self, workflow: Workflow, pool: DevicePool, settings: SearchSettings) -> None:
        self.pool = pool
        self.weights = _weights(workflow, pool)
        self.most: Vector = tuple(kind.devices for kind in pool.classes)
        self.settings = settings
        self._points: dict[str, list[tuple[int, PoolDevices, list[TimePoint]]]] = {}

    def share(self, devices: Vector) -> float:
        """Weighs devices of different classes against each other. A share is linear in the devices: what doesn't
        fit by share doesn't fit at all; with one class it is their number."""
        if len(devices) == 1:
            return devices[0]
        return sum(weight * count for weight, count in zip(self.weights, devices, strict=True))

    def frontier(self, found: Iterable[Option]) -> Options:
        """Keep what no other option beats in time and devices; of equals the first."""
        kept: list[Option] = []
        front = Front()
        for option in sorted(found, key=itemgetter(0, 1)):
            if len(self.most) > 2:
                if not any(fits(other.devices, option.devices) for other in kept):
                    kept.append(option)
            elif front.add(option.devices[0], option.devices[-1]):
                kept.append(option)
        shares: list[float] = []
        for option in kept:
            shares.append(max(-self.share(option.devices), shares[-1] if shares else -math.inf))
        return Options(kept, [option.seconds for option in kept], shares)

    def of_stage(self, stage: WorkflowStage, items: int) -> Options:
        """Options of a stage for ``items`` items at once: within the memory, times between measured ones
        interpolated."""
        if stage.name not in self._points:
            self._points[stage.name] = [
                (position, kind, sorted(points, key=lambda point: point.items))
                for position, kind in enumerate(self.pool.classes)
                for points in by_count(stage, kind).values()
                if points[0].devices <= kind.devices
            ]
        found: list[Option] = []
        for position, kind, points in self._points[stage.name]:
            seconds = seconds_between(points, items)
            if seconds is None or (self.settings.memory_limits and not has_memory(stage, kind, points[0], items)):
                continue
            devices = points[0].devices
            vector = tuple(devices if place == position else 0 for place in range(len(self.most)))
            found.append(Option(seconds, vector, (kind.device, devices)))
        return self.frontier(found)

    def turns(self, body: Body, part: int, items: int, units: Mapping[int, Options]) -> Options:
        """Options of one part whose units take turns on its devices."""
        order = body.ordered(part)
        switch_s = [self.switch_s(body, unit) if len(order) > 1 else 0.0 for unit in order]
        size = body.received_bytes(part)
        receive_s = size * items / self.pool.link_bytes_per_s if size and self.pool.link_bytes_per_s else 0.0
        fixed_s = receive_s + sum(switch_s)
        fastest = [units[unit].at for unit in order]
        if len(self.most) > 1:
            fastest = [_table(units[unit].options, self.most) for unit in order]
        each = {option.devices for unit in order for option in units[unit].options}
        counts = [sorted({0, *(devices[place] for devices in each)}) for place in range(len(self.most))]
        found: list[Option] = []
        for vector in product(*counts):
            chosen = [at(vector) for at in fastest]
            if None not in chosen:
                seconds = fixed_s + sum(option.seconds for option in chosen if option is not None)
                found.append(Option(seconds, vector, (order, chosen, switch_s, receive_s)))
        return self.frontier(found)

    def switch_s(self, body: Body, unit: int) -> float:
        return body.units[unit].switch_s if self.settings.switch_costs else 0.0

    def beside(self, left: Options, right: Options) -> list[Option]:
        """Options of two sets of parts side by side: the slower one's time, both ones' devices."""
        if len(self.most) > 1:
            pairs = product(left.options, right.options)
        else:  # at each time the cheapest of both
            times = sorted({*left.seconds, *right.seconds})
            places = ((bisect_right(left.seconds, t), bisect_right(right.seconds, t)) for t in times)
            pairs = ((left.options[a - 1], right.options[b - 1]) for a, b in places if a and b)
        found = ((max(a.seconds, b.seconds), added(a.devices, b.devices), a, b) for a, b in pairs)
        return [
            Option(seconds, devices, (*a.made, *b.made)) for seconds, devices, a, b in found if fits(devices, self.most)
        ]


def _table(options: list[Option], most: Vector) -> Callable[[Vector], Option | None]:
    """The fastest of ``options`` that fits, for any devices: each class's counts in between are those below."""
    counts = [sorted({0, *(option.devices[place] for option in options)}) for place in range(len(most))]
    table: dict[Vector, Option | None] = {}
    exact = {option.devices: option for option in options}
    for places in product(*(range(len(count)) for count in counts)):
        best = exact.get(tuple(map(list[int].__getitem__, counts, places)))
        for position, place in enumerate(places):  # what fits with one step less of a class fits here
            other = table[*places[:position], place - 1, *places[position + 1 :]] if place else None
            if best is None or (other is not None and other.seconds <= best.seconds):
                best = other
        table[places] = best
    return lambda devices: table[tuple(bisect_right(count, d) - 1 for count, d in zip(counts, devices, strict=True))]


def by_count(stage: WorkflowStage, kind: PoolDevices) -> dict[int, list[TimePoint]]:
    """Times of a stage on one class, by number of devices."""
    found: dict[int, list[TimePoint]] = {}
    for point in stage.times:
        if point.device == kind.device:
            found.setdefault(point.devices, []).append(point)
    return found


def seconds_between(points: list[TimePoint], items: int) -> float | None:
    """Time for ``items`` from points by ascending items, linear between two neighbours; None outside of them."""
    place = bisect_left(points, items, key=lambda point: point.items)
    if place == len(points) or (place == 0 and points[0].items != items):
        return None
    above = points[place]
    if above.items == items:
        return above.seconds
    below = points[place - 1]
    share = (items - below.items) / (above.items - below.items)
    return below.seconds + share * (above.seconds - below.seconds)


def needed_bytes(stage: WorkflowStage, point: TimePoint, items: int) -> float:
    """Memory of each of the point's devices for ``items`` items at once: a + b * items of a device."""
    fixed = stage.fixed_bytes if point.fixed_bytes is None else point.fixed_bytes
    return fixed + stage.bytes_per_item * math.ceil(items / point.devices)


def has_memory(stage: WorkflowStage, kind: PoolDevices, point: TimePoint, items: int) -> bool:
    return needed_bytes(stage, point, items) <= kind.memory_bytes


def _weights(workflow: Workflow, pool: DevicePool) -> list[float]:
    """Weights of the classes: the mean over stages of how fast one device is, relative to the stage's best class."""
    speeds: list[list[float]] = [[] for _ in pool.classes]
    for stage in workflow.stages:
        work = [
            min((p.seconds * p.devices / p.items for p in stage.times if p.device == kind.device), default=math.inf)
            for kind in pool.classes
        ]
        for speed, own in zip(speeds, work, strict=True):
            if own < math.inf:
                speed.append(min(work) / own if own else 1.0)
    return [sum(speed) / len(speed) if speed else 0.0 for speed in speeds]


def require_memory(workflow: Workflow, pool: DevicePool) -> None:
    """Raise ConfigurationError where a stage fits on no devices of the pool at any granularity: which stage, how much
    is missing, and the smallest pool that would do."""
    chunks = sorted({*workflow.granularities, workflow.items})
    lacking: list[str] = []
    grown = {kind.device: float(kind.devices) for kind in pool.classes}
    for stage in workflow.stages:
        # Missing bytes, needed bytes, where; of every measured count, those that the pool doesn't have included.
        needs: list[tuple[float, float, PoolDevices, TimePoint, int]] = []
        for kind in pool.classes:
            for points in by_count(stage, kind).values():
                ascending = sorted(points, key=lambda point: point.items)
                for items in chunks:
                    if seconds_between(ascending, items) is not None:
                        size = needed_bytes(stage, points[0], items)
                        needs.append((max(0.0, size - kind.memory_bytes), size, kind, points[0], items))
        here = [need for need in needs if need[3].devices <= need[2].devices]
        if not here:
            raise ConfigurationError(
                f"stage {stage.name}: times: none for the pool's devices at a granularity of {chunks}; "
                "valid: at least one"
            )
        missing, size, kind, point, items = min(here, key=lambda need: need[0])
        if not missing:
            continue
        lacking.append(
            f"stage {stage.name} needs {size:.4g} bytes on each of {point.devices} {kind.device} for {items} items "
            f"and has {kind.memory_bytes:.4g}: {missing:.4g} missing"
        )
        for kind in pool.classes:
            counts = [n[3].devices for n in needs if n[2] is kind and not n[0]]
            grown[kind.device] = max(grown[kind.device], min(counts, default=math.inf))
    if lacking:
        enough = [(count, device) for device, count in grown.items() if count < math.inf]
        would = (
            f"the smallest pool that would do has {min(enough)[0]:.0f} {min(enough)[1]}"
            if enough
            else "no number of devices that times are given for would do"
        )
        raise ConfigurationError(f"no plan fits into the pool's memory: {'; '.join(lacking)}; {would}")
