"""Plans of workflows out of their own first steps: from what turns took to the fastest plan on given devices."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import msgspec

from headway.control.placement.options import SearchSettings
from headway.control.placement.search import place
from headway.control.placement.written import pipelines_of
from headway.records.errors import ConfigurationError
from headway.records.execution import ExecutionPlan, StagePlacement
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


class MeasuredStage(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a stage: how long a worker's turns took, and what it costs to begin one on shared devices."""

    turns: tuple[tuple[int, float], ...]  # (items, seconds)
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
                first, _ = part.devices[turn.device]
                chunk = pipeline.items_per_chunk
                placed[turn.name] = StagePlacement(
                    devices=tuple(devices[first : first + turn.devices]),
                    chunk=None if chunk == items else chunk,
                    expected_s=turn.seconds * (items // chunk),
                )
    return ExecutionPlan(stages={stage: placed[stage] for stage in order}, items=items, expected_s=plan.seconds)


def _stage(name: str, found: MeasuredStage, chunks: Sequence[int], items: int, devices: int) -> WorkflowStage:
    """A stage's times on every number of devices: the slowest of its workers, each with its share of a chunk."""
    curve = _Curve(name, found.turns)
    points = [
        TimePoint(device=_DEVICE, devices=count, items=chunk, seconds=curve.seconds(math.ceil(chunk / count)))
        for count in range(1, min(devices, found.most or devices) + 1)
        for chunk in chunks
    ]
    return WorkflowStage(name=name, times=tuple(points), switch_s=found.switch_s)


class _Curve:
    """Seconds of a worker's turn by its items: between the sizes that were measured on straight lines, beyond them by
    proportion, but for one size alone, which says nothing of the others but that proportion."""

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
        self._points = sorted((items, median(seconds)) for items, seconds in by_size.items())

    def seconds(self, items: int) -> float:
        """Seconds of a turn with ``items`` items."""
        points = self._points
        if len(points) == 1 or items >= points[-1][0]:
            last, last_s = points[-1]
            before, before_s = points[-2] if len(points) > 1 else (0, 0.0)
            slope = max(0.0, (last_s - before_s) / (last - before))
            return last_s + slope * (items - last) if items >= last else last_s * items / last
        at = next(place for place, (size, _) in enumerate(points) if size >= items)
        right, right_s = points[at]
        left, left_s = points[at - 1] if at else (right, right_s)
        if not at:  # below the smallest: along the line of the two smallest, but never below its share
            (a, a_s), (b, b_s) = points[0], points[1]
            return max(a_s * items / a, a_s - (b_s - a_s) / (b - a) * (a - items))
        return left_s + (right_s - left_s) * (items - left) / (right - left)
