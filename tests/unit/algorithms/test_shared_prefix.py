"""Prefixes that samples share: computed once, the same gradient, packed within the budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_definition import gradient
from tiny_trainer import Context, make_batch, make_experiment, make_model

from headway.algorithms.packing import Plan, pack
from headway.algorithms.samples import MicroBatchArrays, SampleArrays, build_arrays, shared_prefixes, slice_micro_batch
from headway.algorithms.shared_packing import computed_tokens, pack_families
from headway.models.attention import _attend_whole, packed_attention, padded_attention
from headway.models.attention_plan import NOTHING, AttentionPlan
from headway.models.configuration import Scores
from headway.trainer.service import TrainerService

torch.set_num_threads(1)

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 6
PLAIN = Scores(scale=HEAD_DIM**-0.5)
KINDS = (PLAIN, Scores(scale=0.7, window=3), Scores(scale=0.7, window=5, softcap=2.0))
FAMILIES = st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 9), min_size=1, max_size=4)), max_size=4)


def layout(whole: list[int], families: list[tuple[int, list[int]]]) -> tuple[list[int], list[int]]:
    """(lengths, continues) of whole documents, prefixes and their continuations (empty ones left out)."""
    lengths = whole + [prefix for prefix, _ in families]
    continues = [NOTHING] * len(lengths)
    for number, (_, own) in enumerate(families):
        rest = [length for length in own if length]
        lengths += rest
        continues += [len(whole) + number] * len(rest)
    return lengths, continues


def dense_attention(qkv: torch.Tensor, lengths: list[int], continues: list[int], kind: Scores) -> torch.Tensor:
    """The definition: one softmax under a mask of who may see whom."""
    piece = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    parent = torch.tensor(continues)[piece]
    order = torch.arange(len(piece))
    visible = (piece[:, None] == piece) & (order[:, None] >= order) | (parent[:, None] == piece)
    if kind.window is not None:
        positions = AttentionPlan.build(lengths, continues=continues).positions_n
        visible &= positions[:, None] - positions < kind.window
    q, k, v = qkv.view(len(qkv), -1, HEAD_DIM).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("qhe,khe->hqk", q, k) * kind.scale
    if kind.softcap is not None:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
    return torch.einsum("hqk,khe->qhe", weights, v).flatten(1)


@pytest.mark.parametrize("attention", [packed_attention, padded_attention])
@settings(deadline=None, max_examples=25)
@given(
    whole=st.lists(st.integers(1, 12), max_size=3),
    families=FAMILIES,
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 99),
)
def test_attention_and_its_gradient_match_one_masked_softmax(attention: Callable, whole, families, kind, seed) -> None:
    lengths, continues = layout(whole, families)
    if not lengths:
        return
    generator = torch.Generator().manual_seed(seed)
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    qkv = 3 * torch.randn(sum(lengths), width, dtype=torch.float64, generator=generator)
    upstream = torch.randn(sum(lengths), HEADS * HEAD_DIM, dtype=torch.float64, generator=generator)
    qkv.requires_grad_()
    plan = AttentionPlan.build(lengths, continues=continues)
    assert plan.positions_n.tolist() == [
        i + (lengths[of] if of >= 0 else 0) for n, of in zip(lengths, continues, strict=True) for i in range(n)
    ]
    mine = attention(qkv, HEADS, KV_HEADS, HEAD_DIM, plan, kind)
    exact = dense_attention(qkv, lengths, continues, kind)
    torch.testing.assert_close(mine, exact, rtol=0, atol=1e-12)
    of_mine, of_exact = (torch.autograd.grad(out, qkv, upstream)[0] for out in (mine, exact))
    torch.testing.assert_close(of_mine, of_exact, rtol=0, atol=1e-11)


def random_rows(lengths: list[int], seed: int = 0) -> torch.Tensor:
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    return torch.randn(sum(lengths), width, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_a_window_that_covers_every_document_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest document is a prefix with what continues it; one token more than the window, and it is cut."""
    lengths, continues = layout([7], [(5, [3, 4])])
    rows, plan = random_rows(lengths), AttentionPlan.build(lengths, continues=continues)
    assert plan.longest == 9
    assert AttentionPlan.build([2, 4]).longest == 4
    calls: list[Scores] = []

    def watched(*args: Any) -> torch.Tensor:
        calls.append(args[-1])
        return padded_attention(*args)

    monkeypatch.setattr("headway.models.attention.padded_attention", watched)
    plain, covered, cut = (
        packed_attention(rows, HEADS, KV_HEADS, HEAD_DIM, plan, Scores(scale=PLAIN.scale, window=window))
        for window in (None, 9, 8)
    )
    assert torch.equal(covered, plain)
    assert calls == [Scores(scale=PLAIN.scale, window=8)]
    assert not torch.allclose(cut, plain, atol=1e-3)
    torch.testing.assert_close(cut, dense_attention(rows, lengths, continues, calls[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_prefix_is_not_kept_for_each_of_its_continuations(kind: Scores) -> None:
    """Whole documents need 8 copies of the prefix; the backward makes them again, and the gradient is the same."""
    lengths, continues = layout([], [(50, [2] * 8)])
    plan = AttentionPlan.build(lengths, continues=continues)
    sizes = (HEADS, KV_HEADS, HEAD_DIM)
    gradients, kept_bytes = [], []
    for again in (True, False):
        rows = random_rows(lengths)
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = padded_attention(rows, *sizes, plan, kind) if again else _attend_whole(rows, sizes, plan, kind)
        kept_bytes.append(sum(kept.values()))
        out.square().sum().backward()
        assert rows.grad is not None
        gradients.append(rows.grad)
    assert torch.equal(gradients[0], gradients[1])
    packed_bytes = rows.untyped_storage().nbytes()
    assert kept_bytes[0] <= packed_bytes < 5 * packed_bytes < kept_bytes[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_attended_in_float32(dtype: torch.dtype) -> None:
    lengths, continues = layout([7], [(5, [3, 9])])
    exact = torch.randn(sum(lengths), (HEADS + 2 * KV_HEADS) * HEAD_DIM).to(dtype)
    plan = AttentionPlan.build(lengths, continues=continues)
    found = []
    for rows in (exact, exact.float()):
        leaf = rows.clone().requires_grad_()
        out = packed_attention(leaf, HEADS, KV_HEADS, HEAD_DIM, plan, PLAIN)
        out.sum().backward()
        assert leaf.grad is not None
        found.append((out.detach().to(dtype), leaf.grad.to(dtype)))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("continues", "message"),
    [
        ([-1, 0, -1], "piece 2 continues piece -1"),
        ([-1, -1, 0, 1, 0], "piece 4 continues piece 0"),
        ([-1, 0, 1], "piece 2 continues piece 1"),
        ([-1, 3], "continues piece 3"),
        ([-1, -2], "continues piece -2"),
    ],
)
def test_pieces_out_of_order_are_refused(continues: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionPlan.build([2] * len(continues), continues=continues)
    with pytest.raises(ValueError, match="2 pieces, but 1"):
        AttentionPlan.build([1, 1], continues=[-1])


def fed_tokens(batch: MicroBatchArrays) -> list[list[int]]:
    """The documents of a micro-batch, prefixes written out."""
    pieces = [part.tolist() for part in np.split(batch.input_ids, np.cumsum(batch.input_lengths)[:-1])]
    whole = [i for i, of in enumerate(batch.continues) if of < 0 and i not in batch.continues]
    continued = [i for i, of in enumerate(batch.continues) if of >= 0]
    return [pieces[i] for i in whole] + [pieces[batch.continues[i]] + pieces[i] for i in continued]


def random_arrays(seed: int, groups: int, members: int, longest: int = 12) -> SampleArrays:
    return build_arrays(make_batch(seed, groups, members, longest=longest))


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 5), st.integers(1, 12))
def test_a_shared_layout_holds_the_same_documents_and_predictions(seed, groups, members, longest) -> None:
    arrays = random_arrays(seed, groups, members, longest)
    active = np.flatnonzero(np.bincount(np.repeat(np.arange(arrays.samples), arrays.lengths_s), arrays.loss_mask_n))
    random = np.random.default_rng(seed)
    prefixes = shared_prefixes(arrays, active)
    kept = random.random(len(active)) < 0.8  # a group need not be whole in a micro-batch
    order = random.permutation(np.flatnonzero(kept))
    if not order.size:
        return
    plain = slice_micro_batch(arrays, active[order])
    shared = slice_micro_batch(arrays, active[order], prefixes[order])
    assert np.array_equal(shared.targets_m, plain.targets_m)
    assert np.array_equal(shared.input_ids[shared.predictors_m], plain.input_ids[plain.predictors_m])
    documents = fed_tokens(shared)
    # Members that feed nothing beyond the prefix are no documents of their own.
    assert all(document in fed_tokens(plain) for document in documents)
    plan = AttentionPlan.build(shared.input_lengths, continues=shared.continues)
    sample = np.repeat(np.arange(arrays.samples), arrays.lengths_s)[shared.targets_m]
    places = shared.targets_m - arrays.starts_s[sample] - 1
    assert plan.positions_n[torch.from_numpy(shared.predictors_m)].tolist() == places.tolist()
    assert shared.sample_tokens == plain.sample_tokens == len(plain.input_ids) >= len(shared.input_ids)
    costs = [(arrays.lengths_s - 1)[active].tolist(), arrays.groups_s[active].tolist(), prefixes.tolist()]
    assert len(shared.input_ids) == computed_tokens(order.tolist(), *costs)


def test_a_prefix_is_what_all_of_the_group_begin_with() -> None:
    arrays = SampleArrays(
        token_ids_n=np.array([7, 8, 1, 2, 7, 8, 1, 3, 9, 7, 8, 1]),
        loss_mask_n=np.array([0, 1, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1], np.bool_),
        behaviour_logprobs_n=np.zeros(12, np.float32),
        advantages_n=np.zeros(12, np.float32),
        versions_n=np.zeros(12, np.int64),
        lengths_s=np.array([4, 5, 3]),
        groups_s=np.array([0, 0, 1]),
    )
    # The last token of a sample isn't fed: 7 8 1 | 7 8 1 3 | 7 8, the third of another group.
    assert shared_prefixes(arrays, np.arange(3)).tolist() == [3, 3, 0]
    batch = slice_micro_batch(arrays, [0, 1], np.array([3, 3]))
    assert (batch.input_ids.tolist(), batch.input_lengths, batch.continues) == ([7, 8, 1, 3], [3, 1], [-1, 0])
    assert batch.predictors_m.tolist() == [0, 1, 2, 0, 1, 2, 3]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model") / "m")


def service(model: str, **trainer) -> TrainerService:
    return TrainerService(Context, experiment=make_experiment(model, Path("/nowhere"), trainer=trainer), run_id="test")


def gradient64(trainer: TrainerService, arrays: SampleArrays, shared: bool) -> torch.Tensor:
    """Gradient in float64 of a random function of the hidden states that predict each loss token."""
    decoder = trainer.learner.model.double()
    decoder.zero_grad()
    active = np.flatnonzero(np.bincount(np.repeat(np.arange(arrays.samples), arrays.lengths_s), arrays.loss_mask_n))
    prefixes = shared_prefixes(arrays, active) if shared else None
    batch = slice_micro_batch(arrays, active, prefixes)
    hidden = decoder.forward_packed(torch.from_numpy(batch.input_ids), batch.input_lengths, batch.continues)
    logits = decoder.head(hidden[torch.from_numpy(batch.predictors_m)]).log_softmax(-1)
    (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    return torch.cat([p.grad.flatten() for p in decoder.parameters() if p.grad is not None])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_shared_and_unshared_gradients_are_equal_in_float64(model: str, checkpointing: bool) -> None:
    trainer = service(model, gradient_checkpointing=checkpointing)
    for seed, members in ((0, 1), (1, 4), (2, 8)):
        arrays = random_arrays(seed, 3, members)
        apart = gradient64(trainer, arrays, False)
        torch.testing.assert_close(gradient64(trainer, arrays, True), apart, rtol=1e-12, atol=1e-12 * apart.abs().max())


@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 10**6), budget=st.integers(1, 200), members=st.integers(1, 6))
def test_sharing_changes_no_gradient_and_computes_no_more(model: str, seed: int, budget: int, members: int) -> None:
    arrays = random_arrays(seed, 4, members)
    apart, together = (service(model, micro_batch_tokens=budget, shared_prefix=on) for on in (False, True))
    assert torch.allclose(gradient(together, arrays), gradient(apart, arrays), atol=1e-5, rtol=0)
    one, other = (s.policy.accumulate_gradients(arrays) for s in (apart, together))
    assert (one.tokens, one.computed_tokens) == (other.tokens, one.tokens)
    assert other.computed_tokens <= one.computed_tokens
    assert other.flops <= one.flops


def test_a_group_in_one_micro_batch_computes_its_prompt_once(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = service(model, micro_batch_tokens=1000)
    arrays = random_arrays(3, 2, 5)
    seen: list[int] = []
    forward = trainer.learner.model.forward_packed

    def counted(ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(len(ids))
        return forward(ids, *rest)

    monkeypatch.setattr(trainer.learner.model, "forward_packed", counted)
    progress = trainer.policy.accumulate_gradients(arrays)
    trainer.policy._logprobs_of_batch(arrays, trainer.learner.model, progress)
    assert seen[0] == seen[1] == progress.computed_tokens < progress.tokens


def test_gradient_checkpointing_gives_the_same_gradient(model: str) -> None:
    arrays = random_arrays(5, 3, 4)
    kept, again = service(model), service(model, gradient_checkpointing=True)
    assert torch.equal(gradient(again, arrays), gradient(kept, arrays))
    calls: list[bool] = []
    for layer in again.learner.model.layers:
        layer.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    gradient(again, arrays)
    micro_batches = again.policy.accumulate_gradients(arrays).micro_batches
    assert len(calls) == 2 * 2 * 2 * micro_batches  # two layers, each forward and again, in both calls


def families_of(draw_lengths: list[tuple[int, list[int]]]) -> tuple[list[int], list[int], list[int]]:
    """(lengths, families, prefixes) of families given as (prefix, what each member adds)."""
    rows = [
        (prefix + own if len(members) > 1 else max(1, prefix + own), family, prefix if len(members) > 1 else 0)
        for family, (prefix, members) in enumerate(draw_lengths)
        for own in members
    ]
    lengths, families, prefixes = ([row[i] for row in rows] for i in range(3))
    return lengths, families, prefixes


def rank_tokens(plan: Plan, *sequences: list[int]) -> list[int]:
    return [sum(computed_tokens(batch, *sequences) for batch in rank) for rank in plan]


@settings(deadline=None, max_examples=100)
@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.lists(st.integers(0, 40), min_size=1, max_size=8)), min_size=1, max_size=8
    ),
    st.integers(1, 150),
    st.integers(1, 4),
    st.sampled_from(["balanced", "areal"]),
)
def test_families_are_packed_within_the_budget_and_never_worse(drawn, budget, ranks, method) -> None:
    sequences = families_of(drawn)
    lengths = sequences[0]
    plan = pack_families(*sequences, budget, ranks, method)
    batches = [batch for rank in plan for batch in rank]
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(batch == sorted(batch) for batch in batches)
    assert len(plan) == ranks
    assert len({len(rank) for rank in plan}) == 1
    for batch in batches:
        assert len(batch) <= 1 or computed_tokens(batch, *sequences) <= budget
    plain = pack(lengths, budget, ranks, method)
    assert max(rank_tokens(plan, *sequences)) <= max(rank_tokens(plain, *sequences))
    assert max(rank_tokens(plan, *sequences)) <= max(sum(lengths[i] for b in rank for i in b) for rank in plain)


def test_families_stay_together_on_one_rank_and_spread_over_many() -> None:
    sequences = families_of([(100, [10] * 8)] * 4)
    assert sum(rank_tokens(pack_families(*sequences, 400), *sequences)) == 4 * 180
    # Eight ranks and four families: halves of a family balance what whole families can't.
    assert rank_tokens(pack_families(*sequences, 400, 8), *sequences) == [140] * 8
    # A family over the budget is split, but no further than needed: 3 x 100 + 80 tokens per family of 8.
    assert sum(rank_tokens(pack_families(*sequences, 130), *sequences)) == 4 * (3 * 100 + 80)


def test_nothing_to_share_is_plain_packing() -> None:
    lengths = [5, 9, 3, 7, 7]
    assert pack_families(lengths, [0, 0, 1, 2, 2], [0] * 5, 12, 2) == pack(lengths, 12, 2)
    assert pack_families([], [], [], 8, 2) == [[[]], [[]]]
