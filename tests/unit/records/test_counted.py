"""Counted sequences stand in for tuples of any length."""

from __future__ import annotations

import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.records.counted import (
    CountedTokens,
    Repeated,
    SampledMask,
    all_finite,
    sampled_mask,
    sampled_tokens,
    token_at,
    tokens_from,
)
from headway.records.rollout import Rollout
from headway.records.tokens import encoder


@given(seed=st.integers(-(2**63), 2**63), first=st.integers(0, 5000), count=st.integers(0, 3000))
def test_a_run_of_tokens_is_each_token(seed: int, first: int, count: int) -> None:
    assert tokens_from(seed, first, count) == tuple(token_at(seed, first + index) for index in range(count))


def test_they_behave_like_the_tuples_they_stand_for():
    tokens = CountedTokens.of(5, seed=7, last=1)
    plain = (*(token_at(7, index) for index in range(4)), 1)
    assert (len(tokens), tuple(tokens), tokens[0], tokens[-1], tokens[1:3]) == (5, plain, plain[0], 1, plain[1:3])
    assert bool(tokens)
    assert not CountedTokens.of(0, seed=7)
    assert 1 in tokens
    assert tuple(Repeated.of(-0.5, 3)) == (-0.5, -0.5, -0.5)
    with pytest.raises(IndexError):
        _ = tokens[5]


def test_joining_takes_no_memory_and_keeps_what_was_sampled():
    nothing: tuple[int, ...] = ()
    joined = nothing + CountedTokens.of(60_000, seed=3) + CountedTokens.of(40_000, seed=3, sampled=0)
    assert isinstance(joined, CountedTokens)
    assert (len(joined), joined.sampled) == (100_000, 60_000)
    assert joined[99_999] == token_at(3, 99_999)
    mask = sampled_mask(joined)
    assert isinstance(mask, SampledMask)
    assert (len(mask), sampled_tokens(mask)) == (100_000, 60_000)
    assert sampled_mask((4, 5)) == (True, True)
    logprobs = nothing + Repeated.of(-0.5, 60_000) + Repeated.of(-0.5, 40_000)
    assert len(logprobs) == 100_000
    assert operator.add((2, 3), CountedTokens.of(2, seed=0)) == (2, 3, token_at(0, 0), token_at(0, 1))


def test_values_that_are_not_finite_are_found():
    assert all_finite(Repeated.of(-0.5, 10**9))
    assert not all_finite(Repeated.of(float("nan"), 3))
    assert not all_finite((0.0, float("inf")))


def test_a_record_of_any_length_is_stored_in_a_few_bytes():
    ids = CountedTokens.of(100_000, seed=3)
    rollout = Rollout(group=0, member=0, prompt_ids=ids, response_ids=ids, response_mask=sampled_mask(ids))
    assert len(encoder().encode(rollout)) < 1000
