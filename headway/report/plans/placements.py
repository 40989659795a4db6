"""A run's placements: what each was expected to bring, and what its stages did with their time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from headway.control.summaries import weighted_mean
from headway.records.ledger import EventRecord, LedgerLine, StepRecord
from headway.records.plan import RunPlan
from headway.report.formats import duration, percent, quantity
from headway.telemetry.ledger import EVENT_PLAN_CHANGED, EVENT_PLAN_KEPT, EVENT_PLAN_OUTCOME

_FIGURES = ("from version", "samples/s", "expected", "busy", "waits for data", "waits for its device", "transfers")
STAGE_HEADS = ("stage", "placement", *_FIGURES)


class PlacedSteps(NamedTuple):
    """The steps of a run in one placement."""

    placement: str
    since: int  # version
    expected_per_s: float | None  # samples
    steps: list[StepRecord]


def changes_of(lines: Sequence[LedgerLine]) -> list[EventRecord]:
    """The changes of plan, made or taken back."""
    kinds = (EVENT_PLAN_CHANGED, EVENT_PLAN_KEPT)
    return [line for line in lines if isinstance(line, EventRecord) and line.event in kinds]


def placed_steps(
    lines: Sequence[LedgerLine], configuration: dict[str, Any], plan: RunPlan | None = None
) -> list[PlacedSteps]:
    """The steps by placement, without the one in which a change was made. ``configuration`` and ``plan``: those that
    the run was begun with."""
    devices = {side: configuration.get(side, {}).get("devices", ()) for side in ("generator", "trainer")}
    first = f"generate on {', '.join(devices['generator'])}; train on {', '.join(devices['trainer'])}"
    made = [event for event in changes_of(lines) if event.event == EVENT_PLAN_CHANGED]
    expected = plan.samples_per_s if plan is not None else None
    found = [PlacedSteps(str(made[0].data["before"]) if made else first, 0, expected, [])]
    for event in made:
        rate = float(event.data["gain"]) * float(event.data["rate"])
        found.append(PlacedSteps(str(event.data["after"]), event.step, rate, []))
    for step in (line for line in lines if isinstance(line, StepRecord) and line.step_s > 0):
        place = max(index for index, one in enumerate(found) if one.since <= step.step)
        if place == 0 or step.step > found[place].since:
            found[place].steps.append(step)
    return [one for one in found if one.steps]


def stage_rows(placed: Sequence[PlacedSteps]) -> list[list[str]]:
    """Rows under `STAGE_HEADS`: the time of each stage in each placement, as shares. What is left is checkpoints, the
    time between two calls, and the verifiers' time without work."""
    rows: list[list[str]] = []
    for one in placed:
        seconds, generator_s = (sum(map(of, one.steps)) for of in (_step_s, lambda step: step.flow.generator_s))
        busy = sum(step.flow.generator_busy_s for step in one.steps) / generator_s if generator_s else 0.0
        verifying = sum(step.verify_s for step in one.steps) / seconds / max(1, one.steps[-1].flow.verifier_workers)
        trains, publishes, pauses = (
            percent(sum(getattr(step, name) for step in one.steps) / seconds)
            for name in ("trainer_compute_s", "publish_s", "apply_pause_s")
        )
        waits_for_device = sum(step.flow.device_wait_s for step in one.steps)
        waits = percent((sum(step.trainer_wait_s for step in one.steps) - waits_for_device) / seconds)
        idle = weighted_mean(one.steps, lambda step: step.generator_wait_ratio, _step_s)
        lent = weighted_mean(one.steps, lambda step: step.generator_lent_ratio, _step_s)
        rate = quantity(sum(step.samples for step in one.steps) / seconds)
        head = [one.placement, f"{one.since:,}", rate, quantity(one.expected_per_s) if one.expected_per_s else "–"]
        rows.append(["generate", *head, percent(busy), percent(idle), percent(lent), pauses])
        rows.append(["train", *head, trains, waits, percent(waits_for_device / seconds), publishes])
        rows.append(["verify", *head, percent(verifying), "–", "–", "–"])
    return rows


def _step_s(step: StepRecord) -> float:
    return step.step_s


def change_sentence(lines: Sequence[LedgerLine]) -> str:
    """Say how often the plan was changed, and what was said of the last change; "" where it wasn't."""
    changes = changes_of(lines)
    if not changes:
        return ""
    last = changes[-1]
    back = sum(event.event == EVENT_PLAN_KEPT for event in changes)
    made = len(changes) - back
    events = [line for line in lines if isinstance(line, EventRecord) and line.step > last.step]
    after = "".join(f"; then {event.detail}" for event in events if event.event == EVENT_PLAN_OUTCOME)
    times = f"{made} {'change' if made == 1 else 'changes'} of plan in the run" + (
        f", {back} more taken back" if back else ""
    )
    cost = duration(float(last.data["cost_s"]))
    return f"{times}; the last at version {last.step}, in {cost}: {last.detail}{after}."
