"""From measured rates to a forecast: the formulas, and what binds."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned_run import calibration_of, lengths_of, shape_of

from headway.control.lengths import LengthDistribution
from headway.control.tuning.forecast import (
    RANK_EFFICIENCY,
    consumption_rate,
    forecast,
    ideal_rate,
    kv_slots,
    production_rate,
    queue_model,
)
from headway.records.check_report import Forecast

rates = st.floats(0.01, 1e6)


def forecast_of(measured: dict[str, Any] | None = None, **shape: Any) -> Forecast:
    lengths = lengths_of()
    return forecast(shape_of(**shape), calibration_of(**(measured or {})), lengths)


@given(production=rates, consumption=rates)
def test_the_ideal_rate(production: float, consumption: float) -> None:
    apart, half, together = (ideal_rate(production, consumption, share) for share in (0.0, 0.5, 1.0))
    assert apart == pytest.approx(min(production, consumption))
    assert 1 / together == pytest.approx(1 / production + 1 / consumption)
    assert apart / 2 <= together * (1 + 1e-9)
    assert together < half <= apart * (1 + 1e-9)
    # the half that is left keeps up with the trainer
    assert (production / 2 < consumption) or half == pytest.approx(consumption)


def test_production_is_concurrency_over_latency() -> None:
    lengths = lengths_of()  # 20 tokens each
    model = queue_model(shape_of(), calibration_of(decode_beside_tokens_per_s=None), lengths)
    assert production_rate(model, 20.0) == pytest.approx(32 / (20 * (0.002 + 32 * 0.00025)))
    slower = queue_model(shape_of(), calibration_of(decode_beside_tokens_per_s=1600.0), lengths)
    assert production_rate(slower, 20.0) == pytest.approx(production_rate(model, 20.0) / 2)
    two = queue_model(shape_of(replicas=2), calibration_of(decode_beside_tokens_per_s=None), lengths)
    assert production_rate(two, 20.0) > production_rate(model, 20.0)


def test_consumption_counts_publishing() -> None:
    model = queue_model(shape_of(), calibration_of(), lengths_of())
    tokens = 32 * (10 + 20)
    assert consumption_rate(model, 20.0) == pytest.approx(32 / (0.01 + tokens * 1e-4 + 0.002))
    seldom = msgspec.structs.replace(model, steps_per_publish=2)
    assert consumption_rate(seldom, 20.0) == pytest.approx(32 / (0.01 + tokens * 1e-4 + 0.001))


def test_a_matched_run() -> None:
    found = forecast_of(budget=4)
    assert found.balance == pytest.approx(found.effective_per_s / found.consumption_per_s)
    assert found.ideal_per_s == pytest.approx(min(found.effective_per_s, found.consumption_per_s))
    assert found.outcome.samples_per_s <= found.ideal_per_s * 1.03
    assert found.steps_per_h == pytest.approx(3600 * found.outcome.samples_per_s / 32)
    assert found.training_s == pytest.approx(100 / found.steps_per_h * 3600)
    assert found.verify_per_s == pytest.approx(1000)


def test_the_run_ends_at_its_time_limit() -> None:
    found = forecast_of(steps=100_000, time_limit_s=60.0, evaluated_samples=300)
    assert found.training_s == 60.0
    assert found.evaluation_s == pytest.approx(300 / found.production_per_s)
    assert found.total_s == found.training_s + found.evaluation_s


def test_filtering_counts_once_enough_groups_have_ended() -> None:
    half = forecast_of({"groups": 40, "accepted_groups": 20})
    assert half.acceptance == 0.5
    assert half.effective_per_s == pytest.approx(half.production_per_s / 2)
    few = forecast_of({"groups": 4, "accepted_groups": 0})
    assert few.acceptance is None
    assert few.effective_per_s == few.production_per_s


def test_evaluation_takes_its_share_of_the_generator() -> None:
    plain, by_time, by_step = forecast_of(), forecast_of(evaluated_per_s=20.0), forecast_of(evaluated_per_step=8.0)
    assert by_time.effective_per_s == pytest.approx(plain.effective_per_s - 20.0)
    assert 1 / by_step.effective_per_s == pytest.approx(1 / plain.effective_per_s + 8 / 32 / plain.production_per_s)


def test_a_slow_trainer_binds() -> None:
    found = forecast_of({"train_token_s": 1e-3}, budget=4)
    assert found.binding == "trainer"
    assert found.balance > 2
    assert found.outcome.trainer_wait < 0.05
    assert found.changes[0].key == "trainer.devices"
    assert found.changes[0].gain == pytest.approx(2 * RANK_EFFICIENCY - 1, abs=0.1)
    assert found.changes[0].needs
    assert not forecast_of({"train_token_s": 1e-3}, budget=4, free_devices=1).changes[0].needs


def test_a_slow_generator_binds() -> None:
    found = forecast_of({"decode_request_s": 2e-3}, budget=4)
    assert found.binding == "generator"
    assert found.outcome.trainer_wait > 0.5
    assert found.changes[0].key == "generator.devices"
    fixed = forecast_of({"decode_request_s": 0.0, "decode_fixed_s": 0.1}, budget=4)
    assert (fixed.binding, fixed.changes[0].key) == ("generator", "generator.slots")


def test_a_slow_verifier_binds() -> None:
    found = forecast_of({"verify_response_s": 0.1, "train_token_s": 1e-5}, budget=4)
    assert found.binding == "verifier"
    assert "10 samples/s" in found.reason
    assert found.changes[0].key == "verifier.workers"


def test_teachers_bind_where_both_sides_wait_for_them() -> None:
    found = forecast_of({"teach_response_s": 0.1}, teachers=2)
    assert found.outcome.samples_per_s == pytest.approx(20, rel=0.05)
    assert found.binding == "teacher"
    assert "the teachers score 20 samples/s at most" in found.reason
    best = found.changes[0]
    assert (best.key, best.value, best.constraint) == ("teachers", "4 rollouts at once", "teacher")
    assert best.gain == pytest.approx(1.0, abs=0.1)


def test_scarce_kv_binds() -> None:
    assert kv_slots(shape_of(kv_tokens=120), 30.0) == 4
    found = forecast_of({"decode_request_s": 0.0, "decode_fixed_s": 0.02}, budget=4, kv_tokens=120)
    assert found.binding == "kv"
    assert "4 of 32" in found.reason
    assert found.changes[0].key == "generator.kv_capacity_tokens"


def test_a_budget_too_small_for_the_tail_binds() -> None:
    tail = lengths_of([5] * 90 + [200] * 10, limit=200)
    measured = calibration_of(lengths=tail.summary(0.0), train_fixed_s=0.05, train_token_s=0.0)
    found = forecast(shape_of(budget=1, max_response_tokens=200), measured, tail)
    assert found.binding == "admission"
    assert found.longest_is == "limit"  # 100 responses are too few for a p99
    assert found.needed_budget == math.ceil(200 * 32 / (32 * tail.mean_tokens))
    assert found.changes[0].key == "queue.budget"
    assert found.changes[0].gain > 0.3
    shares = {entry.budget: entry.share for entry in found.budgets}
    assert shares[1] < shares[found.needed_budget]


def test_with_enough_responses_the_tail_is_the_p99_that_was_seen() -> None:
    many = lengths_of([10] * 970 + [60] * 30, limit=200)
    found = forecast(shape_of(max_response_tokens=200), calibration_of(lengths=many.summary(0.0)), many)
    assert (found.longest_is, found.longest_tokens) == ("p99", 60)


def test_synchronous_runs_are_told_to_overlap() -> None:
    found = forecast_of(budget=0)
    assert found.outcome.staleness_max == 0
    assert "queue.budget" in {change.key for change in found.changes}
    assert found.binding == "admission"


def test_shared_devices_take_turns() -> None:
    apart, shared = forecast_of(budget=6), forecast_of(budget=6, yielded_replicas=1)
    assert shared.ideal_per_s == pytest.approx(1 / (1 / shared.effective_per_s + 1 / shared.consumption_per_s))
    assert shared.outcome.samples_per_s == pytest.approx(shared.ideal_per_s, rel=0.1)
    assert shared.outcome.samples_per_s < 0.8 * apart.outcome.samples_per_s
    assert not {"generator.devices", "trainer.devices"} & {change.key for change in shared.changes}


def test_of_two_replicas_one_may_be_lent() -> None:
    """The other goes on: between a generator of its own and one that stands still."""
    two = {"replicas": 2, "slots": 16, "kv_tokens": 16 * 60, "budget": 6}
    slow = {"decode_request_s": 1e-3, "decode_beside_tokens_per_s": None}
    none, one, both = (forecast_of(slow, **two, yielded_replicas=yielded) for yielded in (0, 1, 2))
    rates = [found.outcome.samples_per_s for found in (both, one, none)]
    assert rates == sorted(rates)
    assert rates[1] > 1.1 * rates[0]
    for found in (none, one, both):
        assert found.outcome.samples_per_s == pytest.approx(found.ideal_per_s, rel=0.1)


def test_nothing_ended_is_no_crash() -> None:
    unknown: LengthDistribution = lengths_of([], limit=200, cut=[3] * 20)
    measured = calibration_of(lengths=unknown.summary(0.0), groups=0, accepted_groups=0, verify_response_s=0.0)
    found = forecast(shape_of(max_response_tokens=200), measured, unknown)
    assert found.verify_per_s is None
    assert found.needed_budget == 1  # all are taken to be equally long
    assert found.outcome.samples_per_s > 0


def test_oversampling_that_is_too_small_starves_the_trainer() -> None:
    whole, few = forecast_of(budget=4), forecast_of(budget=4, open_groups=shape_of().groups_per_step)
    assert few.outcome.staleness_mean <= whole.outcome.staleness_mean
    assert few.outcome.samples_per_s < whole.outcome.samples_per_s
