"""Which rank has which tokens, loss tokens, heads and experts: all are computed, and none twice but copied heads."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.models.experts import ExpertReplay
from headway.models.parallel.context import ContextRanks, _by_rank
from headway.models.parallel.divisors import heads_of_rank, require_divisible, require_heads
from headway.models.parallel.experts import ExpertRanks
from headway.records.errors import ConfigurationError
from tests.conformance.reference import random_model

CPU = torch.device("cpu")


def contexts(size: int) -> list[ContextRanks]:
    return [ContextRanks(cast("Any", SimpleNamespace(rank=rank, size=size))) for rank in range(size)]


@given(tokens=st.integers(1, 200), size=st.integers(1, 9))
def test_every_token_is_one_ranks_and_every_rank_has_one(tokens: int, size: int) -> None:
    ranks = contexts(size)
    counts = ranks[0].counts(tokens)
    slices = [context.rows(tokens) for context in ranks]
    assert [part.stop - part.start for part in slices] == counts
    assert min(counts) >= 1
    assert max(counts) - min(counts) <= 1
    ids, lengths = ranks[0].padded(torch.arange(tokens), [1] * (tokens - 1) + [1])
    assert sum(counts) == sum(lengths) == len(ids) == max(tokens, size)
    assert lengths[: tokens - 1] == [1] * (tokens - 1)  # the last piece alone is longer
    assert torch.cat([ids[part] for part in slices]).tolist() == [*range(tokens), *[0] * (len(ids) - tokens)]


@given(data=st.data(), tokens=st.integers(1, 60), size=st.integers(1, 6))
def test_every_loss_token_is_scored_by_the_rank_of_its_predictor(data: st.DataObject, tokens: int, size: int) -> None:
    predictors = np.array(data.draw(st.lists(st.integers(0, tokens - 1), max_size=80)), np.int64)  # may be shared
    shares = [context.share(predictors, tokens, CPU) for context in contexts(size)]
    assert sorted(torch.cat([share.own for share in shares]).tolist()) == list(range(len(predictors)))
    for context, share in zip(contexts(size), shares, strict=True):
        span = context.rows(tokens)
        assert (share.rows + span.start).tolist() == predictors[share.own.numpy()].tolist()
        assert ((share.rows >= 0) & (share.rows < span.stop - span.start)).all()
        assert share.counts == [len(other.own) for other in shares]
        assert torch.equal(share.order_m, torch.cat([other.own for other in shares]))


@given(groups=st.integers(1, 8), kv_heads=st.integers(1, 8), ranks=st.integers(1, 64))
def test_ranks_divide_heads_where_each_has_all_it_needs(groups: int, kv_heads: int, ranks: int) -> None:
    heads = groups * kv_heads
    kv_of_head = np.repeat(np.arange(kv_heads), groups)  # the head of keys and values that a query head needs
    needed = [Counter(part.tolist()) for part in np.array_split(kv_of_head, ranks)]
    is_even = heads % ranks == 0 and len({(len(counts), *counts.values()) for counts in needed}) == 1
    if not is_even or len(set(needed[0].values())) > 1:
        with pytest.raises(ConfigurationError, match=f"trainer.context_parallel = {ranks}: {heads} query heads"):
            require_heads(heads, kv_heads, ranks)
        return
    require_heads(heads, kv_heads, ranks)
    own_heads, own_kv_heads = heads_of_rank(heads, ranks), heads_of_rank(kv_heads, ranks)
    computed_q = _by_rank(torch.from_numpy(kv_of_head)[None, :, None], ranks)[0]  # [ranks, own heads]
    computed_kv = _by_rank(torch.arange(kv_heads)[None, :, None], ranks)[0]
    assert computed_q.shape == (ranks, own_heads)
    assert computed_kv.shape == (ranks, own_kv_heads)
    for q, kv in zip(computed_q, computed_kv, strict=True):
        assert torch.equal(q, kv.repeat_interleave(own_heads // own_kv_heads))  # as attention groups them


def test_heads_that_would_need_copies_are_refused_where_copies_are_impossible() -> None:
    require_heads(4, 2, 4)
    with pytest.raises(ConfigurationError, match=r"context_parallel = 4: 4 query heads and 2 .*; valid: 1, 2$"):
        require_heads(4, 2, 4, copied=False)


@pytest.mark.parametrize(
    ("family", "ranks", "message"),
    [
        ("qwen3", {"context": 3}, "trainer.context_parallel = 3: 4 query heads and 2 key/value heads can't be divided"),
        (
            "qwen3_moe",
            {"experts": 3},
            "trainer.expert_parallel = 3: 4 experts can't be divided among 3 ranks; valid: 1, 2, 4",
        ),
        ("qwen3", {"experts": 2}, "trainer.expert_parallel = 2: the model has no experts; valid: 1"),
    ],
)
def test_a_decoder_that_ranks_cannot_divide_is_refused_by_name(
    family: str, ranks: dict[str, int], message: str
) -> None:
    config = random_model(1, family=family).config
    with pytest.raises(ConfigurationError, match=message):
        require_divisible(config, **ranks)
    require_divisible(config, context=4)


@given(count=st.integers(1, 9), size=st.integers(1, 9))
def test_every_expert_is_one_ranks(count: int, size: int) -> None:
    groups = [SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: size) for rank in range(size)]
    ranks = [ExpertRanks(cast("Any", SimpleNamespace(get_group=lambda group=group: group))) for group in groups]
    spans = [experts.rows(count * size) for experts in ranks]
    assert [index for span in spans for index in range(span.start, span.stop)] == list(range(count * size))


def test_a_padded_replay_knows_nothing_of_further_tokens() -> None:
    chosen = torch.arange(12, dtype=torch.int16).view(2, 3, 2)
    padded = ExpertReplay.of(chosen).padded(5).chosen
    assert torch.equal(padded[:2], chosen)
    assert (padded[2:] == -1).all()
    assert padded.shape == (5, 3, 2)
