"""Stages of a plan that share devices, its mode, and the plan in words."""

from __future__ import annotations

from headway.records.execution import ExecutionPlan
from headway.records.plan import Mode
from headway.runtime.devices import parse_device


def shares(plan: ExecutionPlan, stage: str, device: str) -> bool:
    """Whether another stage has a device of ``stage``'s too, or a core of it."""
    mine = parse_device(device).units()
    others = (placed.devices for name, placed in plan.stages.items() if name != stage)
    return any(mine & parse_device(other).units() for devices in others for other in devices)


def mode_of(plan: ExecutionPlan) -> Mode:
    """Temporal: all stages have the same devices. Spatial: no two share any. Else hybrid."""
    sets = {frozenset[str]().union(*(parse_device(d).units() for d in p.devices)) for p in plan.stages.values()}
    if len(plan.stages) > 1 and len(sets) == 1:
        return "temporal"
    shared = (shares(plan, stage, device) for stage, placed in plan.stages.items() for device in placed.devices)
    return "hybrid" if any(shared) else "spatial"


def text_of(plan: ExecutionPlan) -> str:
    """The plan in words."""
    stages = (
        f"{name} on {', '.join(placed.devices)}" + ("" if placed.chunk is None else f" by {placed.chunk}")
        for name, placed in plan.stages.items()
    )
    return f"{mode_of(plan)}: {'; '.join(stages)}"


def same_places(one: ExecutionPlan, other: ExecutionPlan) -> bool:
    """Whether two plans differ in what they expect alone."""
    places = ({name: (p.devices, p.chunk) for name, p in plan.stages.items()} for plan in (one, other))
    return next(places) == next(places)
