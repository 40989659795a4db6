"""The controller: what it never does, whatever the ledger says; and what it does in whole runs in virtual time."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_records import changed, step_of

from headway.config.control import KnobName
from headway.config.schema import Experiment
from headway.control.tuning.controller import Action, ControllerState, decide
from headway.control.tuning.drift import find_drift
from headway.control.tuning.knob_search import KNOBS, ControlLimits, limits_of
from headway.records.control import Knobs
from headway.records.errors import ConfigurationError
from headway.records.ledger import Distribution, EventRecord, QueueFlow, StepRecord
from tests.support.simulated_run import controlled, experiment_of, simulate

GROUPS, SIZE = 2, 2


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """What every step's record shows, up to noise: it doesn't answer to the knobs."""

    wait: float = 0.0  # shares of the step
    straggler: float = 0.0
    idle: float = 0.0
    stock: int = 0  # groups buffered
    in_generation: float = 0.5  # of the concurrency
    acceptance: float = 1.0
    length: float = 20.0
    noise: float = 0.0  # relative standard deviation
    bias: float = 0.0
    preemptions: int = 0


def limits(budget: int = 2, **changes: Any) -> ControlLimits:
    experiment = experiment_of(
        Path("none"),
        run={"steps": 100_000},
        rollout={"group_size": SIZE, "max_response_tokens": 100},
        generator={"slots": 8},
        queue={"groups_per_step": GROUPS, "budget": budget},
    )
    return msgspec.structs.replace(limits_of(experiment), **changes)


def record(step: int, knobs: Knobs, shows: Situation, draw: random.Random) -> StepRecord:
    step_s = 0.2 * max(0.2, draw.normalvariate(1.0, shows.noise))
    groups = max(1, round(GROUPS / shows.acceptance))
    of_groups = [shows.length * max(0.2, draw.normalvariate(1.0, shows.noise)) for _ in range(groups)]
    length = fmean(of_groups)
    responses = groups * SIZE
    tokens = round(responses * length)
    generating_s = shows.in_generation * knobs.concurrent_rollouts * step_s
    busy_s = step_s * (1 - shows.idle)
    accepted = sum(draw.random() < shows.acceptance for _ in range(groups))
    buckets = Counter({bucket: SIZE * count for bucket, count in Counter(str(round(own)) for own in of_groups).items()})
    return step_of(
        step,
        step_s=step_s,
        samples=GROUPS * SIZE,
        groups=GROUPS,
        trainer_wait_s=shows.wait * step_s,
        trainer_compute_s=(1 - shows.wait) * step_s,
        generator_wait_ratio=shows.idle,
        verify_s=0.001 * responses,
        buffered_groups=shows.stock,
        engines__slots=8,
        trajectory_staleness=Distribution(mean=1.0),
        lengths__mean=length,
        lengths__p50=length,
        lengths__histogram=dict(buckets),
        length_bias__scheduling_ks=shows.bias,
        flow=QueueFlow(
            open_groups=knobs.open_groups or 0,
            concurrent_rollouts=knobs.concurrent_rollouts,
            steps_per_publish=knobs.steps_per_publish,
            useful_samples=GROUPS * SIZE,
            trained_tokens=round(GROUPS * SIZE * (length + 2)),
            finished_groups=groups,
            accepted_groups=accepted,
            responses=responses,
            length_variance_between=shows.noise**2,  # those of a group are equal
            length_variance_within=(shows.noise / 10) ** 2,
            prompt_tokens=2 * responses,
            generating_s=generating_s,
            decode_s=generating_s / 2,
            decode_tokens=tokens,
            straggler_wait_s=shows.straggler * step_s,
            generated_tokens=tokens,
            generator_busy_s=busy_s,
            generator_s=step_s,
            decode_steps=max(1, round(busy_s / 0.001)),
            preemptions=shows.preemptions,
        ),
    )


def play(
    shows: Situation, bounds: ControlLimits, first: Knobs, *, steps: int = 90, seed: int = 0
) -> tuple[list[Knobs], list[Action]]:
    """The knobs after each step, and everything that was done."""
    draw = random.Random(seed)
    state = ControllerState(knobs=first)
    records: list[StepRecord] = []
    history, actions = [first], list[Action]()
    for step in range(steps):
        records.append(record(step, state.knobs, shows, draw))
        decision = decide(state, tuple(records[-40:]), bounds)
        state = decision.state
        history.append(state.knobs)
        actions += decision.actions
    return history, actions


situations = st.builds(
    Situation,
    wait=st.sampled_from([0.0, 0.01, 0.1, 0.5]),
    straggler=st.sampled_from([0.0, 0.05]),
    idle=st.sampled_from([0.0, 0.1, 0.5]),
    stock=st.sampled_from([0, 2, 6]),
    in_generation=st.sampled_from([0.3, 0.8, 1.0]),
    acceptance=st.sampled_from([1.0, 0.5]),
    noise=st.sampled_from([0.0, 0.05, 0.2]),
    preemptions=st.sampled_from([0, 0, 3]),
    bias=st.sampled_from([0.0, 0.3]),
)
firsts = st.builds(
    Knobs,
    open_groups=st.sampled_from([None, 2, 3, 5]),
    concurrent_rollouts=st.sampled_from([2, 5, 12]),
    steps_per_publish=st.sampled_from([1, 2]),
)
seeds = st.integers(0, 1000)
few = settings(max_examples=8, deadline=None)  # a look at the model simulates some dozen queues


def values(history: list[Knobs], bounds: ControlLimits, name: KnobName) -> list[int]:
    return [bounds.value(knobs, name) for knobs in history]


def moves(history: list[Knobs], bounds: ControlLimits, name: KnobName) -> list[int]:
    of = values(history, bounds, name)
    return [after - before for before, after in itertools.pairwise(of) if after != before]


@few
@given(shows=situations, first=firsts, seed=seeds, pinned=st.sets(st.sampled_from(KNOBS)))
def test_knobs_keep_to_their_bounds_and_pinned_ones_stay(
    shows: Situation, first: Knobs, seed: int, pinned: set[KnobName]
) -> None:
    bounds = limits(pinned=frozenset(pinned))
    history, actions = play(shows, bounds, first, seed=seed, steps=50)
    for name in KNOBS:
        low, high = bounds.bounds(name)
        assert all(low <= value <= high for value in values(history, bounds, name))
        assert name not in pinned or not moves(history, bounds, name)
    for action in actions:
        assert action.reason
        assert action.kind in ("drift", "measured") or action.old != action.new


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(shows=situations, first=firsts, seed=seeds)
def test_it_comes_to_rest_on_stationary_inputs(shows: Situation, first: Knobs, seed: int) -> None:
    bounds = limits()
    history, actions = play(shows, bounds, first, seed=seed, steps=300)  # it looks ever more rarely
    regimes = 1 + sum(action.kind == "drift" for action in actions)  # noise may look like drift, seldom
    assert regimes <= 3, actions
    for name in KNOBS:
        of = moves(history, bounds, name)
        turns = sum(a * b < 0 for a, b in itertools.pairwise(of))
        assert turns <= 2 * regimes, (name, of, actions)
    moved = len(set(history[-40:])) - 1  # under noise a last move may come late: one in some hundred such runs
    assert moved <= (shows.noise > 0), actions


@few
@given(
    first=firsts,
    seed=seeds,
    wait=st.sampled_from([0.1, 0.4, 0.8]),
    noise=st.sampled_from([0.0, 0.1]),
    in_generation=st.sampled_from([0.2, 0.6, 1.0]),
)
def test_a_starving_trainer_never_gets_less(
    first: Knobs, seed: int, wait: float, noise: float, in_generation: float
) -> None:
    shows = Situation(wait=wait, noise=noise, in_generation=in_generation)
    bounds = limits()
    history, _ = play(shows, bounds, first, seed=seed)
    for name in ("open_groups", "concurrent_rollouts"):
        assert all(move > 0 for move in moves(history, bounds, name))
    if in_generation < 0.5 and first.concurrent_rollouts > 4:  # slots are empty: nothing else can be short
        assert history[-1].open_groups is None


@pytest.mark.slow
@few
@given(
    first=firsts, seed=seeds, idle=st.sampled_from([0.1, 0.6]), stock=st.sampled_from([0, 3]),
    noise=st.sampled_from([0.0, 0.1]),
)  # fmt: skip
def test_an_idle_generator_or_a_full_queue_never_gets_more(
    first: Knobs, seed: int, idle: float, stock: int, noise: float
) -> None:
    bounds = limits()
    history, _ = play(Situation(idle=idle, stock=stock, noise=noise), bounds, first, seed=seed)
    for name in ("open_groups", "concurrent_rollouts"):
        assert all(move < 0 for move in moves(history, bounds, name))


@settings(max_examples=2, deadline=None)
@given(shows=situations, first=firsts, seed=seeds)
def test_the_same_records_give_the_same_decisions(shows: Situation, first: Knobs, seed: int) -> None:
    assert play(shows, limits(), first, seed=seed, steps=30) == play(shows, limits(), first, seed=seed, steps=30)


def test_there_is_room_only_where_the_largest_group_fits() -> None:
    starved, first = (
        Situation(wait=0.5, in_generation=0.6),
        Knobs(open_groups=2, concurrent_rollouts=12, steps_per_publish=1),
    )
    short = "open groups are what is short"
    assert any(short in action.reason for action in play(starved, limits(), first, steps=8)[1])
    assert not any(short in action.reason for action in play(starved, limits(largest_group=8), first, steps=8)[1])


def test_no_load_is_added_beyond_the_length_bias_limit() -> None:
    starved = Situation(wait=0.5, in_generation=0.2, bias=0.3)
    first = Knobs(open_groups=2, concurrent_rollouts=12, steps_per_publish=1)
    assert set(play(starved, limits(), first)[0]) == {first}
    assert play(starved, limits(length_bias_limit=0.4), first)[0][-1].open_groups is None


def test_a_change_of_lengths_or_acceptance_begins_a_regime() -> None:
    bounds, draw = limits(), random.Random(1)
    knobs = Knobs(open_groups=None, concurrent_rollouts=12, steps_per_publish=1)
    for before, after, what in (
        (Situation(acceptance=0.25), Situation(acceptance=0.25, length=60.0), "response length"),
        (Situation(noise=0.05), Situation(noise=0.05, acceptance=0.3), "groups that can be trained"),
    ):
        shown = [record(step, knobs, before, draw) for step in range(14)]
        state = ControllerState(knobs=knobs)
        assert decide(state, shown, bounds).state.regime_step == 0
        later = [record(step, knobs, after, draw) for step in range(14, 24)]
        found = [decide(state, shown + later[: count + 1], bounds) for count in range(10)]
        first = next(decision for decision in found if decision.state.regime_step)
        assert first.actions[0].kind == "drift"
        assert what in first.actions[0].reason
        assert 13 <= first.state.regime_step <= 15


def test_lengths_that_are_alike_in_a_group_say_less() -> None:
    """Three steps of two groups each, every group of one length: another draw of tasks, no drift."""
    knobs = Knobs(open_groups=None, concurrent_rollouts=12, steps_per_publish=1)
    shown: list[StepRecord] = []
    for step in range(14):
        one = record(step, knobs, Situation(), random.Random(1))
        flow = msgspec.structs.replace(one.flow, responses=32, finished_groups=2, length_variance_between=1.0)
        lengths = {"10": 16, "40": 16} if step < 11 else {"40": 32}
        shown.append(changed(one, lengths__histogram=lengths, flow=flow))
    apart = [
        msgspec.structs.replace(one, flow=msgspec.structs.replace(one.flow, length_variance_within=1.0))
        for one in shown
    ]
    alike = [
        msgspec.structs.replace(one, flow=msgspec.structs.replace(one.flow, length_variance_within=0.01))
        for one in shown
    ]
    assert find_drift(alike) is None
    found = find_drift(apart)
    assert found is not None
    assert "response length" in found[1]


def test_a_verification_that_no_rate_depends_on_is_no_drift() -> None:
    knobs, draw = Knobs(open_groups=None, concurrent_rollouts=12, steps_per_publish=1), random.Random(1)
    shown = [record(step, knobs, Situation(noise=0.02), draw) for step in range(14)]

    def slower(seconds: float) -> list[StepRecord]:
        slow = [msgspec.structs.replace(one, verify_s=seconds * one.flow.responses) for one in shown[11:]]
        return shown[:11] + slow

    assert find_drift(slower(0.004)) is None  # 16 ms of 200
    found = find_drift(slower(0.02))
    assert found is not None
    assert "verification" in found[1]


def test_without_a_look_the_model_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr("headway.control.tuning.controller.estimate", lambda *given: asked.append(given))
    knobs, draw = Knobs(open_groups=None, concurrent_rollouts=12, steps_per_publish=1), random.Random(1)
    shown = [record(step, knobs, Situation(), draw) for step in range(20)]
    decide(ControllerState(knobs=knobs), shown, limits(), ask_model=False)
    assert not asked
    decide(ControllerState(knobs=knobs), shown, limits())
    assert asked


# --- in whole runs ---------------------------------------------------------------------------------------


def run_of(
    mode: str, *, steps: int = 60, sample_s: float = 0.05, kills_s: tuple[float, ...] = (), **control: Any
) -> Any:
    experiment = controlled(mode, steps=steps, **control)
    return simulate(experiment, token_s=lambda running: 0.004 + 0.0002 * running, sample_s=sample_s, kills_s=kills_s)


def control_events(outcome: Any) -> list[EventRecord]:
    return [line for line in outcome.lines if isinstance(line, EventRecord) and line.event == "control"]


def staleness(outcome: Any) -> float:
    return sum(step.trajectory_staleness.mean for step in outcome.steps[-15:]) / 15


@pytest.mark.slow
def test_a_slow_trainer_gets_younger_samples_at_its_own_rate() -> None:
    off, on = run_of("off"), run_of("act")
    assert not control_events(off)
    assert on.duration_s <= 1.02 * off.duration_s
    assert staleness(on) < 0.7 * staleness(off)
    changed = [event for event in control_events(on) if "knob" in event.data]
    assert changed
    assert all(event.data["predicted"] > 0 for event in changed)
    assert any(event.data["measured"] > 0 for event in control_events(on))
    last = on.steps[-1].flow
    assert 0 < last.open_groups < 20
    assert not on.audit


@pytest.mark.slow
def test_advice_changes_nothing() -> None:
    off, advised = run_of("off", steps=40), run_of("advise", steps=40)
    assert advised.duration_s == off.duration_s
    events = control_events(advised)
    assert events
    assert all(event.data["mode"] == "advise" for event in events)
    assert all(step.flow.open_groups == 0 for step in advised.steps)
    wanted = [event.detail for event in events if "knob" in event.data]
    assert len(wanted) == len(set(wanted))


def test_pinned_knobs_stay_in_a_run() -> None:
    pinned = run_of("act", steps=30, pin=["open_groups", "concurrent_rollouts", "steps_per_publish", "idle_replicas"])
    assert all(step.flow.open_groups == 0 for step in pinned.steps)
    assert not [event for event in control_events(pinned) if "knob" in event.data]


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_its_knobs() -> None:
    whole = run_of("act", steps=30)
    at_s = whole.steps[24].time_s
    killed = run_of("act", steps=30, kills_s=(at_s,))
    resumed = next(i for i, line in enumerate(killed.lines) if isinstance(line, EventRecord) and line.event == "resume")
    before = [line for line in killed.lines[:resumed] if isinstance(line, StepRecord)][-1].flow
    after = next(line for line in killed.lines[resumed:] if isinstance(line, StepRecord) and line.step_s).flow
    assert before.open_groups
    assert (after.open_groups, after.concurrent_rollouts) == (before.open_groups, before.concurrent_rollouts)
    assert not killed.audit


def test_a_resumed_run_takes_what_its_experiment_sets_anew() -> None:
    def experiment(mode: str, concurrent: int, publish: int) -> Experiment:
        return experiment_of(
            Path("none"),
            run={"steps": 24},
            rollout={"group_size": 4, "max_response_tokens": 200},
            queue={"groups_per_step": 4, "budget": 4, "max_concurrent_rollouts": concurrent},
            weights={"steps_per_publish": publish},
            control={"mode": mode, "pin": list(get_args(KnobName))},  # it changes nothing itself
        )

    before, after = experiment("off", 8, 1), experiment("act", 24, 2)
    outcome = simulate(before, sample_s=0.05, kills_s=(6.0, 0.01), resumed=after)  # killed again before a step
    knobs = [(s.flow.concurrent_rollouts, s.flow.steps_per_publish) for s in outcome.steps if s.step_s]
    assert set(knobs) == {(8, 1), (24, 2)}
    assert knobs == sorted(knobs)


def test_acting_is_refused_where_results_must_not_depend_on_times() -> None:
    with pytest.raises(ConfigurationError, match=r"run\.deterministic"):
        experiment_of(Path("none"), run={"deterministic": True}, control={"mode": "act"})
    with pytest.raises(ConfigurationError, match="named twice"):
        experiment_of(Path("none"), control={"pin": ["open_groups", "open_groups"]})


def test_a_limit_on_rollouts_at_once_is_raised_when_it_starves_the_trainer() -> None:
    starved = Situation(wait=0.5, in_generation=1.0)
    history, actions = play(starved, limits(), Knobs(open_groups=None, concurrent_rollouts=4, steps_per_publish=1))
    assert history[-1].concurrent_rollouts == limits().most_concurrent
    assert any("rollouts at once are what is short" in action.reason for action in actions)
    full = Knobs(open_groups=None, concurrent_rollouts=10, steps_per_publish=1)  # 8 slots, and a group that waits
    _, actions = play(starved, limits(most_concurrent=200), full)
    assert not any("rollouts at once" in action.reason for action in actions)
    between = msgspec.structs.replace(starved, idle=0.1)  # slots that are free stay so for a while
    _, actions = play(between, limits(most_concurrent=200), full)
    assert any("rollouts at once" in action.reason for action in actions)


def test_the_reserve_of_sides_that_are_as_fast_is_left_alone() -> None:
    knobs = Knobs(open_groups=None, concurrent_rollouts=12, steps_per_publish=1)

    def younger(idle: float) -> bool:
        _, actions = play(Situation(idle=idle, stock=2, noise=0.02), limits(budget=4), knobs)
        return any(action.kind == "set" and action.new < action.old for action in actions)

    assert younger(0.4)
    assert not younger(0.05)
