"""The controller's model is asked elsewhere: nothing waits for it, and what comes too late counts for nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from headway.control.tuning.controller import Action, ControllerState, Decision, decide
from headway.control.tuning.knob_search import ControlLimits
from headway.orchestrator.context import Decide
from headway.records.errors import WorkerDied
from headway.records.ledger import EventRecord, StepRecord
from headway.records.training import TrainBatch
from headway.runtime.clock import Clock
from tests.support.simulated_run import Outcome, controlled, simulate

Looked = tuple[Decision, float]


def run_of(look: Callable[[Clock], Decide] | None, *, steps: int = 60, sample_s: Any = 0.05) -> Outcome:
    """A slow trainer's run: the model finds fewer open groups as fast, and the samples younger."""
    return simulate(controlled("act", steps=steps), token_s=0.01, sample_s=sample_s, look=look)


def events(outcome: Outcome, name: str = "control") -> list[EventRecord]:
    return [line for line in outcome.lines if isinstance(line, EventRecord) and line.event == name]


def slow(seconds: float, asked: list[int]) -> Callable[[Clock], Decide]:
    """Says the same as the controller, ``seconds`` later; ``asked``: the steps at which it was."""

    def of(clock: Clock) -> Decide:
        async def look(state: ControllerState, records: Sequence[StepRecord], limits: ControlLimits) -> Looked:
            asked.append(records[-1].step)
            await clock.sleep(seconds)
            return decide(state, records, limits), 0.001

        return look

    return of


@pytest.mark.slow
def test_steps_go_on_while_the_model_is_asked() -> None:
    asked: list[int] = []
    at_once, later = run_of(None), run_of(slow(5.0, asked))
    assert later.duration_s <= 1.02 * at_once.duration_s
    change = next(event for event in events(later) if "knob" in event.data)
    assert change.step >= asked[0] + 3  # steps of 0.8 s
    before, after = (later.steps[step].flow.open_groups for step in (change.step - 1, change.step + 1))
    assert before == 0
    assert 0 < after < 20
    assert any(event.data["measured"] != 0 for event in events(later))
    assert not later.audit


def test_its_effect_is_measured_from_when_it_was_set() -> None:
    told: list[ControllerState] = []

    def of(clock: Clock) -> Decide:
        async def look(state: ControllerState, records: Sequence[StepRecord], limits: ControlLimits) -> Looked:
            told.append(state)
            await clock.sleep(5.0)
            return decide(state, records, limits), 0.001

        return look

    outcome = run_of(of)
    change = next(event for event in events(outcome) if "knob" in event.data)
    measured = next(event for event in events(outcome) if event.data["measured"] != 0)
    patience = 5
    assert measured.step >= change.step + patience
    assert next(state for state in told if state.knobs.open_groups).decided_step == change.step


def test_what_was_decided_meanwhile_goes_first() -> None:
    def of(clock: Clock) -> Decide:
        async def look(state: ControllerState, records: Sequence[StepRecord], limits: ControlLimits) -> Looked:
            await clock.sleep(30.0)
            knobs = msgspec.structs.replace(state.knobs, open_groups=5)
            action = Action(kind="set", reason="long ago", knob="open_groups", old=20, new=5)
            return Decision(state=msgspec.structs.replace(state, knobs=knobs), actions=(action,)), 0.001

        return look

    def drifting(batch: TrainBatch) -> float:
        return 0.05 if batch.step < 25 else 0.15

    steady, drifted = run_of(of), run_of(of, steps=40, sample_s=drifting)
    assert any("long ago" in event.detail for event in events(steady))
    assert any(event.data["kind"] == "drift" for event in events(drifted))
    assert not any("long ago" in event.detail for event in events(drifted) if event.step < 45)


def test_a_model_that_dies_is_reported_asked_again_ever_later_and_does_no_harm() -> None:
    asked: list[int] = []

    def of(clock: Clock) -> Decide:
        async def look(state: ControllerState, records: Sequence[StepRecord], limits: ControlLimits) -> Looked:
            asked.append(records[-1].step)
            raise WorkerDied("controller", "killed by signal 9")

        return look

    outcome = run_of(of)
    assert len(outcome.steps) == 60
    assert not outcome.audit
    assert [event.detail for event in events(outcome, "worker_died")] == ["controller: killed by signal 9"] * len(asked)
    assert {event.worker for event in events(outcome, "worker_died")} == {"controller"}
    assert 2 <= len(asked) <= 5
    gaps = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert gaps == sorted(gaps)


def test_looks_take_a_fiftieth_of_the_time_at_most() -> None:
    asked: list[float] = []

    def of(clock: Clock) -> Decide:
        async def look(state: ControllerState, records: Sequence[StepRecord], limits: ControlLimits) -> Looked:
            asked.append(clock.now())
            return Decision(state=state), 0.4  # found nothing, and would be asked again after every step

        return look

    assert run_of(of).duration_s > 40
    assert len(asked) >= 2
    assert min(later - earlier for earlier, later in itertools.pairwise(asked)) >= 20
