"""Rule 11's group outcome, zero variance, solve-rate bins, quantiles and distributions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config.schema import Queue
from headway.control.learning_signal import group_outcome, is_zero_variance, solve_rate_bin, solve_rate_histogram
from headway.control.summaries import distribution, quantile
from headway.records.rollout import Failure, Rollout

FAILURE = Failure(boundary="reward", cause="NaN", infrastructure=True)


def members(*rewards):
    """One rollout per reward; None is a failed one."""
    return [
        Rollout(group=0, member=m, prompt_ids=(), reward=r or 0.0, failure=FAILURE if r is None else None)
        for m, r in enumerate(rewards)
    ]


@pytest.mark.parametrize(
    ("rewards", "ratio", "ending", "reason"),
    [
        ((1.0, 0.0, 1.0, 0.0), 0.5, None, ""),
        ((1.0, 1.0, 1.0, 1.0), 0.5, "filtered", "zero_variance"),
        ((1.0, 0.0, None, None), 0.5, None, ""),
        ((1.0, 0.0, None, None), 0.75, "failed", "too_few_valid"),
        ((1.0, None, None, None), 0.1, "failed", "too_few_valid"),
        ((None, None), 0.1, "failed", "too_few_valid"),
        ((0.0, 0.0, None), 0.5, "filtered", "zero_variance"),
        ((1.0,), 0.5, None, ""),
        ((None,), 0.5, "failed", "too_few_valid"),
    ],
)
def test_group_outcome(rewards, ratio, ending, reason):
    outcome = group_outcome(members(*rewards), size=len(rewards), limits=Queue(min_valid_group_ratio=ratio))
    assert (outcome.ending, outcome.reason) == (ending, reason)
    assert outcome.valid == sum(r is not None for r in rewards)


def test_zero_variance_is_reported_when_it_is_not_filtered():
    outcome = group_outcome(members(1.0, 1.0), size=2, limits=Queue(filter_zero_variance=False))
    assert outcome.ending is None
    assert outcome.zero_variance


def test_a_group_with_a_member_missing_is_refused():
    with pytest.raises(ValueError, match="1 finished members of a group of 2"):
        group_outcome(members(1.0), size=2, limits=Queue())


def test_zero_variance_allows_rounding_only():
    assert is_zero_variance([0.1 + 0.2, 0.3])
    assert not is_zero_variance([0.3, 0.3001])
    assert is_zero_variance([])


def test_solve_rate_bins_of_a_group_of_ten():
    assert [solve_rate_bin(k, 10) for k in range(11)] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 64), st.data())
def test_solve_rate_bins_are_in_order_and_the_ends_are_exact(valid, data):
    solved = data.draw(st.integers(0, valid))
    place = solve_rate_bin(solved, valid)
    assert 0 <= place <= 10
    assert (place == 0) == (solved == 0)
    assert (place == 10) == (solved == valid)
    if solved < valid:
        assert place <= solve_rate_bin(solved + 1, valid)
    with pytest.raises(ValueError, match="solved of"):
        solve_rate_bin(valid + 1, valid)


def test_solve_rate_histogram_leaves_out_groups_without_valid_members():
    histogram = solve_rate_histogram([(0, 8), (8, 8), (1, 8), (7, 8), (0, 0)])
    assert histogram == [1, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.floats(0, 1))
def test_quantile_equals_numpy(values, q):
    assert quantile(values, q) == pytest.approx(float(np.quantile(values, q)), rel=1e-9, abs=1e-6)


def test_summaries_of_nothing_are_zero():
    assert quantile([], 0.5) == 0.0
    assert distribution([]).max == 0.0


def test_distribution():
    summary = distribution([(0, 2), (3, 1), (0, 1)])
    assert (summary.mean, summary.max, summary.histogram) == (0.75, 3, {"0": 3, "3": 1})
