"""Arithmetic of costs at its limits, and tenants on one pool."""

from __future__ import annotations

import math

import pytest

from headway.control.cost import (
    StepLoad,
    annuity_per_month,
    break_even_tokens_per_s,
    replay_factor,
    run_cost,
    step_usd,
)
from headway.control.shared_pool import TenantLoad, shared_pool


def test_an_annuity_pays_back_with_interest() -> None:
    """Paid month by month out of a debt that grows by a twelfth of the rate, nothing is left at the end."""
    payment, debt = annuity_per_month(361_255, 0.1025, 6), 361_255.0
    for _ in range(72):
        debt = debt * (1 + 0.1025 / 12) - payment
    assert debt == pytest.approx(0, abs=1e-4)
    assert payment == pytest.approx(6738.18, abs=0.005)
    assert annuity_per_month(1200, 0.0, 10) == 10


def test_means_of_ratios_and_ratios_of_means() -> None:
    """Steps of $1 over 1 M tokens and $1 over 3 M: 2/3 a million by steps, 1/2 by tokens."""
    loads = [StepLoad(samples=1, seconds=1, response_tokens=0, sequence_tokens=million * 1e6) for million in (1, 3)]
    found = run_cost([1.0, 1.0], loads)
    assert found.usd_per_mtok == pytest.approx((1, 1 / 3))
    assert found.mean_of_ratios == pytest.approx(2 / 3)
    assert found.ratio_of_means == pytest.approx(1 / 2)


def test_steps_and_failures() -> None:
    assert step_usd(1800, 96, 1.59) == pytest.approx(96 * 1.59 / 2)
    assert replay_factor(0, 5) == 1
    assert replay_factor(0.1, 1) == pytest.approx(1 / 0.9)
    for rate, lost in ((1, 1), (2, 1)):
        with pytest.raises(ValueError, match="no time"):
            replay_factor(rate, lost)
    assert break_even_tokens_per_s(1, 3.6, 1.0) == pytest.approx(1000)
    assert math.isinf(break_even_tokens_per_s(1, 3.6, 0.0))


def load(**changes: float) -> TenantLoad:
    values = {"slots": 16, "rollouts": 16, "mean_s": 100.0, "spread": 2.2, "train_s": 0.0, "steps": 20} | changes
    return TenantLoad(**values)  # type: ignore[arg-type]


def test_one_tenant_saves_nothing() -> None:
    found = shared_pool(load(), 1)
    assert (found.saving, found.slowdown) == (0, 1)
    assert found.busy_share < 0.7  # its stragglers leave slots idle


def test_equal_rollouts_leave_nothing_to_fill() -> None:
    for tenants in (2, 4):
        found = shared_pool(load(spread=1.0), tenants)
        assert found.saving == pytest.approx(0, abs=1e-9)
        assert found.busy_share == pytest.approx(1)
        assert found.slowdown == pytest.approx(tenants)


def test_a_tenant_generates_while_another_trains() -> None:
    """Equal rollouts of 100 s and 100 s of training: alone the slots idle half the time; two tenants alternate, so n
    steps of each take 2n + 1 halves instead of twice 2n."""
    found = shared_pool(load(spread=1.0, train_s=100.0, steps=10), 2)
    assert found.saving == pytest.approx(1 - 21 / 40)


def test_batches_wait_for_the_one_trainer() -> None:
    """Rollouts of 10 s and 100 s of training: ten steps of two tenants are 20 trainings, one after the other."""
    found = shared_pool(load(spread=1.0, mean_s=10.0, train_s=100.0, steps=10), 2)
    assert found.saving == pytest.approx(1 - (10 + 20 * 100) / (20 * 110))


def test_the_saving_grows_until_nothing_idles() -> None:
    """Two tenants fill much of what one's stragglers leave idle; beyond eight there is nothing left to fill."""
    pools = [shared_pool(load(spread=4.0), tenants) for tenants in (1, 2, 4, 8)]
    savings = [pool.saving for pool in pools]
    assert savings == sorted(savings)
    assert savings[1] > 0.25
    assert pools[-1].busy_share > 0.97
    assert shared_pool(load(spread=4.0), 16).saving - savings[-1] < 0.05
    for pool in pools:
        assert pool.slowdown == pytest.approx(pool.tenants * (1 - pool.saving))
        assert pool.busy_share <= 1


def test_lengths_have_the_mean_and_the_spread_that_were_asked_for() -> None:
    from random import Random

    from headway.control.shared_pool import _lengths

    (values,) = _lengths(load(rollouts=20_000, steps=1), Random(0))
    ordered = sorted(values)
    assert sum(values) / len(values) == pytest.approx(100, rel=0.02)
    assert ordered[int(0.99 * len(values))] / ordered[len(values) // 2] == pytest.approx(2.2, rel=0.05)
