"""Moves that are decided, and their outcomes: which placements there are, when one is chosen, what it came to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from step_records import step_of

from headway.config.load import changed_experiment
from headway.control.tuning.controller import ControllerState, Decision, decide
from headway.control.tuning.diagnosis import all_device_splits
from headway.control.tuning.knob_search import first_knobs, limits_of
from headway.control.tuning.placement_outcome import MEASURED, MoveOutcome, PlanOutcome
from headway.records.ledger import StepRecord
from headway.records.plan import ExecutedMove, PlannedMove, RunPlacement
from tests.unit.control.test_replan import devices, generation_bound

SPATIAL = RunPlacement(generator=("cpu:0",), trainer=("cpu:1",))
HYBRID = RunPlacement(generator=("cpu:0", "cpu:1"), trainer=("cpu:1",))


def moved(placement: RunPlacement) -> ExecutedMove:
    planned = PlannedMove(placement=HYBRID, gain=1.5, rate=10.0, cost_s=2.0)
    return ExecutedMove(planned=planned, version=20, cost_s=4.0, previous=SPATIAL, placement=placement)


def record(step: int, per_s: float, length: int = 10) -> StepRecord:
    ended = {"accepted": 32 * length}
    return step_of(step, samples=32, step_s=32 / per_s, tokens__ended=ended)


def test_every_split_of_two_devices_is_another_mode() -> None:
    found = all_device_splits(placed(["cpu:0"], ["cpu:1"]))
    both, first, last = '["cpu:0", "cpu:1"]', '["cpu:0"]', '["cpu:1"]'
    shares = {(s.settings["generator.devices"], s.settings["trainer.devices"]): s.yielded_share for s in found}
    assert shares == {(both, both): 1.0, (both, last): 0.5, (first, both): 1.0}
    four = all_device_splits(placed(["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]))
    assert len(four) == 9  # temporal, 2 spatial ones beside its own, 3 of either hybrid


def test_gpus_are_shared_only_where_the_experiment_shares_some() -> None:
    assert [split.yielded_share for split in all_device_splits(devices(2, 2))] == [0.0, 0.0]
    assert len(all_device_splits(placed(["cuda:0", "cuda:1"], ["cuda:0", "cuda:1"]))) == 3


def test_splits_of_a_divided_model_have_as_many_shards_as_their_ranks_allow() -> None:
    keys = {"trainer.shards": "2", "trainer.context_parallel": "2"}
    four = changed_experiment(placed(["cpu:0"], ["cpu:1", "cpu:2", "cpu:3", "cpu:4"]), keys)
    names = [f"trainer.{key}" for key in ("shards", "context_parallel", "expert_parallel")]
    layouts = {split.ranks: [split.settings.get(name) for name in names] for split in all_device_splits(four)}
    assert layouts == {
        5: ["5", "1", None],
        4: [None] * 3,
        3: ["3", "1", None],
        2: ["1", None, None],
        1: ["1", "1", None],
    }
    assert changed_experiment(four, all_device_splits(four)[0].settings).trainer.shards


def placed(generator: list[str], trainer: list[str]) -> Any:
    settings = {"generator.devices": json.dumps(generator), "trainer.devices": json.dumps(trainer)}
    return changed_experiment(devices(1, 1), settings)


def decided(move: bool) -> Decision:
    experiment = devices(2, 4, control={"mode": "act", "devices": "move" if move else "recommend"})
    limits = limits_of(experiment, same_kind=True)
    records = generation_bound("off", steps=24).steps
    state = ControllerState(knobs=first_knobs(experiment), regime_step=5, decided_step=5)
    return decide(state, records, limits)


@pytest.mark.slow
def test_a_run_that_can_move_is_moved_before_its_knobs_are_set() -> None:
    decision = decided(move=True)
    assert [action.kind for action in decision.actions] == ["move"]
    (action,) = decision.actions
    assert action.predicted > 1.1
    assert len(json.loads(action.settings["generator.devices"])) > 2
    assert "devices" not in action.reason.rpartition("left")[2]  # it needs no resume
    assert decision.state.recommended  # not asked for again in this regime
    assert [a.kind for a in decided(move=False).actions] != ["move"]


def test_an_outcome_is_measured_without_the_steps_in_which_the_queue_fills() -> None:
    outcome, move, said = MoveOutcome(budget=2), moved(HYBRID), list[tuple[int, PlanOutcome]]()
    assert not any(outcome.changes(record(step, 10.0), None) for step in range(20))
    assert outcome.changes(record(20, 0.1), move)
    for step in range(21, 60):
        assert not outcome.changes(record(step, 1.0 if step < 23 else 14.0), move)
        if (found := outcome.due()) is not None:
            said.append((step, found))
    ((step, text),) = said
    assert step == 23 + MEASURED - 1
    assert not text.worse
    assert text.data == {"rate": 10.0, "expected": 15.0, "measured": 14.0, "cost_s": 4.0}
    assert "14 samples/s, expected 15, before 10; it took 4.0 s, expected 2.0 s" in text.detail


def outcome_of(rates: Sequence[float], *, length: int = 10, reverts: bool = False) -> PlanOutcome:
    outcome, move = MoveOutcome(budget=0), moved(HYBRID)
    move = msgspec.structs.replace(move, planned=msgspec.structs.replace(move.planned, reverts=reverts))
    assert not outcome.changes(record(19, 10.0), None)
    assert outcome.changes(record(20, 1.0, length), move)
    found = None
    for step, rate in enumerate(rates, 21):
        assert found is None
        assert not outcome.changes(record(step, rate, length), move)
        found = outcome.due()
    assert found is not None
    return found


def test_a_move_that_made_the_run_slower_is_to_be_reverted() -> None:
    slower = [8.5, 9.0] * (MEASURED // 2)
    assert outcome_of(slower).worse
    assert not outcome_of([9.9, 10.0] * (MEASURED // 2)).worse  # less than what a change must gain
    assert not outcome_of([2.0, 40.0] * (MEASURED // 2)).worse  # noise
    assert not outcome_of(slower, length=12).worse  # its responses are longer
    assert not outcome_of(slower, reverts=True).worse  # else it would go to and fro


def test_a_move_that_was_taken_back_changes_nothing() -> None:
    outcome, back = MoveOutcome(budget=2), moved(SPATIAL)
    assert not any(outcome.changes(record(step, 10.0), back) or outcome.due() for step in range(20, 60))
