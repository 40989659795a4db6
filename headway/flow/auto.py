"""Plans of workflows out of their own first steps: from what turns took to the fastest plan on given devices."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from statistics import mean, median

import msgspec

from headway.control.placement.options import SearchSettings
from headway.control.placement.search import place
from headway.control.placement.written import pipelines_of
from headway.records.errors import ConfigurationError
from headway.records.execution import ExecutionPlan, FlowStep, StagePlacement
from headway.records.plan import (
    DevicePool,
    PlacementPlan,
    PoolDevices,
    TimePoint,
    Workflow,
    WorkflowEdge,
    WorkflowStage,
)

_DEVICE = "device"  # the one class: a workflow's devices are taken to be alike
_SEARCH = SearchSettings(tolerance=0.01, expansions=200_000)


WARM_UP, PROFILE = 1, 3  # steps that aren't counted, and after which the plan is made
_DRIFTED = 0.25  # relative, of a step's time against the expected one ...
_STEPS = 3  # ... in so many steps in a row: then the plan is made anew
_GAIN = 0.10  # of a step's time, that another plan must bring


class AutoPlanner:
    """Plans a workflow out of its own steps.

    Steps 0 and 1 take all items at once, step 2 a quarter, on all devices in turns; from what their turns took, but for
    the first's, the plan is made. Later, when steps take longer or shorter than expected, the curves are scaled by
    what turns take now, and the plan is made anew.
    """

    def __init__(self, devices: Sequence[str], items: int) -> None:
        self._devices = devices
        self._items = items
        self._most: dict[str, int | None] = {}
        self._turns: dict[str, list[tuple[int, float]]] = {}
        self._switches: dict[str, tuple[float, int]] = {}  # seconds, turns
        self._edges: set[tuple[str, str]] = set()
        self._movable: set[str] = set()
        self._curves: dict[str, Curve] = {}
        self._planned_at = 0  # step

    def with_stage(self, plan: ExecutionPlan, stage: str, most: int | None) -> ExecutionPlan:
        """The plan when a stage is declared, which may have ``most`` workers: it is on all devices that it can use."""
        self._most[stage] = most
        placed = StagePlacement(devices=tuple(self._devices[:most]))
        return msgspec.structs.replace(plan, stages={**plan.stages, stage: placed})

    def take(
        self,
        step: FlowStep,
        turns: Mapping[str, Sequence[tuple[int, float]]],
        edges: Iterable[tuple[str, str]],
        movable: Iterable[str],
    ) -> None:
        """Take a step's measurements: ``turns``, (items, seconds) of single ones by stage; ``edges``, from which stage
        to which items have gone; ``movable``, stages that can be moved."""
        self._edges, self._movable = set(edges), set(movable)
        if step.step < WARM_UP:
            return
        for stage, found in turns.items():
            self._turns.setdefault(stage, []).extend(found)
            seconds, count = self._switches.get(stage, (0.0, 0))
            self._switches[stage] = (seconds + step.stages[stage].switch_s, count + step.stages[stage].turns)

    def plan_for(self, step: int, plan: ExecutionPlan, history: Sequence[FlowStep]) -> ExecutionPlan | None:
        """The plan from this step on; None: as before. Raises ConfigurationError for a stage that can't be planned."""
        if step == PROFILE - 1:
            quarter = max(1, self._items // 4)
            stages = {name: msgspec.structs.replace(placed, chunk=quarter) for name, placed in plan.stages.items()}
            return msgspec.structs.replace(plan, stages=stages)
        if step == PROFILE:
            self._curves = {stage: Curve(stage, turns) for stage, turns in self._turns.items()}
            return self._planned(step, plan)
        if step < PROFILE + _STEPS or step - self._planned_at < _STEPS or plan.expected_s is None:
            return None
        last = history[-_STEPS:]
        ratios = [one.seconds / plan.expected_s for one in last]
        if min(ratios) < 1 + _DRIFTED and max(ratios) > 1 / (1 + _DRIFTED):
            self._turns.clear()
            return None
        self._curves = {stage: curve.scaled(self._turns.get(stage, ())) for stage, curve in self._curves.items()}
        better = self._planned(step, plan)
        took_s = median(one.seconds for one in last)
        if better.expected_s is None or better.expected_s > took_s * (1 - _GAIN):
            return msgspec.structs.replace(plan, expected_s=took_s)
        return better

    def _planned(self, step: int, plan: ExecutionPlan) -> ExecutionPlan:
        self._planned_at = step
        self._turns.clear()
        measured = {
            stage: MeasuredStage(curve=self._curves[stage], switch_s=seconds / max(1, count), most=self._most[stage])
            for stage, (seconds, count) in ((name, self._switches.get(name, (0.0, 0))) for name in plan.stages)
        }
        found = fastest_plan(measured, self._edges, self._items, self._devices)
        kept = {  # it would lose what it holds
            name: msgspec.structs.replace(placed, devices=plan.stages[name].devices)
            for name, placed in found.stages.items()
            if name not in self._movable
        }
        return msgspec.structs.replace(found, stages=found.stages | kept)


@dataclass(frozen=True, kw_only=True)
class MeasuredStage:
    """A stage as measured: how long a worker's turns took, and what it costs to begin one on shared devices."""

    curve: Curve
    switch_s: float = 0.0  # load before and offload after a turn
    most: int | None = None  # workers that it can have


def fastest_plan(
    measured: Mapping[str, MeasuredStage], edges: Iterable[tuple[str, str]], items: int, devices: Sequence[str]
) -> ExecutionPlan:
    """The plan whose steps of ``items`` items are expected to be fastest. ``measured``: stages, upstream first;
    ``edges``: from which stage to which items go. Raises ConfigurationError for a stage of which nothing is known."""
    chunks = tuple(sorted({math.gcd(items, size) for size in (1, 2, 4, 8, 16, items // 2, items) if size}))
    stages = tuple(_stage(name, found, chunks, items, len(devices)) for name, found in measured.items())
    order = list(measured)
    forward = {(a, b) for a, b in edges if a in order and b in order and order.index(a) < order.index(b)}
    found = place(
        Workflow(
            items=items,
            granularities=chunks,
            stages=stages,
            edges=tuple(WorkflowEdge(source=a, to=b) for a, b in sorted(forward)),
        ),
        DevicePool(classes=(PoolDevices(device=_DEVICE, devices=len(devices), memory_bytes=0.0),)),
        settings=_SEARCH,
    )
    return execution_of(found, order, items, devices)


def execution_of(plan: PlacementPlan, order: Sequence[str], items: int, devices: Sequence[str]) -> ExecutionPlan:
    """A plan of the search, with the devices' names. ``order``: stages, upstream first."""
    placed: dict[str, StagePlacement] = {}
    for pipeline in pipelines_of(plan.phases):
        for part in (part for level in pipeline.levels for part in level):
            for turn in (turn for turn in part.turns if turn.inside is None and turn.device is not None):
                assert turn.device is not None
                first, _ = part.devices[turn.device]
                chunk = pipeline.items_per_chunk
                placed[turn.name] = StagePlacement(
                    devices=tuple(devices[first : first + turn.devices]),
                    chunk=None if chunk == items else chunk,
                    expected_s=turn.seconds * (items // chunk),
                )
    return ExecutionPlan(stages={stage: placed[stage] for stage in order}, items=items, expected_s=plan.seconds)


def _stage(name: str, found: MeasuredStage, chunks: Sequence[int], items: int, devices: int) -> WorkflowStage:
    """A stage's times on every number of devices. Its workers take shares of chunks as these come, whoever is free, so
    that a step takes as many rounds as all its shares need, and the last one waits for the slowest worker; a chunk is
    charged its part of that."""
    points: list[TimePoint] = []
    for count in range(1, min(devices, found.most or devices) + 1):
        for chunk in chunks:
            share = math.ceil(chunk / count)
            mean_s, slowest_s = found.curve.seconds(share, count)
            rounds = math.ceil(math.ceil(items / share) / count)
            seconds = (mean_s * rounds + slowest_s - mean_s) * chunk / items
            points.append(TimePoint(device=_DEVICE, devices=count, items=chunk, seconds=seconds))
    return WorkflowStage(name=name, times=tuple(points), switch_s=found.switch_s)


class Curve:
    """Seconds of a worker's turn by its items: between the sizes that were measured on straight lines, beyond them by
    proportion; and how much longer the slowest of several workers takes than the mean."""

    def __init__(self, stage: str, turns: Sequence[tuple[int, float]]) -> None:
        by_size: defaultdict[int, list[float]] = defaultdict(list)
        for items, seconds in turns:
            if items > 0:
                by_size[items].append(seconds)
        if not by_size:
            raise ConfigurationError(
                f"stage {stage}: none of its turns took items from a channel, so its share of the devices can't be "
                "planned; give it devices of its own in a plan"
            )
        self._points = sorted((items, mean(seconds)) for items, seconds in by_size.items())
        self._spread = {
            items: sorted(one / mean(seconds) for one in seconds)
            for items, seconds in by_size.items()
            if mean(seconds) > 0
        }

    def scaled(self, turns: Sequence[tuple[int, float]]) -> Curve:
        """The curve, scaled by what turns took since."""
        ratios = [seconds / self.seconds(items)[0] for items, seconds in turns if items > 0 and self.seconds(items)[0]]
        factor, scaled = (mean(ratios) if ratios else 1.0), copy(self)
        scaled._points = [(items, seconds * factor) for items, seconds in self._points]
        return scaled

    def seconds(self, items: int, workers: int = 1) -> tuple[float, float]:
        """Expected seconds of a turn with ``items`` items, and of the slowest of ``workers`` such turns."""
        expected = self._mean(items)
        nearest = min(self._spread, key=lambda size: abs(size - items), default=None)
        return expected, expected * (1.0 if nearest is None else _largest(self._spread[nearest], workers))

    def _mean(self, items: int) -> float:
        sizes = [size for size, _ in self._points]
        if len(sizes) == 1:
            return self._points[0][1] * items / sizes[0]
        at = min(max(bisect_left(sizes, items), 1), len(sizes) - 1)
        (left, left_s), (right, right_s) = self._points[at - 1], self._points[at]
        slope = max(0.0, (right_s - left_s) / (right - left))
        line = left_s + slope * (items - left)
        return max(line, left_s * items / left) if items < left else line


def _largest(ratios: Sequence[float], count: int) -> float:
    """The expectation of the largest of ``count`` draws from sorted values."""
    number = len(ratios)
    return sum(
        value * ((place / number) ** count - ((place - 1) / number) ** count)
        for place, value in enumerate(ratios, start=1)
    )
