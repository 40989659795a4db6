"""Properties of an execution plan: which stages share devices, its mode, its text, equality of placements."""

from __future__ import annotations

from headway.records.execution import ExecutionPlan
from headway.records.plan import Mode
from headway.runtime.devices import parse_device


def shares_device(plan: ExecutionPlan, stage: str, device: str) -> bool:
    """Whether another stage of the plan also uses ``device`` of ``stage``, or a core of it."""
    device_units = parse_device(device).units()
    other_devices = (placed.devices for name, placed in plan.stages.items() if name != stage)
    return any(device_units & parse_device(other).units() for devices in other_devices for other in devices)


def mode_of(plan: ExecutionPlan) -> Mode:
    """Classify a plan: temporal when all stages have the same devices, spatial when no two share any, else hybrid."""
    unit_sets = {frozenset[str]().union(*(parse_device(d).units() for d in p.devices)) for p in plan.stages.values()}
    if len(plan.stages) > 1 and len(unit_sets) == 1:
        return "temporal"
    shared = (shares_device(plan, stage, device) for stage, placed in plan.stages.items() for device in placed.devices)
    return "hybrid" if any(shared) else "spatial"


def text_of(plan: ExecutionPlan) -> str:
    """Return the plan as text."""
    stage_texts = (
        f"{stage} on {', '.join(placed.devices)}" + ("" if placed.chunk is None else f" by {placed.chunk}")
        for stage, placed in plan.stages.items()
    )
    return f"{mode_of(plan)}: {'; '.join(stage_texts)}"


def same_placement(first: ExecutionPlan, second: ExecutionPlan) -> bool:
    """Whether two plans have the same devices and chunks for all stages; their expected times may differ."""
    placements = ({stage: (p.devices, p.chunk) for stage, p in plan.stages.items()} for plan in (first, second))
    return next(placements) == next(placements)
