"""Re-planning: what pays in the rest of a run, plans that stay under noise, drifts that come step by step, splits."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.control.tuning.controller import WINDOW, Action, ControllerState, decide
from headway.control.tuning.diagnosis import device_splits
from headway.control.tuning.drift import find_drift
from headway.control.tuning.forecast import token_s_with
from headway.control.tuning.knob_search import ControlLimits, limits_of
from headway.control.tuning.ledger_model import estimate
from headway.control.tuning.switch_cost import PAYBACK, RemainingWork, remaining_work, switch_s, worthwhile_split
from headway.records.control import Knobs
from headway.records.ledger import EventRecord, StepRecord
from headway.runtime.devices import interchangeable
from tests.support.simulated_run import Outcome, experiment_of, simulate
from tests.unit.control.test_controller import Situation, limits, play, record

FIRST = Knobs(open_groups=None, concurrent_rollouts=12, steps_per_publish=1)
STARVED = Situation(wait=0.5, in_generation=1.0)
rates = st.floats(0.2, 5.0)
counts = st.integers(0, 10_000)
seconds = st.floats(0.0, 1e5)


# --- what pays -------------------------------------------------------------------------------------------


@given(steps=counts, step_s=st.floats(0.01, 1e3), gain=rates, cost_s=seconds, settling=st.integers(0, 20))
def test_a_plan_pays_only_where_it_saves_more_than_its_switch_and_ever_less_towards_the_end(
    steps: int, step_s: float, gain: float, cost_s: float, settling: int
) -> None:
    left = RemainingWork(steps=steps, step_s=step_s)
    if left.amortizes(gain, cost_s, settling):
        assert gain > 1.0
        assert steps > settling
        later_s = (steps - settling) * step_s * (1 - 1 / gain)
        assert later_s > PAYBACK * cost_s
        assert RemainingWork(steps=steps + 1, step_s=step_s).amortizes(gain, cost_s, settling)
        assert left.amortizes(gain, cost_s / 2, settling)
        assert left.amortizes(gain * 1.01, cost_s, settling)
    else:
        assert not RemainingWork(steps=max(0, steps - 1), step_s=step_s).amortizes(gain, cost_s, settling)


def test_what_is_left_is_counted_in_steps_or_by_the_time_limit() -> None:
    last, shape = StepRecord(step=9, version=10, time_s=100.0), limits().shape
    of = msgspec.structs.replace
    assert remaining_work(last, of(shape, steps=30), 2.0).steps == 20
    assert remaining_work(last, of(shape, steps=30, time_limit_s=110.0), 2.0).steps == 5
    assert remaining_work(last, of(shape, steps=5, time_limit_s=50.0), 2.0).steps == 0


def ending(at: int, **changes: Any) -> ControlLimits:
    bounds = limits(**changes)
    return msgspec.structs.replace(bounds, shape=msgspec.structs.replace(bounds.shape, steps=at))


@settings(max_examples=15, deadline=None)
@given(steps=st.integers(6, 40), seed=st.integers(0, 1000), noise=st.sampled_from([0.0, 0.1]))
def test_nothing_is_changed_that_would_show_only_after_the_end(steps: int, seed: int, noise: float) -> None:
    tight = Knobs(open_groups=2, concurrent_rollouts=12, steps_per_publish=1)
    starved = Situation(wait=0.5, in_generation=0.3, noise=noise)
    first, _ = play(starved, ending(steps), tight, steps=4, seed=seed)
    history, _ = play(starved, ending(2), tight, steps=4, seed=seed)
    assert first[-1].open_groups != 2
    assert set(history) == {tight}


def test_a_switch_that_costs_more_than_it_saves_is_not_made() -> None:
    scoring = Situation(wait=0.5)
    few = Knobs(open_groups=None, concurrent_rollouts=12, steps_per_publish=1)

    def workers(cost_s: float) -> list[int]:
        bounds = ending(30, most_verifiers=8, switch_s={"verifier_workers": cost_s})
        return [knobs.verifier_workers for knobs in scored(scoring, bounds, few, steps=8, verifying=1.0)[0]]

    assert workers(0.1)[-1] > 1
    assert set(workers(10.0)) == {1}  # of 30 steps of 0.2 s half are saved at most
    assert switch_s(few, msgspec.structs.replace(few, verifier_workers=2), ending(30)) == 0.0


# --- plans that stay -------------------------------------------------------------------------------------


def scored(
    shows: Situation, bounds: ControlLimits, first: Knobs, *, steps: int, verifying: float, seed: int = 0
) -> tuple[list[Knobs], list[Action]]:
    """`play`, with verifiers that score ``verifying`` seconds each second, shared by the workers there are."""
    draw, state = random.Random(seed), ControllerState(knobs=first)
    records, history, actions = list[StepRecord](), [first], list[Action]()
    for step in range(steps):
        one = record(step, state.knobs, shows, draw)
        flow = msgspec.structs.replace(one.flow, verifier_workers=state.knobs.verifier_workers)
        records.append(msgspec.structs.replace(one, flow=flow, verify_s=verifying * one.step_s))
        decision = decide(state, tuple(records[-40:]), bounds)
        state = decision.state
        history.append(state.knobs)
        actions += decision.actions
    return history, actions


@pytest.mark.slow
@settings(max_examples=2, deadline=None)  # in whole simulated runs: tests/slow/test_replanning.py
@given(
    seed=st.integers(0, 10_000),
    noise=st.sampled_from([0.02, 0.1, 0.2]),
    wait=st.sampled_from([0.0, 0.01, 0.04]),
    stock=st.sampled_from([0, 1]),
)
def test_stationary_noise_changes_nothing_in_hundreds_of_steps(
    seed: int, noise: float, wait: float, stock: int
) -> None:
    shows = Situation(noise=noise, wait=wait, stock=stock, in_generation=1.0)
    history, actions = play(shows, limits(), FIRST, steps=460, seed=seed)
    assert len(set(history[60:])) == 1, actions


def test_a_settled_plan_stays_while_the_trainer_starves_for_moments_and_changes_when_it_starves_on() -> None:
    """The trainer waits in every third step, and from step 90 on in all."""
    tight = Knobs(open_groups=3, concurrent_rollouts=12, steps_per_publish=1)
    draw, state = random.Random(1), ControllerState(knobs=tight)
    records, changed = list[StepRecord](), list[int]()
    for step in range(110):
        wait = 0.7 if step >= 90 else 0.3 if step % 3 == 0 else 0.0
        records.append(record(step, state.knobs, Situation(wait=wait, in_generation=0.3), draw))
        if step == 40:  # as a look that finds nothing does
            state = ControllerState(knobs=tight, reference=tuple(records[-WINDOW:]))
        decision = decide(state, tuple(records[-40:]), limits())
        if step > 40 and decision.state.knobs != state.knobs:
            changed.append(step)
            assert any("the trainer waits" in action.reason for action in decision.actions)
        state = decision.state
    assert changed
    assert 92 <= changed[0] <= 99


def test_a_drift_that_comes_step_by_step_is_found() -> None:
    draw, shown = random.Random(3), list[StepRecord]()
    state, found = ControllerState(knobs=FIRST), list[int]()
    for step in range(120):
        length = 20.0 * (1 + min(2.0, max(0.0, (step - 80) / 60)))
        shown.append(record(step, FIRST, Situation(noise=0.1, length=length, stock=1, in_generation=1.0), draw))
        decision = decide(state, tuple(shown[-40:]), limits())
        found += [step] * any("response length" in action.reason for action in decision.actions)
        state = msgspec.structs.replace(decision.state, knobs=FIRST)
    assert not any(find_drift(shown[at - 19 : at]) for at in range(40, 90))
    assert found
    assert 80 < found[0] <= 105


# --- verifier workers ------------------------------------------------------------------------------------


def test_verifier_workers_are_added_where_all_score_and_let_go_where_they_hardly_do() -> None:
    busy, few = Situation(wait=0.5), msgspec.structs.replace(FIRST, verifier_workers=2)
    bounds = limits(least_verifiers=2, most_verifiers=6)
    history, actions = scored(busy, bounds, few, steps=30, verifying=8.0)
    assert max(knobs.verifier_workers for knobs in history) == 6
    assert any("verifier workers are what is short" in action.reason for action in actions)
    assert {knobs.open_groups for knobs in history} == {None}
    many = msgspec.structs.replace(FIRST, verifier_workers=6)
    calm, actions = scored(Situation(stock=1, in_generation=1.0), bounds, many, steps=80, verifying=0.1)
    assert calm[-1].verifier_workers == 2  # never fewer than the experiment sets
    assert any(action.knob == "verifier_workers" and action.new < action.old for action in actions)


def run_of(mode: str, **control: Any) -> Outcome:
    experiment = experiment_of(
        Path("none"),
        run={"steps": 40},
        rollout={"group_size": 4, "max_response_tokens": 200},
        generator={"slots": 32},
        queue={"groups_per_step": 4, "budget": 4},
        control={"mode": mode, **control},
    )
    return simulate(experiment, token_s=0.002, sample_s=0.01, verify_s=0.03)


@pytest.mark.slow
def test_a_run_that_waits_for_its_verifiers_gets_more_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.control.tuning.knob_search._MOST_VERIFIERS", 4)
    off, act, pinned = run_of("off"), run_of("act"), run_of("act", pin=["verifier_workers"])
    assert {step.flow.verifier_workers for step in (*off.steps, *pinned.steps)} == {1}
    assert 2 <= act.steps[-1].flow.verifier_workers <= 4
    assert act.duration_s < 0.7 * off.duration_s
    assert not act.audit
    assert sorted(act.trained_groups) == sorted(set(act.trained_groups))


# --- splits of the devices -------------------------------------------------------------------------------


def devices(generator: int, trainer: int, **sections: Any) -> Any:
    names = [f"cuda:{index}" for index in range(generator + trainer)]
    return experiment_of(
        Path("none"),
        run={"steps": 80},
        rollout={"group_size": 4, "max_response_tokens": 200},
        generator={"slots": 8, "devices": names[:generator]},
        trainer={"devices": names[generator:]},
        queue={"groups_per_step": 8, "budget": 2},
        **sections,
    )


def test_splits_move_devices_and_leave_each_side_one() -> None:
    found = {(split.replicas, split.ranks) for split in device_splits(devices(3, 5))}
    assert found == {(4, 4), (5, 3), (7, 1), (2, 6), (1, 7)}
    split = next(split for split in device_splits(devices(2, 2)) if split.replicas == 3)
    assert json.loads(split.settings["generator.devices"]) == ["cuda:0", "cuda:1", "cuda:3"]
    assert json.loads(split.settings["trainer.devices"]) == ["cuda:2"]
    assert device_splits(devices(1, 1)) == ()
    assert interchangeable(["cuda:0", "b/cuda:1"])
    assert not interchangeable(["cuda:0", "cpu:0"])
    assert not interchangeable(["cpu:0-1", "cpu:2"])


def test_fewer_ranks_take_their_efficiency_back() -> None:
    found = estimate(generation_bound("off", steps=12).steps[5:], limits_of(devices(2, 4)).shape)
    assert found is not None
    model = msgspec.structs.replace(found.model, train_token_s=1e-3)
    alone_s = token_s_with(model, 4, 1)
    assert alone_s == pytest.approx(2.8e-3)
    assert token_s_with(msgspec.structs.replace(model, train_token_s=alone_s), 1, 4) == pytest.approx(1e-3)
    assert token_s_with(model, 2, 3) == pytest.approx(2e-3 / 3)


@functools.cache
def generation_bound(mode: str, steps: int = 80) -> Outcome:
    experiment = devices(2, 4, control={"mode": mode})
    run = experiment.run.model_copy(update={"steps": steps})
    options = {"replicas": 2, "length_of": lambda request: 40 + request.sampling.seed % 20}
    return simulate(experiment.model_copy(update={"run": run}), sample_s=0.002, generator_options=options)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["act", "advise"])
def test_another_split_is_recommended_once_in_a_regime_where_it_pays(mode: str) -> None:
    outcome = generation_bound(mode)
    said = [line for line in outcome.lines if isinstance(line, EventRecord) and line.data.get("kind") == "recommended"]
    assert len(said) == 1
    assert json.loads(str(said[0].data["generator.devices"]))[:2] == ["cuda:0", "cuda:1"]
    assert 1.1 < float(said[0].data["predicted"]) < 3.0
    assert "steps that are left" in said[0].detail


@pytest.mark.slow
def test_a_split_must_pay_for_its_restart_within_the_steps_that_are_left() -> None:
    bounds = limits_of(devices(2, 4), same_kind=True)
    found = estimate(generation_bound("off", steps=40).steps[10:], bounds.shape)
    assert found is not None
    long, short = RemainingWork(steps=1000, step_s=1.0), RemainingWork(steps=3, step_s=1.0)
    assert worthwhile_split(found, bounds, long) is not None
    assert worthwhile_split(found, bounds, short) is None
    costly = msgspec.structs.replace(bounds, switch_s={"devices": 2000.0})
    assert worthwhile_split(found, costly, long) is None
    assert worthwhile_split(found, msgspec.structs.replace(bounds, splits=()), long) is None
