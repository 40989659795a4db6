"""Plans a workflow from the turn times of its own first steps: the fastest plan on given devices."""

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
from headway.control.placement.plan_records import pipelines_of
from headway.control.placement.search import place
from headway.flow.links import StageLinks
from headway.flow.worker import StageTimes, Traffic
from headway.records.errors import ConfigurationError
from headway.records.execution import ExecutionPlan, FlowStep, StagePlacement
from headway.records.plan import DevicePool, PlacementPlan, PoolDevices, TimePoint, Workflow, WorkflowStage

_DEVICE = "device"  # the only class: a workflow's devices are assumed to be identical
_SEARCH = SearchSettings(tolerance=0.01, expansions=200_000)


WARM_UP, PROFILE = 1, 3  # steps that aren't measured; steps after which the plan is made
_DRIFT = 0.25  # relative deviation of a step's time from the expected one ...
_DRIFT_STEPS = 3  # ... in this many consecutive steps, after which the plan is made again
_MIN_GAIN = 0.10  # share of a step's time that another plan must save


class AutoPlanner:
    """Plans a workflow from measurements of its own steps.

    In steps 0 and 1 a turn takes all items, in step 2 a quarter, on all devices in turns. The plan is made from the
    turn times of steps 1 and 2, the items between stages, and their messages: two stages that send each other messages
    several times a step are a loop of so many rounds, in each of which all items of the step go through it. Later, when
    steps take longer or shorter than expected, the curves are scaled by the present turn times, and the plan is made
    again.
    """

    def __init__(self, devices: Sequence[str], items: int) -> None:
        self._devices = devices
        self._items = items
        self._max_workers: dict[str, int | None] = {}
        self._turns: dict[str, list[tuple[int, float]]] = {}
        self._switches: dict[str, tuple[float, int]] = {}  # seconds, turns
        self._links = StageLinks(items=items)
        self._movable: set[str] = set()
        self._curves: dict[str, Curve] = {}
        self._peaks: defaultdict[str, dict[int, int]] = defaultdict(dict)  # stage -> items of a turn -> bytes of a GPU
        self._device_bytes = 0  # memory of a GPU; 0: not measured
        self._step = 0  # steps so far
        self._planned_step = 0

    def with_stage(self, plan: ExecutionPlan, stage: str, max_workers: int | None) -> ExecutionPlan:
        """Return the plan with a newly declared stage of at most ``max_workers``, on all devices that it can use."""
        self._max_workers[stage] = max_workers
        placement = StagePlacement(devices=tuple(self._devices[:max_workers]))
        return msgspec.structs.replace(plan, stages={**plan.stages, stage: placement})

    def add_step(
        self,
        step: FlowStep,
        times: Mapping[str, Sequence[StageTimes]],
        edges: Mapping[tuple[str, str], Traffic],
        movable: Iterable[str],
    ) -> None:
        """Add a step's measurements. ``times``: of the workers, by stage; ``edges``: (from stage, to stage) -> items so
        far; ``movable``: stages that can be moved."""
        self._movable = set(movable)
        self._step += 1
        self._links.add(edges, times)
        if self._step <= WARM_UP:
            return
        for stage, worker_times in times.items():
            turns = [turn for each in worker_times for turn in each.each]
            if not any(turn.items for turn in turns) and self._links.has_messages(stage):
                share = math.ceil(self._items / len(worker_times))
                turns = [msgspec.structs.replace(turn, items=share) for turn in turns]
            self._turns.setdefault(stage, []).extend((turn.items, turn.busy_s) for turn in turns)
            peaks = self._peaks[stage]
            for turn in (turn for turn in turns if turn.items):
                peaks[turn.items] = max(peaks.get(turn.items, 0), turn.peak_bytes)
            self._device_bytes = max(self._device_bytes, *(each.device_bytes for each in worker_times))
            switch_seconds, count = self._switches.get(stage, (0.0, 0))
            self._switches[stage] = (switch_seconds + step.stages[stage].switch_s, count + step.stages[stage].turns)

    def plan_for(self, plan: ExecutionPlan, history: Sequence[FlowStep]) -> ExecutionPlan | None:
        """Return the plan from the next step on; None: no change. Raises ConfigurationError for a stage without turns
        that took items."""
        step = self._step
        if step == PROFILE - 1:
            chunk = max(1, self._items // 4)
            stages = {name: msgspec.structs.replace(placed, chunk=chunk) for name, placed in plan.stages.items()}
            return msgspec.structs.replace(plan, stages=stages)
        if step == PROFILE:
            self._curves = {stage: Curve(stage, turns) for stage, turns in self._turns.items()}
            return self._make_plan(step, plan)
        if step < PROFILE + _DRIFT_STEPS or step - self._planned_step < _DRIFT_STEPS or plan.expected_s is None:
            return None
        recent_steps = history[-_DRIFT_STEPS:]
        time_ratios = [measured_step.seconds / plan.expected_s for measured_step in recent_steps]
        if min(time_ratios) < 1 + _DRIFT and max(time_ratios) > 1 / (1 + _DRIFT):
            self._turns.clear()
            return None
        self._curves = {stage: curve.scaled(self._turns.get(stage, ())) for stage, curve in self._curves.items()}
        better_plan = self._make_plan(step, plan)
        median_s = median(measured_step.seconds for measured_step in recent_steps)
        if better_plan.expected_s is None or better_plan.expected_s > median_s * (1 - _MIN_GAIN):
            return msgspec.structs.replace(plan, expected_s=median_s)
        return better_plan

    def _make_plan(self, step: int, plan: ExecutionPlan) -> ExecutionPlan:
        self._planned_step = step
        self._turns.clear()
        measured_stages: dict[str, MeasuredStage] = {}
        for stage in plan.stages:
            seconds, count = self._switches.get(stage, (0.0, 0))
            fixed_bytes, bytes_per_item = memory_line(self._peaks[stage])
            measured_stages[stage] = MeasuredStage(
                curve=self._curves[stage],
                switch_s=seconds / max(1, count),
                max_workers=self._max_workers[stage],
                fixed_bytes=fixed_bytes,
                bytes_per_item=bytes_per_item,
            )
        new_plan = fastest_plan(measured_stages, self._links, self._items, self._devices, self._device_bytes)
        kept_stages = {  # elsewhere they would lose their state
            name: msgspec.structs.replace(placement, devices=plan.stages[name].devices)
            for name, placement in new_plan.stages.items()
            if name not in self._movable
        }
        return msgspec.structs.replace(new_plan, stages=new_plan.stages | kept_stages)


@dataclass(frozen=True, kw_only=True)
class MeasuredStage:
    """A stage as measured: the times of a worker's turns, the cost of a turn's start on shared devices, and memory."""

    curve: Curve
    switch_s: float = 0.0  # onload before and offload after a turn
    max_workers: int | None = None  # workers that it can have
    fixed_bytes: float = 0.0  # of a worker's GPU: fixed + bytes_per_item * its items; 0: not measured
    bytes_per_item: float = 0.0


def memory_line(peaks: Mapping[int, int]) -> tuple[float, float]:
    """Fit the fixed bytes, and those of each item, to the largest memory of turns (items -> bytes) of the fewest and
    the most items; all bytes are fixed where the turns had one size."""
    smallest, largest = min(peaks, default=0), max(peaks, default=0)
    slope = (peaks[largest] - peaks[smallest]) / (largest - smallest) if smallest < largest else 0.0
    item_bytes = max(0.0, slope)
    return max(0.0, peaks.get(largest, 0) - item_bytes * largest), item_bytes


def fastest_plan(
    measured: Mapping[str, MeasuredStage], links: StageLinks, items: int, devices: Sequence[str], device_bytes: int = 0
) -> ExecutionPlan:
    """Search the plan whose steps of ``items`` items are expected to be fastest. ``measured``: stages, upstream first;
    ``device_bytes``: memory of a device, where the stages' is measured. Raises ConfigurationError when there is no
    plan."""
    chunks = tuple(sorted({math.gcd(items, chunk) for chunk in (1, 2, 4, 8, 16, items // 2, items) if chunk}))
    order = list(measured)
    edges, loops = links.graph(order)
    placement = place(
        Workflow(
            items=items,
            granularities=chunks,
            stages=tuple(_stage(name, stage, chunks, items, len(devices)) for name, stage in measured.items()),
            edges=edges,
            loops=loops,
        ),
        DevicePool(
            classes=(PoolDevices(device=_DEVICE, devices=len(devices), memory_bytes=float(device_bytes)),),
            link_bytes_per_s=links.bytes_per_s,
        ),
        settings=_SEARCH,
    )
    return execution_of(placement, order, items, devices)


def execution_of(plan: PlacementPlan, order: Sequence[str], items: int, devices: Sequence[str]) -> ExecutionPlan:
    """Convert a plan of the search to one with the devices' names. ``order``: stages, upstream first."""
    stages: dict[str, StagePlacement] = {}
    for pipeline in pipelines_of(plan.phases):
        for part in (part for level in pipeline.levels for part in level):
            for turn in (turn for turn in part.turns if turn.inside is None and turn.device is not None):
                assert turn.device is not None
                first_device, _ = part.devices[turn.device]
                chunk = pipeline.items_per_chunk
                stages[turn.name] = StagePlacement(
                    devices=tuple(devices[first_device : first_device + turn.devices]),
                    chunk=None if chunk == items else chunk,
                    expected_s=turn.seconds * (items // chunk) * pipeline.rounds,
                )
    return ExecutionPlan(stages={stage: stages[stage] for stage in order}, items=items, expected_s=plan.seconds)


def _stage(name: str, measured: MeasuredStage, chunks: Sequence[int], items: int, devices: int) -> WorkflowStage:
    """Estimate a stage's times on every number of devices. Free workers take shares of chunks as these come, so that a
    step takes as many rounds as all its shares need, and the last round waits for the slowest worker; a chunk is
    charged its part of that time."""
    time_points: list[TimePoint] = []
    for worker_count in range(1, min(devices, measured.max_workers or devices) + 1):
        for chunk in chunks:
            worker_items = math.ceil(chunk / worker_count)
            mean_s, slowest_s = measured.curve.seconds(worker_items, worker_count)
            rounds = math.ceil(math.ceil(items / worker_items) / worker_count)
            seconds = (mean_s * rounds + slowest_s - mean_s) * chunk / items
            time_points.append(TimePoint(device=_DEVICE, devices=worker_count, items=chunk, seconds=seconds))
    return WorkflowStage(
        name=name,
        times=tuple(time_points),
        switch_s=measured.switch_s,
        fixed_bytes=measured.fixed_bytes,
        bytes_per_item=measured.bytes_per_item,
    )


class Curve:
    """Seconds of a worker's turn as a function of its items: linear between measured sizes, beyond them along the
    nearest line (below the smallest at least by proportion); and the ratio of the slowest of several workers to the
    mean."""

    def __init__(self, stage: str, turns: Sequence[tuple[int, float]]) -> None:
        seconds_by_size: defaultdict[int, list[float]] = defaultdict(list)
        for items, seconds in turns:
            if items > 0:
                seconds_by_size[items].append(seconds)
        if not seconds_by_size:
            raise ConfigurationError(
                f"stage {stage}: none of its turns took items from a channel, so its share of the devices can't be "
                "planned; give it devices of its own in a plan"
            )
        self._points = sorted((items, mean(seconds)) for items, seconds in seconds_by_size.items())
        self._spread = {
            items: sorted(turn_s / mean(seconds) for turn_s in seconds)
            for items, seconds in seconds_by_size.items()
            if mean(seconds) > 0
        }

    def scaled(self, turns: Sequence[tuple[int, float]]) -> Curve:
        """Return the curve scaled by the mean ratio of new turn times to its own."""
        factors = [seconds / self.seconds(items)[0] for items, seconds in turns if items > 0 and self.seconds(items)[0]]
        time_factor, scaled_curve = (mean(factors) if factors else 1.0), copy(self)
        scaled_curve._points = [(items, seconds * time_factor) for items, seconds in self._points]
        return scaled_curve

    def seconds(self, items: int, workers: int = 1) -> tuple[float, float]:
        """Return the expected seconds of a turn of ``items`` items, and of the slowest of ``workers`` such turns."""
        expected_s = self._mean(items)
        nearest = min(self._spread, key=lambda size: abs(size - items), default=None)
        return expected_s, expected_s * (1.0 if nearest is None else _expected_largest(self._spread[nearest], workers))

    def _mean(self, items: int) -> float:
        sizes = [size for size, _ in self._points]
        if len(sizes) == 1:
            return self._points[0][1] * items / sizes[0]
        index = min(max(bisect_left(sizes, items), 1), len(sizes) - 1)
        (lower, lower_s), (upper, upper_s) = self._points[index - 1], self._points[index]
        slope = max(0.0, (upper_s - lower_s) / (upper - lower))
        line_s = lower_s + slope * (items - lower)
        return max(line_s, lower_s * items / lower) if items < lower else line_s


def _expected_largest(ratios: Sequence[float], count: int) -> float:
    """Return the expected maximum of ``count`` draws with replacement from ``ratios``, which are sorted."""
    ratio_count = len(ratios)
    return sum(
        ratio * ((rank / ratio_count) ** count - ((rank - 1) / ratio_count) ** count)
        for rank, ratio in enumerate(ratios, start=1)
    )
