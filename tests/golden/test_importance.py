"""Importance masks by hand, and what they promise of any batch."""

from __future__ import annotations

from itertools import combinations
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.algorithms.importance import SequenceWeight, second_moment_mask, sequence_mask, token_mask


def logs(*weights: float) -> np.ndarray:
    return np.log(np.array(weights))


def test_tokens_outside_the_bounds_go() -> None:
    assert token_mask(logs(0.49, 0.51, 1, 4.9, 5.1), (0.5, 5)).tolist() == [False, True, True, True, False]
    # A lowest weight of 0 is no bound, of whatever underflows too.
    assert token_mask(np.array([-800.0, -500.0, 0.0, 500.0]), (0, 5)).tolist() == [True, True, True, False]
    assert token_mask(np.zeros(0), (0.5, 5)).tolist() == []


def test_samples_are_judged_by_their_geometric_mean() -> None:
    # Sample 0: sqrt(8 * 0.5) = 2. Sample 1: 4.5. Sample 3: cbrt(8 * 1 * 0.064) = 0.8; there is no token of sample 2.
    weights, samples = logs(8, 0.5, 4.5, 8, 1, 0.064), np.array([0, 0, 1, 3, 3, 3])

    def kept(low: float, high: float) -> list[bool]:
        return sequence_mask(weights, samples, (low, high)).tolist()

    assert kept(0.7, 3) == [True, True, False, True, True, True]
    assert kept(0.9, 5) == [True, True, True, False, False, False]
    assert kept(0, 1.9) == [False, False, False, True, True, True]
    assert sequence_mask(np.zeros(0), np.zeros(0, np.int64), (0.5, 2)).tolist() == []


def test_samples_are_judged_by_their_product_or_by_any_one_token() -> None:
    # Products: 0: 8 * 0.5 = 4   1: 4.5   3: 8 * 1 * 0.064 = 0.512; lowest and highest: 0.5, 8   4.5   0.064, 8
    weights, samples = logs(8, 0.5, 4.5, 8, 1, 0.064), np.array([0, 0, 1, 3, 3, 3])

    def kept(by: SequenceWeight, low: float, high: float) -> list[bool]:
        return sequence_mask(weights, samples, (low, high), by).tolist()

    assert kept("sum", 0.6, 4.2) == [True, True, False, False, False, False]
    assert kept("sum", 0.5, 4.6) == [True] * 6
    assert kept("sum", 0, 4.2) == [True, True, False, True, True, True]
    assert kept("max", 0.4, 9) == [True, True, True, False, False, False]
    assert kept("max", 0, 9) == [True] * 6
    assert kept("max", 0.4, 5) == [False, False, True, False, False, False]
    # A response of one token has one weight, whichever way it is taken.
    for by in get_args(SequenceWeight):
        assert sequence_mask(logs(3), np.zeros(1, np.int64), (0.5, 2), by).tolist() == [False]
        assert sequence_mask(np.zeros(0), np.zeros(0, np.int64), (0.5, 2), by).tolist() == []


def test_second_moment_goes_from_the_farthest_inwards() -> None:
    # Driven away: 0 (0.1, A > 0), 1 (-0.2, A < 0), 2 (0.3, A > 0), 4 (0.5, A > 0); token 3's weight is above 1 with a
    # negative advantage, token 5's advantage is 0, token 6 is where it was.
    # Their squares 0.01, 0.04, 0.09, 0.25 have means 0.01, 0.025, 0.14/3 = 0.0467, 0.39/4 = 0.0975.
    weights = np.array([0.1, -0.2, 0.3, 0.4, 0.5, -9.0, 0.0])
    advantages = np.array([1.0, -1.0, 0.5, -1.0, 2.0, 0.0, 1.0])

    def masked(limit: float) -> list[int]:
        return np.flatnonzero(~second_moment_mask(weights, advantages, limit)).tolist()

    assert masked(0.1) == []
    assert masked(0.05) == [4]
    assert masked(0.04) == [2, 4]
    assert masked(0.02) == [1, 2, 4]
    assert masked(0.005) == [0, 1, 2, 4]
    # At the limit exactly, 0.5^2, is within it.
    assert second_moment_mask(np.array([0.5, -0.5]), np.array([1.0, -1.0]), 0.25).tolist() == [True, True]
    assert second_moment_mask(np.zeros(0), np.zeros(0), 0.04).tolist() == []


numbers = st.one_of(st.floats(-3, 3), st.sampled_from([0.0, 0.2, -0.2, 500.0, -500.0]))


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(numbers, st.sampled_from([-1.0, 0.0, 2.0])), max_size=8), st.floats(1e-3, 4.0))
def test_second_moment_keeps_its_limit_with_the_fewest_masked(tokens: list[tuple[float, float]], limit: float) -> None:
    weights = np.array([weight for weight, _ in tokens])
    advantages = np.array([advantage for _, advantage in tokens])
    keep = second_moment_mask(weights, advantages, limit)
    driven = weights * advantages > 0
    assert keep[~driven].all()
    squares = weights**2
    kept = squares[driven & keep]
    assert kept.sum() <= limit * len(kept) * (1 + 1e-9)
    # Minimal: no choice of driven tokens that keeps one more stays within the limit.
    every = squares[driven].tolist()
    for more in combinations(every, len(kept) + 1):
        assert sum(more) > limit * len(more) * (1 - 1e-9)
    # The farthest go: nothing masked is nearer than anything kept.
    if len(kept) < len(every):
        assert kept.max(initial=0.0) <= squares[driven & ~keep].min()


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-3, 3)), max_size=12), st.randoms(use_true_random=False))
def test_masks_dont_depend_on_the_order_of_samples(tokens: list[tuple[int, float]], random) -> None:
    def kept(order: list[int]) -> dict[int, bool]:
        places = sorted(range(len(tokens)), key=lambda i: order[tokens[i][0]])
        weights = np.array([tokens[i][1] for i in places])
        samples = np.array([order[tokens[i][0]] for i in places], np.int64)
        return dict(zip(places, sequence_mask(weights, samples, (0.6, 1.7)).tolist(), strict=True))

    shuffled = list(range(5))
    random.shuffle(shuffled)
    means = [np.mean([w for s, w in tokens if s == sample] or [0.0]) for sample in range(5)]
    if min(abs(mean - edge) for mean in means for edge in np.log([0.6, 1.7])) > 1e-9:
        assert kept(list(range(5))) == kept(shuffled)


@pytest.mark.parametrize("limit", [1e-12, 0.04, 1e12])
def test_second_moment_of_huge_weights_is_finite(limit: float) -> None:
    keep = second_moment_mask(np.array([500.0, -500.0, 500.0]), np.array([1.0, 1.0, -1.0]), limit)
    assert keep.tolist() == [limit > 1, True, True]
