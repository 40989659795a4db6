"""Stages and changes of plan, as reports show them."""

from __future__ import annotations

from typing import Any

from headway.records.ledger import EventRecord, QueueFlow, StepRecord
from headway.report.plans.placements import change_sentence, stage_rows, steps_by_placement

SPATIAL, HYBRID = "spatial: generate on cpu:0; train on cpu:1", "hybrid: generate on cpu:0, cpu:1; train on cpu:1"


def step(number: int, device_wait_s: float = 0.0, **fields: Any) -> StepRecord:
    flow = QueueFlow(generator_busy_s=0.5, generator_s=1.0, verifier_workers=2, device_wait_s=device_wait_s)
    return StepRecord(step=number, version=number + 1, step_s=1.0, samples=10, flow=flow, verify_s=0.4, **fields)


def event(name: str, at: int, **data: float | int | str) -> EventRecord:
    return EventRecord(event=name, detail=f"{SPATIAL} -> {HYBRID}", step=at, data=data)


COSTS: dict[str, float | int | str] = {"gain": 1.5, "rate": 10.0, "cost_s": 3.0, "expected_cost_s": 2.0}
LINES = [
    *(step(number, 0.1, trainer_wait_s=0.4, trainer_compute_s=0.5) for number in range(4)),
    event("plan_changed", 4, before=SPATIAL, after=HYBRID, **COSTS),
    step(4, trainer_wait_s=0.9),  # has the change in it
    *(step(number, trainer_compute_s=0.9, publish_s=0.05, generator_yielded_ratio=0.25) for number in range(5, 9)),
    event("plan_outcome", 8, rate=10.0, expected=15.0, measured=14.0, cost_s=3.0),
    event("plan_kept", 9, before=HYBRID, after=SPATIAL, **COSTS),
]


def test_stages_of_each_placement_stand_beside_what_was_expected() -> None:
    placed = steps_by_placement(LINES, {})
    assert [(one.placement, one.since, len(one.steps)) for one in placed] == [(SPATIAL, 0, 4), (HYBRID, 4, 4)]
    rows = {(row[0], row[1]): row[2:] for row in stage_rows(placed)}
    assert rows["train", SPATIAL] == ["0", "10", "–", "50.0%", "30.0%", "10.0%", "0.0%"]
    assert rows["train", HYBRID] == ["4", "10", "15", "90.0%", "0.0%", "0.0%", "5.0%"]
    assert rows["generate", HYBRID] == ["4", "10", "15", "50.0%", "0.0%", "25.0%", "0.0%"]
    assert rows["verify", SPATIAL][3] == "20.0%"


def test_a_run_that_stays_has_its_configuration_as_placement() -> None:
    ((placement, _, _, steps),) = steps_by_placement(
        LINES[:4], {"generator": {"devices": ["cuda:0"]}, "trainer": {"devices": ["cuda:1"]}}
    )
    assert (placement, len(steps)) == ("generate on cuda:0; train on cuda:1", 4)
    assert change_sentence(LINES[:4]) == ""


def test_changes_have_what_they_came_to_and_cost() -> None:
    moved = f"in 3.0 s: {SPATIAL} -> {HYBRID}"
    outcome = EventRecord(event="plan_outcome", detail="14 samples/s, expected 15", step=8)
    made = change_sentence([*LINES[:-2], outcome])
    assert made == f"1 change of plan in the run; the last at version 4, {moved}; then 14 samples/s, expected 15."
    assert change_sentence(LINES) == f"1 change of plan in the run, 1 more taken back; the last at version 9, {moved}."
