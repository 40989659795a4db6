"""Rule 1: the closed form admits exactly what Eq. 3 admits."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.control.admission import credit


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 60), st.integers(0, 30), st.integers(0, 6), st.integers(1, 9), st.integers(0, 8))
def test_credit_is_equation_3_counted_one_group_at_a_time(open_groups, steps, lag, per_step, budget):
    applied = max(0, steps - lag)
    admitted = 0
    while (per_step * steps + open_groups + admitted + 1 - 1) // per_step <= applied + budget:
        admitted += 1
    given_state = {"completed_steps": steps, "applied_version": applied, "groups_per_step": per_step, "budget": budget}
    assert credit(open_groups=open_groups, **given_state) == admitted


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 60), st.integers(0, 30), st.integers(0, 6), st.integers(1, 9), st.integers(0, 8), st.integers(0))
def test_surplus_makes_room_for_as_many_open_groups_more(open_groups, steps, lag, per_step, budget, surplus):
    applied = max(0, steps - lag)
    state = {"completed_steps": steps, "applied_version": applied, "groups_per_step": per_step, "budget": budget}
    without = credit(open_groups=open_groups, **state)
    assert credit(open_groups=open_groups + surplus, surplus_groups=surplus, **state) == without
    if without:
        assert credit(open_groups=open_groups, surplus_groups=surplus, **state) == without + surplus


def test_synchronous_budget_opens_one_batch_and_nothing_beyond_it():
    state = {"completed_steps": 3, "groups_per_step": 4, "budget": 0}
    assert credit(open_groups=0, applied_version=3, **state) == 4
    assert credit(open_groups=4, applied_version=3, **state) == 0
    assert credit(open_groups=0, applied_version=2, **state) == 0  # the new version is not applied everywhere


def test_worked_example_of_the_docstring():
    state = {"completed_steps": 0, "applied_version": 0, "groups_per_step": 2, "budget": 1}
    assert credit(open_groups=3, **state) == 1
    assert credit(open_groups=4, **state) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"groups_per_step": 0},
        {"budget": -1},
        {"open_groups": -1},
        {"surplus_groups": -1},
        {"applied_version": 6},
        {"applied_version": -1},
    ],
)
def test_arguments_out_of_range_are_refused(wrong):
    right = {"open_groups": 0, "completed_steps": 5, "applied_version": 5, "groups_per_step": 2, "budget": 1}
    with pytest.raises(ValueError, match=r"\d"):
        credit(**{**right, **wrong})
