"""The queue in the abstract: against the run's own loops, against a reference table, and its rule for the budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist, mean, pvariance
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_run import experiment_of
from simulated_run import simulate as simulate_run

from headway.control.tuning.queue_model import QueueModel, _Simulation, needed_budget, simulate

NORMAL = NormalDist()


def log_normal(median: float, sigma: float, limit: int = 10**6) -> Callable[[float], int]:
    return lambda q: max(1, min(limit, int(median * math.exp(sigma * NORMAL.inv_cdf(min(max(q, 1e-9), 1 - 1e-9))))))


def model_of(**changes: Any) -> QueueModel:
    fields: dict[str, Any] = {
        "groups_per_step": 4,
        "group_size": 4,
        "budget": 2,
        "slots": 16,
        "concurrent_rollouts": 24,
        "length_at": log_normal(12, 1.0, 200),
        "decode_fixed_s": 0.01,
        "decode_request_s": 0.0,
        "train_fixed_s": 0.32,
        "train_token_s": 0.0,
    }
    return QueueModel(**(fields | changes))


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.8, 1.0])
def test_lengths_of_a_group_are_as_alike_as_measured(correlation: float) -> None:
    model = model_of(group_correlation=correlation, length_at=lambda q: int(1e6 * q))
    simulation = _Simulation(model, seed=0)
    groups = [simulation._lengths() for _ in range(1500)]
    scores = [[NORMAL.inv_cdf(min(max(length / 1e6, 1e-6), 1 - 1e-6)) for length in lengths] for lengths in groups]
    flat = [score for group in scores for score in group]
    assert mean(flat) == pytest.approx(0.0, abs=0.06)
    assert pvariance(flat) == pytest.approx(1.0, abs=0.1)
    assert mean(group[0] * group[1] for group in scores) == pytest.approx(correlation, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "sample_s"), [(0, 0.02), (1, 0.02), (3, 0.02), (6, 0.02), (3, 0.06)])
def test_it_agrees_with_the_real_loops(budget: int, sample_s: float) -> None:
    """The run itself, fakes under the virtual clock: rates, waits and staleness."""
    limit = 200
    experiment = experiment_of(
        Path("unused"),
        run={"steps": 60},
        rollout={"group_size": 4, "max_response_tokens": limit},
        queue={"groups_per_step": 4, "budget": budget, "filter_zero_variance": False},
        generator={"slots": 16},
    )
    real = simulate_run(experiment, token_s=0.01, sample_s=sample_s, publish_s=0.01, verify_s=0.005).steps[15:55]
    elapsed_s = sum(step.step_s for step in real)
    rate = sum(step.samples for step in real) / elapsed_s
    wait = sum(step.trainer_wait_s for step in real) / elapsed_s
    staleness = sum(step.trajectory_staleness.mean for step in real) / len(real)
    model = model_of(
        budget=budget,
        length_at=log_normal(math.exp(2.5), 1.0, limit),
        train_fixed_s=sample_s * 16,
        publish_s=0.01,
        verify_response_s=0.005 / 4,
        concurrent_rollouts=experiment.concurrent_rollouts,
    )
    found = simulate(model)
    assert found.samples_per_s == pytest.approx(rate, rel=0.15)
    assert found.trainer_wait == pytest.approx(wait, abs=0.1)
    assert found.staleness_mean == pytest.approx(staleness, abs=0.4)
    assert found.staleness_max <= budget


@pytest.mark.parametrize(
    ("concurrency", "shares"),
    [(64, {1: 0.51, 2: 0.64, 4: 0.77, 8: 0.90, 12: 0.97}), (32, {1: 0.61, 2: 0.76, 4: 0.92, 8: 0.99, 12: 0.99})],
)
def test_how_deep_the_pipeline_must_be(concurrency: int, shares: dict[int, float]) -> None:
    """Share of the ideal rate by budget: batches of 64 in groups of 8, lengths with p99 = 8 x median, both sides
    equally fast alone. The reference was simulated independently, with a decoding cost of its own."""
    length_at = log_normal(100, math.log(8) / NORMAL.inv_cdf(0.99))
    mean = sum(length_at((i + 0.5) / 4000) for i in range(4000)) / 4000
    production = concurrency / (0.01 * mean)
    for budget, share in shares.items():
        model = model_of(
            groups_per_step=8,
            group_size=8,
            budget=budget,
            slots=concurrency,
            concurrent_rollouts=concurrency + 16,
            length_at=length_at,
            decode_fixed_s=0.004,
            decode_request_s=0.006 / concurrency,
            train_fixed_s=64 / production,
        )
        assert simulate(model).samples_per_s / production == pytest.approx(share, abs=0.13)


@settings(max_examples=15, deadline=None)
@given(
    groups=st.integers(1, 4),
    size=st.integers(2, 4),
    budget=st.integers(0, 4),
    slots=st.integers(1, 20),
    train_s=st.floats(0.01, 2.0),
    overdue=st.sampled_from(["wait", "drop", "mask"]),
    beside=st.sampled_from([1.0, 1.5]),
    yielded_share=st.sampled_from([0.0, 0.5, 1.0]),
    acceptance=st.sampled_from([1.0, 0.5]),
    seldom=st.booleans(),
)
def test_no_schedule_breaks_the_budget_or_the_clock(
    groups: int,
    size: int,
    budget: int,
    slots: int,
    train_s: float,
    overdue: Any,
    beside: float,
    yielded_share: float,
    acceptance: float,
    seldom: bool,
) -> None:
    model = model_of(
        groups_per_step=groups,
        group_size=size,
        budget=budget,
        slots=slots,
        concurrent_rollouts=max(slots, size),
        length_at=log_normal(8, 1.0, 60),
        train_fixed_s=train_s,
        publish_s=0.01,
        apply_s=0.02,
        pause_s=0.01,
        overdue=overdue,
        beside=beside,
        yielded_share=yielded_share,
        acceptance=acceptance,
        steps_per_publish=budget + 1 if seldom else 1,
    )
    found = simulate(model)
    assert found.samples_per_s > 0
    assert found.samples_per_s <= groups * size / train_s * (1 + 1e-9)
    if overdue == "wait":
        assert found.staleness_max <= budget
    for share in (found.trainer_wait, found.generator_wait, found.slots_filled):
        assert -1e-9 <= share <= 1 + 1e-9
    assert found.straggler_wait <= found.trainer_wait + 1e-9
    assert simulate(model) == found


def test_a_deeper_budget_costs_staleness_and_buys_throughput() -> None:
    found = [simulate(model_of(budget=budget)) for budget in (0, 1, 4, 8)]
    rates = [outcome.samples_per_s for outcome in found]
    assert rates == sorted(rates)
    assert rates[0] < 0.6 * rates[-1]
    assert found[0].staleness_max == 0 < found[1].staleness_mean < found[2].staleness_mean


def test_sides_that_share_devices_take_turns() -> None:
    """With a deep queue 1/rate = 1/production + 1/consumption; beside each other, the slower one's."""
    short = {"length_at": lambda q: 10, "budget": 6, "train_fixed_s": 0.1}  # 160 samples/s each
    apart = simulate(model_of(**short))
    assert apart.samples_per_s == pytest.approx(160, rel=0.05)
    shared = simulate(model_of(**short, yielded_share=1.0))
    assert shared.samples_per_s == pytest.approx(80, rel=0.1)
    assert shared.trainer_wait == pytest.approx(0.5, abs=0.05)
    assert shared.generator_wait == pytest.approx(0.5, abs=0.05)


def test_verifiers_and_filters_slow_it_down() -> None:
    plain = simulate(model_of(budget=8, train_fixed_s=0.01)).samples_per_s
    half = simulate(model_of(budget=8, train_fixed_s=0.01, acceptance=0.5)).samples_per_s
    assert half == pytest.approx(plain / 2, rel=0.1)
    slow = simulate(model_of(budget=8, train_fixed_s=0.01, verify_response_s=0.1)).samples_per_s
    assert slow == pytest.approx(10, rel=0.05)
    two = simulate(model_of(budget=8, train_fixed_s=0.01, verify_response_s=0.1, verifiers=2)).samples_per_s
    assert two == pytest.approx(20, rel=0.05)


def test_teachers_score_after_the_verifiers_a_bounded_number_at_once() -> None:
    """A bound of teachers / seconds; the members of a group are scored side by side, and busy time is counted once."""
    bound = simulate(model_of(budget=8, train_fixed_s=0.01, verify_response_s=0.001, teach_response_s=0.4, teachers=4))
    assert bound.samples_per_s == pytest.approx(10, rel=0.05)
    assert bound.teaching == pytest.approx(1.0, abs=0.01)
    assert min(bound.trainer_wait, bound.generator_wait) > 0.5
    idle = simulate(model_of(budget=0, teach_response_s=0.02, teachers=4))
    steps_per_s = idle.samples_per_s / 16
    assert 0.02 * steps_per_s < idle.teaching < 4 * 0.02 * steps_per_s + 0.01
    assert simulate(model_of()).teaching == 0


def test_large_batches_are_simulated_in_proportion() -> None:
    large = {"groups_per_step": 512, "slots": 2048, "concurrent_rollouts": 3072, "decode_request_s": 1e-5}
    large |= {"decode_fixed_s": 0.0, "train_fixed_s": 5.0, "verify_response_s": 1e-4, "budget": 2}
    small = {"groups_per_step": 128, "slots": 512, "concurrent_rollouts": 768, "decode_request_s": 4e-5}
    small |= {"decode_fixed_s": 0.0, "train_fixed_s": 5.0, "verify_response_s": 4e-4, "budget": 2}
    here, there = simulate(model_of(**large)), simulate(model_of(**small))
    assert here.samples_per_s == pytest.approx(4 * there.samples_per_s)
    assert here.trainer_wait == there.trainer_wait


def test_a_model_that_stands_still_is_refused() -> None:
    with pytest.raises(ValueError, match="is deadlocked"):
        simulate(model_of(budget=0, steps_per_publish=3))


# --- the rule for the budget -----------------------------------------------------------------------------

positive = st.integers(1, 10_000)


@given(longest=positive, concurrency=positive, samples=positive, mean=st.floats(1, 10_000))
def test_the_needed_budget_is_the_smallest_that_satisfies_the_rule(
    longest: int, concurrency: int, samples: int, mean: float
) -> None:
    budget = needed_budget(longest_tokens=longest, concurrency=concurrency, samples_per_step=samples, mean_tokens=mean)
    steps = longest * concurrency / (samples * mean)
    assert budget >= 1
    assert budget >= steps - 1e-6
    assert budget - 1 < steps + 1e-6


@given(longest=positive, concurrency=positive, samples=positive, mean=positive)
def test_longer_tails_and_more_slots_need_more_larger_batches_less(
    longest: int, concurrency: int, samples: int, mean: int
) -> None:
    def needed(longest: int, concurrency: int, samples: int, mean: int) -> int:
        return needed_budget(
            longest_tokens=longest, concurrency=concurrency, samples_per_step=samples, mean_tokens=mean
        )

    here = needed(longest, concurrency, samples, mean)
    assert needed(2 * longest, concurrency, samples, mean) >= here
    assert needed(longest, 2 * concurrency, samples, mean) >= here
    assert needed(longest, concurrency, 2 * samples, mean) <= here
    assert needed(longest, concurrency, samples, 2 * mean) <= here
    assert needed(2 * longest, concurrency, samples, 2 * mean) == here


def test_the_rule_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        needed_budget(longest_tokens=10, concurrency=0, samples_per_step=1, mean_tokens=1)


def test_updates_pause_decoding() -> None:
    """Steps of 16 samples in 0.1 s, each followed by a pause as long as generating them takes: half the rate."""
    short = {"length_at": lambda q: 10, "budget": 6, "train_fixed_s": 0.02}
    plain, paused = simulate(model_of(**short)), simulate(model_of(**short, pause_s=0.1, apply_s=0.1))
    assert plain.samples_per_s == pytest.approx(160, rel=0.05)
    assert paused.samples_per_s == pytest.approx(80, rel=0.1)


def test_a_group_that_ends_with_its_tools_makes_room() -> None:
    simulation = _Simulation(model_of(environment_s=5.0), 0)
    simulation.admit()
    assert simulation.acting == 24
    for index in list(simulation.open):
        simulation._end_overdue(simulation.open.pop(index))
    assert simulation.acting == 0
    simulation.advance()  # their tools' timer: nothing comes of it
    assert simulation.acting == 0
    assert not simulation.waiting
