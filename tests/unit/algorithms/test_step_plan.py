"""A step's plan: every sequence is on one rank, minibatches have equally many micro-batches on all, shares are sent."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_trainer import make_batch

from headway.algorithms.aggregation import Aggregation, weighting
from headway.algorithms.prefix_tree import PrefixTree
from headway.algorithms.samples import FlatBatch, SampleArrays, gather_tokens, lay_out, split_by_group
from headway.algorithms.step_plan import MicroBatchSize, divide, tree_of
from headway.config.schema import TrainerConfig
from headway.records.generation import VersionSpan
from headway.records.rollout import Branch, Sample
from headway.records.tokens import EXPERTS, KEPT, TokenRows
from headway.records.training import TrainBatch


@st.composite
def batches(draw: Any) -> TrainBatch:
    """Batches with branches, copies, samples without loss, rows and grammars; some are empty."""
    seed, groups, members = draw(st.integers(0, 99)), draw(st.integers(0, 5)), draw(st.integers(1, 4))
    random, samples = np.random.default_rng(seed), list[Sample]()
    for sample in make_batch(seed, groups, members, longest=9, masked=draw(st.booleans()) and seed % 5 == 0).samples:
        rollout = sample.rollout
        length = len(rollout.prompt_ids) + len(rollout.response_ids)
        kept = [sorted(random.choice(31, int(n), replace=False).tolist()) for n in random.integers(0, 4, length)]
        rows = {EXPERTS: TokenRows.of([[i % 4] for i in range(length)]), KEPT: TokenRows.of(kept, 4)}
        branches = tuple(
            Branch(prompt_ids=(1, 2, 3), response_ids=(4, 5, 6), response_logprobs=(-1.0, -2.0, -0.5),
                   response_mask=(True, False, True), versions=(VersionSpan(version=0, tokens=3),))
            for _ in range(int(random.integers(0, 3)))
        )  # fmt: skip
        grammars = {"g": ((0, 1),)} if random.random() < 0.5 else {}
        rollout = msgspec.structs.replace(rollout, branches=branches, token_rows=rows, grammars=grammars)
        samples.append(msgspec.structs.replace(sample, rollout=rollout, weight=float(random.choice([1.0, 0.5]))))
    return TrainBatch(step=3, samples=tuple(samples))


plans = st.fixed_dictionaries(
    {
        "micro_batch_tokens": st.integers(1, 60),
        "packing": st.sampled_from(["balanced", "areal", "fixed"]),
        "micro_batch_samples": st.integers(1, 4),
        "shared_prefix": st.booleans(),
        "optimizer_steps_per_batch": st.integers(1, 3),
    }
)


def equal_rows(share: TokenRows, complete: TokenRows, starts: Any, lengths: Any) -> bool:
    expected = complete.cut(starts, lengths)
    return share.lengths == expected.lengths and bool((share.values == expected.values).all())


@settings(max_examples=150, deadline=None)
@given(batch=batches(), ranks=st.integers(1, 5), keys=plans)
def test_every_sequence_is_on_one_rank_with_all_that_belongs_to_it(
    batch: TrainBatch, ranks: int, keys: dict[str, Any]
) -> None:
    laid_out, config = lay_out(batch), TrainerConfig(**keys)
    complete, sequences_by_rank = laid_out.arrays(), divide(laid_out, config, ranks)
    assert sorted(np.concatenate(sequences_by_rank).tolist()) == list(range(complete.samples))
    for sequences in sequences_by_rank:
        share = laid_out.take(sequences)
        arrays, idx_n = share.arrays(), gather_tokens(complete, sequences)
        for name in ("token_ids_n", "loss_mask_n", "behaviour_logprobs_n", "advantages_n", "versions_n"):
            assert (getattr(arrays, name) == getattr(complete, name)[idx_n]).all(), name
        for name in ("lengths_s", "groups_s", "weights_s", "branches_s", "rollout_tokens_s", "loss_tokens_s"):
            values_s = getattr(complete, name)
            assert values_s is None or (getattr(arrays, name) == values_s[sequences]).all(), name
        for kind, rows in complete.token_rows.items():
            lengths = complete.lengths_s[sequences]
            assert equal_rows(arrays.token_rows[kind], rows, complete.starts_s[sequences], lengths)
        ids = [(text, arrays.token_ids_n[first:stop].tolist()) for text, first, stop in arrays.grammars]
        owned = [g for g in complete.grammars if np.searchsorted(complete.starts_s, g[1], "right") - 1 in sequences]
        assert ids == [(text, complete.token_ids_n[first:stop].tolist()) for text, first, stop in owned]
        same = ("step", "samples", "tokens", "loss_tokens")
        assert [getattr(share, name) for name in same] == [getattr(laid_out, name) for name in same]


def micro_batches_by_rank(shares: list[FlatBatch], config: TrainerConfig, minibatch: int) -> list[Any]:
    """Each rank's (sequences, tree, micro-batches) of a minibatch."""
    size, trees = MicroBatchSize.of(config), list[Any]()
    for share in shares:
        arrays = share.arrays()
        sequences = split_by_group(arrays, config.optimizer_steps_per_batch)[minibatch]
        trees.append(tree_of(arrays, sequences, shares_prefixes=config.shared_prefix))
    needs = [sum(map(bool, size.pack(tree)[0])) for _, tree in trees]
    return [(sequences, tree, size.pack_equally(tree, lambda _: max(needs))) for sequences, tree in trees]


@settings(max_examples=150, deadline=None)
@given(batch=batches(), ranks=st.integers(1, 5), keys=plans)
def test_ranks_have_equally_many_micro_batches_and_empty_ones_only_where_needed(
    batch: TrainBatch, ranks: int, keys: dict[str, Any]
) -> None:
    laid_out, config = lay_out(batch), TrainerConfig(**keys)
    shares = [laid_out.take(sequences) for sequences in divide(laid_out, config, ranks)]
    minibatches = split_by_group(laid_out.arrays(), config.optimizer_steps_per_batch)
    for index, minibatch in enumerate(minibatches):
        planned, trained = micro_batches_by_rank(shares, config, index), 0
        assert len({len(micro_batches) for _, _, micro_batches in planned}) == 1
        for sequences, tree, micro_batches in planned:
            assert sorted(position for each in micro_batches for position in each) == list(range(len(sequences)))
            trained += len(sequences)
            for positions in filter(None, micro_batches):
                fed = tree.take(positions)  # copies of a sequence longer than the budget may share a micro-batch
                fits = fed.tokens <= max(config.micro_batch_tokens, int(fed.lengths_s.max()))
                assert len(positions) <= config.micro_batch_samples if config.packing == "fixed" else fits
            if not config.shared_prefix and config.packing != "areal":
                empty_count = sum(not positions for positions in micro_batches)
                assert empty_count == max(0, len(micro_batches) - len(sequences))
        assert trained == (laid_out.arrays().loss_tokens_s[minibatch] > 0).sum()


@settings(max_examples=60, deadline=None)
@given(batch=batches(), ranks=st.integers(1, 4), parts=st.integers(1, 3),
       kind=st.sampled_from(["token_mean", "fixed", "seq_mean_token_sum", "seq_mean_token_mean"]))  # fmt: skip
def test_weights_and_divisors_of_shares_are_those_of_the_batch(
    batch: TrainBatch, ranks: int, parts: int, kind: Aggregation
) -> None:
    laid_out = lay_out(batch)
    config = TrainerConfig(optimizer_steps_per_batch=parts, micro_batch_tokens=20)
    sequences_by_rank = divide(laid_out, config, ranks)

    def weights(arrays: SampleArrays, index: int) -> Any:
        return weighting(kind, arrays, split_by_group(arrays, parts)[index], max_response_tokens=9)

    shares = [laid_out.take(sequences).arrays() for sequences in sequences_by_rank]
    for index in range(len(split_by_group(laid_out.arrays(), parts))):
        complete = weights(laid_out.arrays(), index)
        assert sum(weights(share, index).total for share in shares) == pytest.approx(complete.total, rel=1e-12)
        for sequences, share in zip(sequences_by_rank, shares, strict=True):
            assert (weights(share, index).weights_s == complete.weights_s[sequences]).all()


def test_a_rank_with_fewer_sequences_spreads_them_and_adds_empty_micro_batches() -> None:
    size = MicroBatchSize(packing="balanced", tokens=10, samples=None)
    tree = PrefixTree.separate(np.array([4, 3, 2]))
    assert size.pack_equally(tree, lambda count: count) == [[0, 1, 2]]
    assert size.pack_equally(tree, lambda _: 2) == [[0], [1, 2]]
    assert size.pack_equally(tree, lambda _: 5) == [[0], [1], [2], [], []]
    assert size.pack_equally(PrefixTree.separate(np.zeros(0, np.int64)), lambda _: 2) == [[], []]
