"""Lengths out of a sample that was cut off."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.control.lengths import LengthDistribution, group_correlation, length_distribution

Observations = list[tuple[int, bool]]


def test_the_worked_example() -> None:
    found = length_distribution([(2, True), (3, False), (5, True)], limit_tokens=100)
    assert found.tokens == (2, 5)
    assert found.survival == (pytest.approx(2 / 3), 0.0)
    assert found.mean_tokens == found.mean_least_tokens == found.mean_most_tokens == pytest.approx(4.0)
    assert (found.finished, found.censored, found.truncated) == (2, 1, 0)


def test_without_censoring_it_is_the_sample_itself() -> None:
    lengths = [1, 4, 4, 9, 30]
    found = length_distribution([(length, True) for length in lengths], 50)
    assert found.mean_tokens == pytest.approx(sum(lengths) / 5)
    assert [found.quantile(q) for q in (0.0, 0.2, 0.21, 0.6, 0.8, 0.99)] == [1, 1, 4, 4, 9, 30]


def test_what_was_cut_off_is_not_short() -> None:
    """Slots that are refilled for 400 tokens' time, then cut: the mean of the ended ones is far too small."""
    draw = random.Random(1)
    limit, observations, truth = 2000, [], []
    for _ in range(400):
        left = 400
        while left > 0:
            length = min(limit, max(1, int(draw.lognormvariate(4.5, 1.0))))
            truth.append(length)
            observations.append((length, True) if length <= left else (left, False))
            left -= length
    mean = sum(truth) / len(truth)
    naive = [tokens for tokens, ended in observations if ended]
    found = length_distribution(observations, limit)
    assert sum(naive) / len(naive) < 0.75 * mean
    assert found.mean_least_tokens < mean < found.mean_most_tokens
    assert found.mean_tokens == pytest.approx(mean, rel=0.1)


def test_nothing_ended() -> None:
    found = length_distribution([(7, False), (3, False)], 160)
    assert found.mean_least_tokens == 7
    assert found.mean_tokens == found.mean_most_tokens == 160
    assert found.quantile(0.01) == found.quantile(0.99) == 160
    summary = found.summary(0.0)
    assert not summary.p99_seen
    assert summary.finished == 0
    nothing = length_distribution([], 160)
    assert nothing.mean_tokens == 160


def test_the_tail_goes_on_at_the_mean_hazard_and_ends_at_the_limit() -> None:
    found = length_distribution([(10, True), (10, True), (10, True), (20, False)], 1000)
    assert found.tail_share == pytest.approx(0.25)  # a hazard of ln 4 / 20 per token
    assert found.mean_tokens == pytest.approx(10 + 10 / 4 + 0.25 * 20 / 1.3863, rel=1e-3)
    assert found.quantile(0.75) == 10
    assert found.quantile(0.9375) == pytest.approx(40, abs=1)  # another ln 4 is another 20 tokens
    assert length_distribution([(10, True), (20, False)], 25).quantile(0.999) == 25


def test_responses_at_the_limit_have_ended() -> None:
    found = length_distribution([(5, True), (40, False), (40, True)], 40)
    assert found.truncated == 2
    assert found.tail_share == 0.0
    assert found.quantile(0.9) == 40


def test_a_smaller_limit_cuts_the_same_responses() -> None:
    found = length_distribution([(length, True) for length in (2, 8, 8, 50)], 100)
    cut = found.capped(8)
    assert cut.mean_tokens == pytest.approx((2 + 8 + 8 + 8) / 4)
    assert cut.quantile(0.99) == 8
    assert found.capped(60).mean_tokens == found.mean_tokens


@given(st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=40), st.integers(1, 60))
def test_bounds_and_monotony(observations: Observations, limit: int) -> None:
    found = length_distribution(observations, limit)
    assert found.finished + found.censored == len(observations)
    assert list(found.survival) == sorted(found.survival, reverse=True)
    assert 0 <= found.mean_least_tokens <= found.mean_tokens + 1e-9
    assert found.mean_tokens <= found.mean_most_tokens + 1e-9 <= limit + 1e-6
    quantiles = [found.quantile(i / 20) for i in range(20)]
    assert quantiles == sorted(quantiles)
    assert 1 <= quantiles[0] <= quantiles[-1] <= limit


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_the_mean_is_that_of_the_quantile_function(lengths: list[int]) -> None:
    found: LengthDistribution = length_distribution([(length, True) for length in lengths], 60)
    drawn = [found.quantile((i + 0.5) / len(lengths)) for i in range(len(lengths))]
    assert sum(drawn) / len(drawn) == pytest.approx(found.mean_tokens)


def test_correlation_inside_groups() -> None:
    draw = random.Random(3)
    alike = [[length] * 8 for length in range(1, 60)]
    assert group_correlation(alike) == pytest.approx(1.0)
    independent = [[draw.randrange(1, 500) for _ in range(8)] for _ in range(200)]
    assert group_correlation(independent) < 0.05
    half = [[base + draw.gauss(0, 1) for _ in range(8)] for base in (draw.gauss(0, 1) for _ in range(300))]
    assert group_correlation([[int(1000 * x) for x in group] for group in half]) == pytest.approx(0.5, abs=0.07)
    assert group_correlation([[3, 4]]) == 0.0
    assert group_correlation([[5, 5], [5, 5]]) == 0.0
