"""Explains a plan: the second best one, the binding limits, and the effect of other devices."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from headway.control.placement.options import SearchSettings
from headway.control.placement.search import place
from headway.records.errors import ConfigurationError
from headway.records.plan import (
    Alternative,
    DevicePool,
    Objective,
    PlacedPipeline,
    PlacementPlan,
    PlacementReport,
    Workflow,
)

_CHANGED = 1e-9  # relative: less is rounding


def explain(
    workflow: Workflow, pool: DevicePool, objective: Objective = "time", settings: SearchSettings = SearchSettings()
) -> PlacementReport:
    """Return the plan of `place` and its reasons, each of which is another search with the same budget."""

    def find_plan(settings: SearchSettings, candidate_pool: DevicePool = pool) -> PlacementPlan | None:
        try:
            return place(workflow, candidate_pool, objective, settings)
        except ConfigurationError:
            return None  # the input is valid, as it had a plan before: no plan remains

    plan = place(workflow, pool, objective, settings)
    relaxations = (
        Alternative(name="without memory limits", value=_value(find_plan(settings._replace(memory_limits=False)))),
        Alternative(name="without switch costs", value=_value(find_plan(settings._replace(switch_costs=False)))),
    )
    return PlacementReport(
        plan=plan,
        second_best=_second_best(plan, settings, find_plan),
        binds=_binds(plan, relaxations),
        relaxations=relaxations,
        one_more=tuple(
            Alternative(name=f"one more {kind.device}", value=_value(find_plan(settings, _grown(pool, kind.device))))
            for kind in pool.classes
        ),
    )


def _grown(pool: DevicePool, device: str) -> DevicePool:
    grown_classes = (
        msgspec.structs.replace(kind, devices=kind.devices + 1) if kind.device == device else kind
        for kind in pool.classes
    )
    return msgspec.structs.replace(pool, classes=tuple(grown_classes))


def _value(plan: PlacementPlan | None) -> float | None:
    if plan is None:
        return None
    return plan.seconds if plan.objective == "time" else plan.cost_usd


def _second_best(
    plan: PlacementPlan, settings: SearchSettings, placed: Callable[[SearchSettings], PlacementPlan | None]
) -> Alternative | None:
    """Return the best plan of another structure: other phases or granularities, all temporal, or all spatial.

    A plan with other phases lacks at least one of this plan's, so excluding each of these in turn finds it."""
    rivals: list[tuple[str, PlacementPlan | None]] = []
    for phase in plan.phases:
        names = frozenset(turn.name for level in phase.levels for part in level for turn in part.turns)
        rivals.append(("other phases", placed(settings._replace(without=frozenset({(names, phase.items_per_chunk)})))))
    if plan.mode != "temporal":
        rivals.append(("temporal", placed(settings._replace(mode="temporal"))))
    if plan.mode != "spatial":
        rivals.append(("spatial", placed(settings._replace(mode="spatial"))))
    alternatives: list[Alternative] = []
    for variant, other_plan in rivals:
        if other_plan is None or (variant == "spatial" and other_plan.mode != variant):
            continue  # one stage alone is temporal and spatial at once
        phases_text = "; ".join(f"{phase.name} in chunks of {phase.items_per_chunk}" for phase in other_plan.phases)
        alternatives.append(Alternative(name=f"{other_plan.mode}: {phases_text}", value=_value(other_plan)))
    return min(alternatives, key=lambda other: math.inf if other.value is None else other.value, default=None)


def _binds(plan: PlacementPlan, relaxations: tuple[Alternative, ...]) -> tuple[str, ...]:
    """Describe the limits whose absence would improve the plan, then the stages by their share of the step."""
    plan_value = _value(plan) or 0.0
    gain_reasons: list[tuple[float, str]] = []
    for relaxation in relaxations:
        if relaxation.value is not None and relaxation.value < plan_value * (1 - _CHANGED):
            gain = 1 - relaxation.value / plan_value
            gain_reasons.append((-gain, f"{relaxation.name.removeprefix('without ')}: {gain:.1%} less without"))
    negative_shares = sorted((-share, stage) for stage, share in busy_shares(plan).items())
    return (
        *(reason for _, reason in sorted(gain_reasons)),
        *(f"{stage}: works {-share:.0%} of the step" for share, stage in negative_shares),
    )


def busy_shares(plan: PlacementPlan) -> dict[str, float]:
    """Return the share of the step in which each stage, and loop, works."""
    busy: dict[str, float] = {}
    for phase in plan.phases:
        _add_turns(busy, phase, 1)
    return {stage: round(seconds / plan.seconds, 9) if plan.seconds else 0.0 for stage, seconds in busy.items()}


def _add_turns(busy: dict[str, float], pipeline: PlacedPipeline, times: int) -> None:
    """Add the seconds of all turns in a pipeline that runs ``times`` times in a step."""
    times *= pipeline.items // pipeline.items_per_chunk * pipeline.rounds
    for turn in (turn for level in pipeline.levels for part in level for turn in part.turns):
        seconds = turn.seconds if turn.inside is None else turn.inside.seconds
        busy[turn.name] = busy.get(turn.name, 0.0) + times * seconds
        if turn.inside is not None:
            _add_turns(busy, turn.inside, times)
