"""The re-planner on a drift, in whole simulated runs: what it gains by it: tests/slow/test_replanning.py."""

from __future__ import annotations

import pytest

from tests.support.replanned import BEGINS, replayed


@pytest.mark.slow
def test_when_lengths_triple_it_changes_the_plan() -> None:
    act = replayed(0)
    before = act.plan_at(BEGINS - 1)
    assert before.verifier_workers == 1
    assert [step for step in act.changed_at if 60 <= step < BEGINS] == []
    assert min(step for step in act.changed_at if step >= BEGINS) <= BEGINS + 10
    assert act.plan_at(-1).verifier_workers >= 2
