"""Rule 11's group outcome, zero variance, solve-rate bins, quantiles and distributions."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.algorithms.groups.outcome import (
    GROUP_TIMEOUT,
    GroupOutcome,
    advantage_outcome,
    group_outcome,
    group_timeout,
    is_zero_variance,
)
from headway.config.schema import QueueConfig
from headway.control.summaries import distribution, quantile, solve_rate_bin, solve_rate_histogram
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
    outcome = group_outcome(members(*rewards), size=len(rewards), limits=QueueConfig(min_valid_group_ratio=ratio))
    assert (outcome.ending, outcome.reason) == (ending, reason)
    assert outcome.valid == sum(r is not None for r in rewards)


def test_zero_variance_is_reported_when_it_is_not_filtered():
    outcome = group_outcome(members(1.0, 1.0), size=2, limits=QueueConfig(filter_zero_variance=False))
    assert outcome.ending is None
    assert outcome.zero_variance


def test_a_group_with_a_member_missing_is_refused():
    with pytest.raises(ValueError, match="1 finished members of a group of 2"):
        group_outcome(members(1.0), size=2, limits=QueueConfig())


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


# --- what becomes of a group, on random ones -------------------------------------------------------------------

FATES = ("valid", "failed", "filtered", "pruned", "late")


def fated(fates, rewards):
    found = []
    for member, (fate, reward) in enumerate(zip(fates, rewards, strict=True)):
        plain = Rollout(group=0, member=member, prompt_ids=(), reward=reward)
        left = {
            "filtered": ("filtered", "user:why"),
            "pruned": ("pruned", "length"),
            "late": ("discarded", GROUP_TIMEOUT),
        }
        if fate == "failed":
            plain = msgspec.structs.replace(plain, failure=FAILURE)
        elif fate != "valid":
            plain = msgspec.structs.replace(plain, removal=left[fate][0], removal_reason=left[fate][1])
        found.append(plain)
    return found


RATIOS = st.sampled_from([0.1, 0.25, 0.5, 0.7, 0.75, 1.0])


@st.composite
def groups(draw):
    fates = draw(st.lists(st.sampled_from(FATES), min_size=1, max_size=10))
    rewards = draw(st.lists(st.sampled_from([-1.0, 0.0, 2.3]), min_size=len(fates), max_size=len(fates)))
    limits = QueueConfig(
        min_valid_group_ratio=draw(RATIOS),
        min_timeout_group_ratio=draw(RATIOS),
        min_valid_item_ratio=draw(st.sampled_from([0.0, 0.5, 1.0])),
        filter_zero_variance=draw(st.booleans()),
    )
    return fated(fates, rewards), limits


@settings(deadline=None, max_examples=300)
@given(groups())
def test_a_group_goes_on_only_with_members_enough_that_differ(given_group):
    rollouts, limits = given_group
    size = len(rollouts)
    outcome = group_outcome(rollouts, size=size, limits=limits)
    valid = [r for r in rollouts if r.valid]
    assert outcome.valid == len(valid)
    assert (outcome.ending is None) == (outcome.reason == "")
    if outcome.ending is None:
        assert len(valid) >= min(2, size)
        assert len(valid) >= limits.min_valid_item_ratio * size - 1e-9
        sound = sum(r.failure is None and r.removal in (None, "filtered") for r in rollouts)
        timed_out = any(r.removal == "discarded" for r in rollouts)
        needed = limits.min_timeout_group_ratio if timed_out else limits.min_valid_group_ratio
        assert sound >= needed * size - 1e-9
        if limits.filter_zero_variance and size > 1:
            assert len({r.reward for r in valid}) > 1
    if outcome.ending == "pruned":
        assert any(r.removal == "pruned" for r in rollouts)
    if outcome.reason == GROUP_TIMEOUT:
        assert any(r.removal == "discarded" for r in rollouts)


@settings(deadline=None, max_examples=200)
@given(groups(), st.data())
def test_a_member_more_never_fails_a_group(given_group, data):
    rollouts, limits = given_group
    gone = [r.member for r in rollouts if not r.valid]
    if not gone:
        return
    back = data.draw(st.sampled_from(gone))
    valid = {"failure": None, "removal": None, "removal_reason": ""}
    better = [msgspec.structs.replace(r, **valid) if r.member == back else r for r in rollouts]
    before = group_outcome(rollouts, size=len(rollouts), limits=limits).ending
    after = group_outcome(better, size=len(rollouts), limits=limits).ending
    timed_out = [any(r.removal == "discarded" for r in members) for members in (rollouts, better)]
    if before is None and (
        timed_out[0] == timed_out[1] or limits.min_valid_group_ratio <= limits.min_timeout_group_ratio
    ):
        assert after is None


@given(st.integers(1, 12), st.data(), st.floats(0, 100), st.one_of(st.none(), st.floats(0.1, 100)))
def test_a_timeout_stops_all_that_are_left_and_nobody_else(size, data, open_s, timeout_s):
    finished = data.draw(st.sets(st.integers(0, size - 1)))
    late = group_timeout(size=size, finished=finished, open_s=open_s, timeout_s=timeout_s)
    if timeout_s is None or open_s < timeout_s or len(finished) == size:
        assert late is None
    else:
        assert sorted([*late, *finished]) == list(range(size))


@given(st.lists(st.floats(-5, 5), max_size=8), st.floats(0, 5))
def test_low_advantages(advantages, least):
    outcome = advantage_outcome(GroupOutcome(ending=None, valid=len(advantages)), advantages, least)
    low = bool(least) and all(abs(advantage) < least for advantage in advantages)
    assert outcome.reason == ("low_advantage" if low else "")
    ended = GroupOutcome(ending="failed", reason="too_few_valid")
    assert advantage_outcome(ended, advantages, least) == ended
