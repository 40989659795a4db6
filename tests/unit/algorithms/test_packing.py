"""Micro-batch plans: nothing lost, budget kept, never worse than AReaL's Algorithm 1."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.algorithms.packing import Plan, pack, pack_in_order

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


def loads(lengths: list[int], plan: Plan) -> list[int]:
    return [sum(lengths[i] for i in batch) for rank in plan for batch in rank]


def rank_loads(lengths: list[int], plan: Plan) -> list[int]:
    return [sum(lengths[i] for batch in rank for i in batch) for rank in plan]


@settings(deadline=None, max_examples=300)
@given(LENGTHS, st.integers(1, 80), st.integers(1, 4), st.sampled_from(["balanced", "areal"]))
def test_every_sequence_once_within_the_budget(lengths, budget, ranks, method) -> None:
    plan = pack(lengths, budget, ranks, method)
    batches = [batch for rank in plan for batch in rank]
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(batch == sorted(batch) for batch in batches)
    assert len(plan) == ranks
    assert len({len(rank) for rank in plan}) == 1
    for batch in batches:
        assert len(batch) <= 1 or sum(lengths[i] for i in batch) <= budget


@settings(deadline=None, max_examples=200)
@given(LENGTHS, st.integers(1, 80), st.integers(1, 4), st.sampled_from(["balanced", "areal"]))
def test_no_micro_batch_is_empty_on_every_rank(lengths, budget, ranks, method) -> None:
    plan = pack(lengths, budget, ranks, method)
    filled = [sum(1 for batch in rank if batch) for rank in plan]
    assert len(plan[0]) == max(1, *filled)
    if method == "areal":
        assert max(filled) - min(filled) <= 1


@settings(deadline=None, max_examples=400)
@given(LENGTHS, st.integers(1, 80))
def test_one_rank_never_worse_than_areal(lengths, budget) -> None:
    balanced, areal = pack(lengths, budget), pack(lengths, budget, method="areal")
    ours = (len(balanced[0]), max(loads(lengths, balanced)))
    theirs = (len(areal[0]), max(loads(lengths, areal)))
    assert ours <= theirs
    alone = sum(1 for length in lengths if length > budget)
    shared = sum(length for length in lengths if length <= budget)
    assert ours[0] >= max(1, alone + -(-shared // budget))


@settings(deadline=None, max_examples=300)
@given(LENGTHS, st.integers(1, 80), st.integers(2, 4))
def test_heaviest_rank_never_heavier_than_areals(lengths, budget, ranks) -> None:
    ours = max(rank_loads(lengths, pack(lengths, budget, ranks)))
    assert ours <= max(rank_loads(lengths, pack(lengths, budget, ranks, "areal")))


def test_differencing_finds_what_longest_first_misses() -> None:
    # Graham's example: longest first gives 8+6+6 and 7+7... here 4+5+6 | 7+8 is perfect, greedy makes 8+5+4 | 7+6.
    plan = pack([4, 5, 6, 7, 8], 15)
    assert sorted(loads([4, 5, 6, 7, 8], plan)) == [15, 15]


@pytest.mark.parametrize(
    ("lengths", "plan"),
    [([7, 7, 1, 5], [[0], [1], [2, 3]]), ([9, 8, 7, 5, 8], [[0], [1], [4], [2], [3]])],
)
def test_longest_first_at_the_lower_bound_is_the_plan(lengths, plan) -> None:
    # Differencing is as even here and puts the lightest first: a plan is a function of its lengths, for the replay too.
    assert pack(lengths, 9) == [plan]


def test_sequences_over_the_budget_stand_alone() -> None:
    plan = pack([100, 3, 200, 4], 10)
    assert sorted(plan[0]) == [[0], [1, 3], [2]]


def test_clearly_better_balanced_than_areal_on_skewed_lengths() -> None:
    lengths = np.random.default_rng(0).lognormal(3.0, 0.8, 256).astype(int).clip(1, 400).tolist()
    spread = {
        method: max(rank_loads(lengths, pack(lengths, 1024, 4, method))) / (sum(lengths) / 4)
        for method in ("balanced", "areal")
    }
    assert spread["balanced"] < 1.01 < spread["areal"]


def test_nothing_to_pack() -> None:
    assert pack([], 8) == [[[]]]
    assert pack([], 8, 3) == [[[]], [[]], [[]]]
    with pytest.raises(ValueError, match="budget"):
        pack([1], 0)


@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 4))
def test_fixed_micro_batches_take_sequences_in_order_and_evenly(sequences: int, micro_batch: int, ranks: int) -> None:
    plan = pack_in_order(sequences, micro_batch, ranks)
    batches = [batch for rank in plan for batch in rank]
    assert [i for batch in batches for i in batch] == list(range(sequences))
    assert len(plan) == ranks
    assert {len(rank) for rank in plan} == {max(1, -(-sequences // (micro_batch * ranks)))}
    sizes = [len(batch) for batch in batches]
    assert max(sizes) <= micro_batch
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("micro_batch", "ranks"), [(0, 1), (1, 0)])
def test_fixed_micro_batches_of_nothing_are_refused(micro_batch: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        pack_in_order(3, micro_batch, ranks)
