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
    devices_by_side = {side: configuration.get(side, {}).get("devices", ()) for side in ("generator", "trainer")}
    first = f"generate on {', '.join(devices_by_side['generator'])}; train on {', '.join(devices_by_side['trainer'])}"
    changes = [event for event in changes_of(lines) if event.event == EVENT_PLAN_CHANGED]
    expected_per_s = plan.samples_per_s if plan is not None else None
    placements = [PlacedSteps(str(changes[0].data["before"]) if changes else first, 0, expected_per_s, [])]
    for event in changes:
        expected_rate = float(event.data["gain"]) * float(event.data["rate"])
        placements.append(PlacedSteps(str(event.data["after"]), event.step, expected_rate, []))
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
        busy_share = sum(step.flow.generator_busy_s for step in span.steps) / generator_s if generator_s else 0.0
        verifying = sum(step.verify_s for step in span.steps) / seconds / max(1, span.steps[-1].flow.verifier_workers)
        train_text, publish_text, pause_text = (
            percent(sum(getattr(step, name) for step in span.steps) / seconds)
            for name in ("trainer_compute_s", "publish_s", "apply_pause_s")
        )
        device_wait_s = sum(step.flow.device_wait_s for step in span.steps)
        wait_text = percent((sum(step.trainer_wait_s for step in span.steps) - device_wait_s) / seconds)
        idle_share = weighted_mean(span.steps, lambda step: step.generator_wait_ratio, _step_s)
        yielded_share = weighted_mean(span.steps, lambda step: step.generator_yielded_ratio, _step_s)
        rate = quantity(sum(step.samples for step in span.steps) / seconds)
        head = [span.placement, f"{span.since:,}", rate, quantity(span.expected_per_s) if span.expected_per_s else "–"]
        rows.append(["generate", *head, percent(busy_share), percent(idle_share), percent(yielded_share), pause_text])
        rows.append(["train", *head, train_text, wait_text, percent(device_wait_s / seconds), publish_text])
        rows.append(["verify", *head, percent(verifying), "–", "–", "–"])
    return rows


def _step_s(step: StepRecord) -> float:
    return step.step_s


def change_sentence(lines: Sequence[LedgerLine]) -> str:
    """Describe how often the plan was changed, and the last change; "" where it never was."""
    changes = changes_of(lines)
    if not changes:
        return ""
    last_change = changes[-1]
    reverted_count = sum(event.event == EVENT_PLAN_KEPT for event in changes)
    made_count = len(changes) - reverted_count
    later_events = [line for line in lines if isinstance(line, EventRecord) and line.step > last_change.step]
    outcome_text = "".join(f"; then {event.detail}" for event in later_events if event.event == EVENT_PLAN_OUTCOME)
    times_text = f"{made_count} {'change' if made_count == 1 else 'changes'} of plan in the run" + (
        f", {reverted_count} more taken back" if reverted_count else ""
    )
    cost_text = duration(float(last_change.data["cost_s"]))
    return f"{times_text}; the last at version {last_change.step}, in {cost_text}: {last_change.detail}{outcome_text}."
