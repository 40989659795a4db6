"""Reports a run's placements: the expected rate of each, and the use of its stages' time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from headway.control.summaries import weighted_mean
from headway.records.ledger import EventRecord, LedgerLine, StepRecord
from headway.records.plan import RunPlan
from headway.report.formats import duration, percent, quantity
from headway.telemetry.ledger import EVENT_PLAN_CHANGED, EVENT_PLAN_KEPT, EVENT_PLAN_OUTCOME

_FIGURES = ("from version", "samples/s", "expected", "busy", "waits for data", "waits for its device", "transfers")
STAGE_HEADINGS = ("stage", "placement", *_FIGURES)


class PlacedSteps(NamedTuple):
    """The steps of a run in one placement."""

    placement: str
    since: int  # version
    expected_per_s: float | None  # samples
    steps: list[StepRecord]


def changes_of(lines: Sequence[LedgerLine]) -> list[EventRecord]:
    """Return the events of plan changes, made or reverted."""
    kinds = (EVENT_PLAN_CHANGED, EVENT_PLAN_KEPT)
    return [line for line in lines if isinstance(line, EventRecord) and line.event in kinds]


def steps_by_placement(
    lines: Sequence[LedgerLine], configuration: dict[str, Any], plan: RunPlan | None = None
) -> list[PlacedSteps]:
    """Group the steps by placement, without the steps in which the placement changed. ``configuration`` and ``plan``:
    those with which the run started."""
    devices = {side: configuration.get(side, {}).get("devices", ()) for side in ("generator", "trainer")}
    first = f"generate on {', '.join(devices['generator'])}; train on {', '.join(devices['trainer'])}"
    changes = [event for event in changes_of(lines) if event.event == EVENT_PLAN_CHANGED]
    expected = plan.samples_per_s if plan is not None else None
    placements = [PlacedSteps(str(changes[0].data["before"]) if changes else first, 0, expected, [])]
    for event in changes:
        rate = float(event.data["gain"]) * float(event.data["rate"])
        placements.append(PlacedSteps(str(event.data["after"]), event.step, rate, []))
    for step in (line for line in lines if isinstance(line, StepRecord) and line.step_s > 0):
        number = max(number for number, placement in enumerate(placements) if placement.since <= step.step)
        if number == 0 or step.step > placements[number].since:
            placements[number].steps.append(step)
    return [placement for placement in placements if placement.steps]


def stage_rows(placed: Sequence[PlacedSteps]) -> list[list[str]]:
    """Make rows under `STAGE_HEADINGS` with the shares of each stage's time in each placement. The remainder is
    checkpoints, the time between two calls, and the verifiers' time without work."""
    rows: list[list[str]] = []
    for span in placed:
        seconds, generator_s = (sum(map(key, span.steps)) for key in (_step_s, lambda step: step.flow.generator_s))
        busy = sum(step.flow.generator_busy_s for step in span.steps) / generator_s if generator_s else 0.0
        verifying = sum(step.verify_s for step in span.steps) / seconds / max(1, span.steps[-1].flow.verifier_workers)
        trains, publishes, pauses = (
            percent(sum(getattr(step, name) for step in span.steps) / seconds)
            for name in ("trainer_compute_s", "publish_s", "apply_pause_s")
        )
        waits_for_device = sum(step.flow.device_wait_s for step in span.steps)
        waits = percent((sum(step.trainer_wait_s for step in span.steps) - waits_for_device) / seconds)
        idle = weighted_mean(span.steps, lambda step: step.generator_wait_ratio, _step_s)
        yielded = weighted_mean(span.steps, lambda step: step.generator_yielded_ratio, _step_s)
        rate = quantity(sum(step.samples for step in span.steps) / seconds)
        head = [span.placement, f"{span.since:,}", rate, quantity(span.expected_per_s) if span.expected_per_s else "–"]
        rows.append(["generate", *head, percent(busy), percent(idle), percent(yielded), pauses])
        rows.append(["train", *head, trains, waits, percent(waits_for_device / seconds), publishes])
        rows.append(["verify", *head, percent(verifying), "–", "–", "–"])
    return rows


def _step_s(step: StepRecord) -> float:
    return step.step_s


def change_sentence(lines: Sequence[LedgerLine]) -> str:
    """Describe how often the plan was changed, and the last change; "" where it never was."""
    changes = changes_of(lines)
    if not changes:
        return ""
    last = changes[-1]
    reverted = sum(event.event == EVENT_PLAN_KEPT for event in changes)
    made = len(changes) - reverted
    events = [line for line in lines if isinstance(line, EventRecord) and line.step > last.step]
    after = "".join(f"; then {event.detail}" for event in events if event.event == EVENT_PLAN_OUTCOME)
    times = f"{made} {'change' if made == 1 else 'changes'} of plan in the run" + (
        f", {reverted} more taken back" if reverted else ""
    )
    cost = duration(float(last.data["cost_s"]))
    return f"{times}; the last at version {last.step}, in {cost}: {last.detail}{after}."
