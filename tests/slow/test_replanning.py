"""The re-planner against the best fixed plan in hindsight, and on loads that stand still: the real loops, simulated."""

from __future__ import annotations

import itertools

import pytest

from tests.support.replanned import BEGINS, Plan, replayed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_when_lengths_triple_it_changes_the_plan_in_time_and_gains_what_the_best_fixed_plan_gains(seed: int) -> None:
    act = replayed(seed)
    alone = replayed(seed, act.plan_at(BEGINS - 1)).drifted_per_s
    plans = [Plan(*knobs) for knobs in itertools.product((None, 26, 16), (72, 36), (2, 4))]  # 1: as before
    best = max(replayed(seed, plan).drifted_per_s for plan in plans)
    gain, least = (act.drifted_per_s - alone) / (best - alone), min(step for step in act.changed_at if step >= BEGINS)
    print(f"alone {alone:.2f}, act {act.drifted_per_s:.2f}, best {best:.2f}: {gain:.3f}; first change {least - BEGINS}")
    assert best > 1.2 * alone  # else nothing would be at stake
    assert gain >= 0.9
    assert least <= BEGINS + 10


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
@pytest.mark.long
def test_noise_changes_nothing_in_hundreds_of_steps(seed: int) -> None:
    act = replayed(seed, steps=600, drift=False)
    assert [step for step in act.changed_at if step >= 100] == []
