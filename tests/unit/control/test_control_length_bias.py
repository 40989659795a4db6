"""Rule 3: the KS statistic is exact, causes are kept apart, cohorts close late."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.control.length_bias import LengthBias, ks_statistic

lengths_strategy = st.lists(st.integers(0, 12), max_size=30)


def brute_force_ks(a, b):
    return max(abs(sum(x <= t for x in a) / len(a) - sum(x <= t for x in b) / len(b)) for t in [*a, *b])


@settings(deadline=None, max_examples=300)
@given(lengths_strategy, lengths_strategy)
def test_ks_equals_brute_force(a, b):
    expected = brute_force_ks(a, b) if a and b else 0.0
    assert ks_statistic(Counter(a), Counter(b)) == pytest.approx(expected, abs=1e-12)


def test_ks_of_disjoint_and_equal_samples():
    assert ks_statistic({1: 5}, {2: 7}) == 1.0
    assert ks_statistic({1: 1, 2: 1}, {1: 10, 2: 10}) == 0.0
    assert ks_statistic({}, {1: 3}) == 0.0


def filled(endings, per_step=1):
    """(ending, length, complete) a group of one."""
    bias = LengthBias(per_step)
    for index in range(len(endings)):
        bias.admit(index, 1)
    for index, (ending, length, complete) in enumerate(endings):
        bias.end(index, ending, length, complete=complete)
    return bias.statistics()


def test_worked_example_of_the_docstring():
    bias = LengthBias(1)
    for index, (ending, lengths, complete) in enumerate([("trained", (3, 9), True), ("overdue", (50, 60), False)]):
        bias.admit(index, 2)
        for length in lengths:
            bias.end(index, ending, length, complete=complete)
    statistics = bias.statistics()
    assert (statistics.ks, statistics.scheduling_ks, statistics.cut_share) == (0.0, 0.5, 0.5)


@pytest.mark.parametrize(
    ("ending", "field"),
    [
        ("overdue", "scheduling_ks"),
        ("discarded", "scheduling_ks"),
        ("filtered", "filter_ks"),
        ("pruned", "pruning_ks"),
    ],
)
def test_each_cause_shows_under_its_own_name_only(ending, field):
    statistics = filled([("trained", 2, True), ("trained", 3, True), (ending, 9, True), (ending, 8, True)])
    assert getattr(statistics, field) == 0.5
    assert statistics.ks == 0.5
    others = {"scheduling_ks", "filter_ks", "pruning_ks"} - {field}
    assert all(getattr(statistics, name) == 0.0 for name in others)


def test_failures_show_under_no_cause():
    statistics = filled([("trained", 2, True), ("trained", 3, True), ("failed", 9, True), ("failed", 8, True)])
    assert statistics.ks == 0.5
    assert (statistics.scheduling_ks, statistics.filter_ks, statistics.pruning_ks) == (0.0, 0.0, 0.0)


def test_a_cohort_counts_only_once_it_is_closed():
    bias = LengthBias(2)
    bias.admit(0, 1)
    bias.end(0, "trained", 5, complete=True)
    assert bias.lengths() == ({}, {})  # its second group is not admitted yet
    assert bias.statistics().censored_share == 1.0
    bias.admit(1, 1)
    bias.admit(2, 2)
    assert bias.lengths() == ({}, {})
    bias.end(1, "trained", 90, complete=True)
    statistics = bias.statistics()
    assert bias.lengths() == ({5: 1, 90: 1}, {5: 1, 90: 1})
    assert statistics.censored_share == 0.5
    with pytest.raises(KeyError):
        bias.end(0, "trained", 5, complete=True)


@settings(deadline=None, max_examples=100)
@given(st.lists(lengths_strategy.filter(bool), min_size=1, max_size=8))
def test_all_trained_is_no_bias(groups):
    bias = LengthBias(1)
    for index, lengths in enumerate(groups):
        bias.admit(index, len(lengths))
        for length, count in Counter(lengths).items():
            bias.end(index, "trained", length, complete=True, count=count)
    trained, completed = bias.lengths()
    assert trained == completed == Counter(x for lengths in groups for x in lengths)
    assert bias.statistics().ks == 0.0
