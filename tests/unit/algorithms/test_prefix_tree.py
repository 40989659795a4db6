"""Sequences as tries: every token once, cut where sequences part, packed within the budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from branching_batches import branching, distinct_prefixes, fed
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.algorithms.packing import Method, Plan, pack
from headway.algorithms.prefix_tree import PrefixTree, _worth_sharing
from headway.algorithms.samples import SampleArrays, prefix_tree, slice_micro_batch
from headway.algorithms.shared_packing import pack_trees

SEEDS = st.integers(0, 10**6)


def documents(arrays: SampleArrays, tree: PrefixTree, chosen: Sequence[int]) -> list[list[int]]:
    """The tokens that each of ``chosen`` reads in the concatenation of all pieces of ``tree``."""
    pieces, sequences = tree.pieces, fed(arrays)
    laid = [
        token
        for one, start, length in zip(pieces.sequences_p, pieces.starts_p, pieces.lengths_p, strict=True)
        for token in sequences[chosen[one]][1][start : start + length]
    ]
    places = [np.arange(len(sequences[index][1])) for index in chosen]
    owners = [np.full(len(place), number) for number, place in enumerate(places)]
    rows = [pieces.rows(owner, place) for owner, place in zip(owners, places, strict=True)]
    assert sorted(set(np.concatenate(rows).tolist())) == list(range(len(laid)))
    return [[laid[row] for row in one] for one in rows]


@settings(deadline=None, max_examples=150)
@given(SEEDS, st.integers(1, 25), st.integers(1, 4), st.sampled_from([1, 3, 16]))
def test_a_trie_holds_every_sequence_and_every_distinct_prefix_once(seed, nodes, vocabulary, least) -> None:
    arrays = branching(seed, nodes, vocabulary=vocabulary)
    tree = prefix_tree(arrays, np.arange(nodes), least)
    chosen = np.random.default_rng(seed).permutation(nodes)[: 1 + seed % nodes].tolist()
    some = tree.take(chosen)
    pieces = some.pieces
    assert documents(arrays, some, chosen) == [list(fed(arrays)[index][1]) for index in chosen]
    assert some.tokens == pieces.lengths_p.sum() <= some.lengths_s.sum()
    if least == 1:
        everything = distinct_prefixes(arrays)
        sequences = [fed(arrays)[index] for index in chosen]
        here = {(group, tokens[: end + 1]) for group, tokens in sequences for end in range(len(tokens))}
        assert (tree.tokens, some.tokens) == (len(everything), len(here))
        branches = Counter(pieces.continues_p.tolist())
        assert all(count > 1 for piece, count in branches.items() if piece >= 0)  # cut where sequences part
    starts = [0 if of < 0 else pieces.starts_p[of] + pieces.lengths_p[of] for of in pieces.continues_p]
    assert pieces.starts_p.tolist() == starts
    assert not set(pieces.last_s.tolist()) & set(pieces.continues_p.tolist())


def test_a_prefix_is_what_sequences_of_a_group_begin_with() -> None:
    arrays = SampleArrays(
        token_ids_n=np.array([7, 8, 1, 2, 7, 8, 1, 3, 9, 7, 8, 1, 7, 8, 4, 4]),
        loss_mask_n=np.array([0, 1, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 0, 0, 1, 1], np.bool_),
        behaviour_logprobs_n=np.zeros(16, np.float32),
        advantages_n=np.zeros(16, np.float32),
        versions_n=np.zeros(16, np.int64),
        lengths_s=np.array([4, 5, 3, 4]),
        groups_s=np.array([0, 0, 1, 0]),
    )
    # The last token of a sample isn't fed: 7 8 1 | 7 8 1 3 | 7 8, the third of another group | 7 8 4.
    tree = prefix_tree(arrays, np.arange(4), 1)
    assert (tree.order_t.tolist(), tree.common_t.tolist(), tree.tokens) == ([1, 0, 3, 2], [0, 3, 2, 0], 7)
    batch = slice_micro_batch(arrays, [0, 1, 3], tree.take([0, 1, 3]))
    assert (batch.input_ids.tolist(), batch.input_lengths, batch.continues) == ([7, 8, 1, 3, 4], [2, 2, 1], [-1, 0, 0])
    # Three samples predict from row 1, two from row 2, each its own token.
    assert batch.predictors_m.tolist() == [0, 1, 2, 0, 1, 2, 3, 1, 4]
    assert arrays.token_ids_n[batch.targets_m].tolist() == [8, 1, 2, 8, 1, 3, 9, 4, 4]
    assert batch.sample_tokens == 3 + 4 + 3


@pytest.mark.parametrize(
    ("common", "kept"),
    [
        ([0, 10, 10], [0, 10, 10]),  # 2 x 10 saved
        ([0, 10], [0, 0]),
        ([0, 30, 33, 30, 34], [0, 30, 30, 30, 30]),  # chance agreement behind a prompt
        ([0, 10, 20, 30], [0, 0, 20, 20]),  # a branch every 10 tokens: what is near enough meets at one point
        ([0, 30, 20, 10], [0, 20, 20, 0]),
        ([0, 40, 0, 5, 0, 5, 5, 5, 5], [0, 40, 0, 0, 0, 5, 5, 5, 5]),
    ],
)
def test_only_branch_points_that_save_enough_are_kept(common: list[int], kept: list[int]) -> None:
    assert _worth_sharing(np.array(common), 16).tolist() == kept


def rank_tokens(plan: Plan, tree: PrefixTree) -> list[int]:
    return [sum(tree.take(batch).tokens for batch in rank) for rank in plan]


@settings(deadline=None, max_examples=150)
@given(SEEDS, st.integers(1, 40), st.integers(1, 150), st.integers(1, 4), st.sampled_from(["balanced", "areal"]))
def test_tries_are_packed_within_the_budget_and_never_worse(
    seed: int, nodes: int, budget: int, ranks: int, method: Method
) -> None:
    arrays = branching(seed, nodes, longest=20, groups=3)
    tree = prefix_tree(arrays, np.arange(nodes))
    plan = pack_trees(tree, budget, ranks, method)
    assert pack_trees(prefix_tree(arrays, np.arange(nodes)), budget, ranks, method) == plan
    batches = [batch for rank in plan for batch in rank]
    assert sorted(i for batch in batches for i in batch) == list(range(nodes))
    assert all(batch == sorted(batch) for batch in batches)
    assert len(plan) == ranks
    assert len({len(rank) for rank in plan}) == 1
    for batch in filter(None, batches):  # beyond the budget are a sequence and what it begins with, which is free
        assert tree.take(batch).tokens <= max(budget, *tree.lengths_s[batch])
    plain = pack(tree.lengths_s.tolist(), budget, ranks, method)
    assert max(rank_tokens(plan, tree)) <= max(rank_tokens(plain, tree))
    assert max(rank_tokens(plan, tree)) <= max(int(sum(tree.lengths_s[b].sum() for b in rank)) for rank in plain)


def one_level(families: int, prefix: int, own: int, members: int) -> PrefixTree:
    count = families * members
    common = np.where(np.arange(count) % members, prefix, 0)
    return PrefixTree(lengths_s=np.full(count, prefix + own), order_t=np.arange(count), common_t=common)


def test_tries_stay_together_on_one_rank_and_spread_over_many() -> None:
    tree = one_level(4, 100, 10, 8)
    assert sum(rank_tokens(pack_trees(tree, 400), tree)) == 4 * 180
    # Eight ranks and four tries: halves of a trie balance what whole ones can't.
    assert rank_tokens(pack_trees(tree, 400, 8), tree) == [140] * 8
    # A trie over the budget is split, but no further than needed: 3 x 100 + 80 tokens per family of 8.
    assert sum(rank_tokens(pack_trees(tree, 130), tree)) == 4 * (3 * 100 + 80)


def test_a_deep_trie_is_split_where_it_costs_least() -> None:
    """A trunk of 4 x 100 tokens, a branch of 20 off each of its points: 480 tokens, 400 or 300 in the halves that the
    budget allows, not 4 branches with all of the trunk in common each."""
    common = np.array([0, 300, 200, 100])
    tree = PrefixTree(lengths_s=np.array([420, 320, 220, 120]), order_t=np.arange(4), common_t=common)
    assert pack_trees(tree, 480) == [[[0, 1, 2, 3]]]
    plan = pack_trees(tree, 460)
    assert sorted(tree.take(batch).tokens for batch in plan[0]) == [120, 460]


def test_nothing_to_share_is_plain_packing() -> None:
    lengths = [5, 9, 3, 7, 7]
    assert pack_trees(PrefixTree.separate(np.array(lengths)), 12, 2) == pack(lengths, 12, 2)
    assert pack_trees(PrefixTree.separate(np.zeros(0, np.int64)), 8, 2) == [[[]], [[]]]
