"""Enumerates useful device counts of a stage, a part or a level, with the time of one chunk on them."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from operator import itemgetter
from typing import Any, NamedTuple

from headway.control.placement.graph import UnitGraph
from headway.records.errors import ConfigurationError
from headway.records.plan import DevicePool, Mode, PoolDevices, TimePoint, Workflow, WorkflowStage

Vector = tuple[int, ...]  # devices of each class, in the pool's order


class Option(NamedTuple):
    """Seconds of one chunk on ``devices``; ``plan`` is the data from which a plan is written."""

    seconds: float
    devices: Vector
    plan: Any


class Frontier(NamedTuple):
    """A Pareto frontier: options sorted by seconds, none of which needs as much of every class as a faster one.

    ``shares`` is the least share of the pool (`OptionTable.share`) among the options up to each, negated.
    """

    options: list[Option]
    seconds: list[float]
    shares: list[float]

    def share_within(self, seconds: float) -> float:
        """Return the least share of the pool that processes a chunk within ``seconds``."""
        position = bisect_right(self.seconds, seconds)
        return -self.shares[position - 1] if position else math.inf

    def seconds_within(self, share: float) -> float:
        """Return the least time of a chunk on options of at most ``share`` of the pool."""
        position = bisect_left(self.shares, -share)
        return self.seconds[position] if position < len(self.seconds) else math.inf

    def fastest_on(self, devices: Vector) -> Option | None:
        """Return the fastest option that fits on ``devices``."""
        if len(devices) == 1:
            position = bisect_left(self.shares, -devices[0])
            return self.options[position] if position < len(self.options) else None
        return next((option for option in self.options if fits(option.devices, devices)), None)


def fits(small: Vector, large: Vector) -> bool:
    return all(map(int.__le__, small, large))


def vector_sum(first: Vector, second: Vector) -> Vector:
    return tuple(map(int.__add__, first, second))


class ParetoFront:
    """A set of pairs of numbers, none of which is dominated: at least as large as another in both."""

    def __init__(self) -> None:
        self._pairs: list[tuple[float, float]] = []  # the first number ascending, the second descending

    def add(self, first: float, second: float) -> bool:
        """Add a pair and drop those that it dominates; return False where it is dominated itself."""
        pairs = self._pairs
        position = bisect_right(pairs, (first, second))
        if position and pairs[position - 1][1] <= second:
            return False
        end = position
        while end < len(pairs) and pairs[end][1] >= second:
            end += 1
        pairs[position:end] = [(first, second)]
        return True


class SearchSettings(NamedTuple):
    """Budget and precision of a search, and the plans and limits to exclude, for comparisons."""

    tolerance: float = 0.0  # a plan proven to be within this share of the best is accepted
    expansions: int = 2_000_000  # budget; a search that spends it returns its best plan, with the remaining gap
    memory_limits: bool = True
    switch_costs: bool = True
    mode: Mode | None = None  # temporal or spatial: plans of that mode alone
    without: frozenset[tuple[frozenset[str], int]] = frozenset()  # excluded phases: units, and items of a chunk


class OptionTable:
    """Frontiers of stages, parts and levels in one pool, computed on demand."""

    def __init__(self, workflow: Workflow, pool: DevicePool, settings: SearchSettings) -> None:
        self.pool = pool
        self.weights = _weights(workflow, pool)
        self.total: Vector = tuple(device_class.devices for device_class in pool.classes)
        self.settings = settings
        self._points: dict[str, list[tuple[int, PoolDevices, list[TimePoint]]]] = {}

    def share(self, devices: Vector) -> float:
        """Return the weighted share of the pool that ``devices`` are; with one class it is their number.

        A share is linear in the devices: an allocation that doesn't fit by share doesn't fit at all."""
        if len(devices) == 1:
            return devices[0]
        return sum(weight * count for weight, count in zip(self.weights, devices, strict=True))

    def frontier(self, options: Iterable[Option]) -> Frontier:
        """Return the Pareto frontier of ``options`` in time and devices; of equal ones the first stays."""
        kept_options: list[Option] = []
        pareto_front = ParetoFront()
        for option in sorted(options, key=itemgetter(0, 1)):
            if len(self.total) > 2:
                if not any(fits(kept_option.devices, option.devices) for kept_option in kept_options):
                    kept_options.append(option)
            elif pareto_front.add(option.devices[0], option.devices[-1]):
                kept_options.append(option)
        shares: list[float] = []
        for option in kept_options:
            shares.append(max(-self.share(option.devices), shares[-1] if shares else -math.inf))
        return Frontier(kept_options, [option.seconds for option in kept_options], shares)

    def of_stage(self, stage: WorkflowStage, items: int) -> Frontier:
        """Return the frontier of a stage for ``items`` items at once.

        Options fit into memory, and times are interpolated between measured ones."""
        if stage.name not in self._points:
            self._points[stage.name] = [
                (class_index, kind, sorted(points, key=lambda point: point.items))
                for class_index, kind in enumerate(self.pool.classes)
                for points in by_count(stage, kind).values()
                if points[0].devices <= kind.devices
            ]
        options: list[Option] = []
        for class_index, kind, points in self._points[stage.name]:
            seconds = seconds_between(points, items)
            if seconds is None or (self.settings.memory_limits and not has_memory(stage, kind, points[0], items)):
                continue
            device_count = points[0].devices
            device_counts = tuple(device_count if index == class_index else 0 for index in range(len(self.total)))
            options.append(Option(seconds, device_counts, (kind.device, device_count)))
        return self.frontier(options)

    def turns(self, body: UnitGraph, part: int, items: int, units: Mapping[int, Frontier]) -> Frontier:
        """Return the frontier of one part whose units take turns on its devices."""
        ordered_units = body.ordered(part)
        switch_s = [self.switch_s(body, unit) if len(ordered_units) > 1 else 0.0 for unit in ordered_units]
        nbytes = body.received_bytes(part)
        receive_s = nbytes * items / self.pool.link_bytes_per_s if nbytes and self.pool.link_bytes_per_s else 0.0
        fixed_s = receive_s + sum(switch_s)
        lookups = [units[unit].fastest_on for unit in ordered_units]
        if len(self.total) > 1:
            lookups = [_table(units[unit].options, self.total) for unit in ordered_units]
        option_devices = {option.devices for unit in ordered_units for option in units[unit].options}
        choices = [sorted({0, *(devices[index] for devices in option_devices)}) for index in range(len(self.total))]
        options: list[Option] = []
        for device_counts in product(*choices):
            chosen_options = [lookup(device_counts) for lookup in lookups]
            if None not in chosen_options:
                seconds = fixed_s + sum(option.seconds for option in chosen_options if option is not None)
                options.append(Option(seconds, device_counts, (ordered_units, chosen_options, switch_s, receive_s)))
        return self.frontier(options)

    def switch_s(self, body: UnitGraph, unit: int) -> float:
        return body.units[unit].switch_s if self.settings.switch_costs else 0.0

    def side_by_side(self, first: Frontier, second: Frontier) -> list[Option]:
        """Return the options of two sets of parts side by side: the slower one's time, the devices of both."""
        if len(self.total) > 1:
            option_pairs = product(first.options, second.options)
        else:  # at each time the cheapest option of both
            times = sorted({*first.seconds, *second.seconds})
            position_pairs = ((bisect_right(first.seconds, t), bisect_right(second.seconds, t)) for t in times)
            option_pairs = ((first.options[a - 1], second.options[b - 1]) for a, b in position_pairs if a and b)
        combined_pairs = ((max(a.seconds, b.seconds), vector_sum(a.devices, b.devices), a, b) for a, b in option_pairs)
        return [
            Option(seconds, devices, (*a.plan, *b.plan))
            for seconds, devices, a, b in combined_pairs
            if fits(devices, self.total)
        ]


def _table(options: list[Option], limits: Vector) -> Callable[[Vector], Option | None]:
    """Return a function from devices to the fastest fitting option; counts are rounded down to those of options."""
    counts = [sorted({0, *(option.devices[index] for option in options)}) for index in range(len(limits))]
    fastest: dict[Vector, Option | None] = {}
    option_by_devices = {option.devices: option for option in options}
    for count_indices in product(*(range(len(count)) for count in counts)):
        best_option = option_by_devices.get(tuple(map(list[int].__getitem__, counts, count_indices)))
        for index, digit in enumerate(count_indices):  # an option that fits with one step less of a class fits here
            smaller_option = fastest[*count_indices[:index], digit - 1, *count_indices[index + 1 :]] if digit else None
            if best_option is None or (smaller_option is not None and smaller_option.seconds <= best_option.seconds):
                best_option = smaller_option
        fastest[count_indices] = best_option
    return lambda devices: fastest[tuple(bisect_right(count, d) - 1 for count, d in zip(counts, devices, strict=True))]


def by_count(stage: WorkflowStage, kind: PoolDevices) -> dict[int, list[TimePoint]]:
    """Return the times of a stage on one class, by number of devices."""
    points_by_count: dict[int, list[TimePoint]] = {}
    for point in stage.times:
        if point.device == kind.device:
            points_by_count.setdefault(point.devices, []).append(point)
    return points_by_count


def seconds_between(points: list[TimePoint], items: int) -> float | None:
    """Interpolate the time for ``items`` linearly between points of ascending items; None outside of them."""
    position = bisect_left(points, items, key=lambda point: point.items)
    if position == len(points) or (position == 0 and points[0].items != items):
        return None
    upper_point = points[position]
    if upper_point.items == items:
        return upper_point.seconds
    lower_point = points[position - 1]
    between_share = (items - lower_point.items) / (upper_point.items - lower_point.items)
    return lower_point.seconds + between_share * (upper_point.seconds - lower_point.seconds)


def needed_bytes(stage: WorkflowStage, point: TimePoint, items: int) -> float:
    """Return the bytes on each of the point's devices for ``items`` items at once: a + b * items of a device."""
    fixed_bytes = stage.fixed_bytes if point.fixed_bytes is None else point.fixed_bytes
    return fixed_bytes + stage.bytes_per_item * math.ceil(items / point.devices)


def has_memory(stage: WorkflowStage, kind: PoolDevices, point: TimePoint, items: int) -> bool:
    return needed_bytes(stage, point, items) <= kind.memory_bytes


def _weights(workflow: Workflow, pool: DevicePool) -> list[float]:
    """Return the weight of each class: the mean over stages of a device's speed relative to the best class."""
    speeds_by_class: list[list[float]] = [[] for _ in pool.classes]
    for stage in workflow.stages:
        device_times = [
            min((p.seconds * p.devices / p.items for p in stage.times if p.device == kind.device), default=math.inf)
            for kind in pool.classes
        ]
        for class_speeds, device_seconds in zip(speeds_by_class, device_times, strict=True):
            if device_seconds < math.inf:
                class_speeds.append(min(device_times) / device_seconds if device_seconds else 1.0)
    return [sum(class_speeds) / len(class_speeds) if class_speeds else 0.0 for class_speeds in speeds_by_class]


def require_memory(workflow: Workflow, pool: DevicePool) -> None:
    """Raise ConfigurationError where a stage fits on no devices of the pool at any granularity.

    The message names the stage, the missing memory, and the smallest sufficient pool."""
    chunks = sorted({*workflow.granularities, workflow.items})
    problems: list[str] = []
    count_by_device = {kind.device: float(kind.devices) for kind in pool.classes}
    for stage in workflow.stages:
        # (missing bytes, needed bytes, class, point, items) of every measured count, also beyond the pool's.
        needs: list[tuple[float, float, PoolDevices, TimePoint, int]] = []
        for kind in pool.classes:
            for points in by_count(stage, kind).values():
                sorted_points = sorted(points, key=lambda point: point.items)
                for items in chunks:
                    if seconds_between(sorted_points, items) is not None:
                        nbytes = needed_bytes(stage, points[0], items)
                        needs.append((max(0.0, nbytes - kind.memory_bytes), nbytes, kind, points[0], items))
        available_needs = [need for need in needs if need[3].devices <= need[2].devices]
        if not available_needs:
            raise ConfigurationError(
                f"stage {stage.name}: times: none for the pool's devices at a granularity of {chunks}; "
                "valid: at least one"
            )
        missing_bytes, nbytes, kind, point, items = min(available_needs, key=lambda need: need[0])
        if not missing_bytes:
            continue
        problems.append(
            f"stage {stage.name} needs {nbytes:.4g} bytes on each of {point.devices} {kind.device} for {items} items "
            f"and has {kind.memory_bytes:.4g}: {missing_bytes:.4g} missing"
        )
        for kind in pool.classes:
            fitting_counts = [n[3].devices for n in needs if n[2] is kind and not n[0]]
            count_by_device[kind.device] = max(count_by_device[kind.device], min(fitting_counts, default=math.inf))
    if problems:
        enough_counts = [(count, device) for device, count in count_by_device.items() if count < math.inf]
        advice = (
            f"the smallest pool that would suffice has {min(enough_counts)[0]:.0f} {min(enough_counts)[1]}"
            if enough_counts
            else "no number of devices with given times would suffice"
        )
        raise ConfigurationError(f"no plan fits into the pool's memory: {'; '.join(problems)}; {advice}")
