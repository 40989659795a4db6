"""Prefixes that samples share, to any depth: computed once, the same log-probabilities and gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from branching_batches import branching, distinct_prefixes
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_definition import gradient
from tiny_trainer import Context, make_batch, make_experiment, make_model
from torch.utils._python_dispatch import TorchDispatchMode

from headway.algorithms.prefix_tree import LEAST_SAVED
from headway.algorithms.samples import SampleArrays, build_arrays, prefix_tree, slice_micro_batch
from headway.config.schema import Checkpointing
from headway.models import decoder as decoder_module
from headway.models.attention import packed_attention, padded_attention
from headway.models.attention_plan import NOTHING, AttentionPlan
from headway.models.configuration import Scores
from headway.models.decoder import Decoder
from headway.trainer.service import TrainerService
from tests.conformance.reference import random_model
from tests.support.flash_stand_in import stand_in_attention

torch.set_num_threads(1)

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 6
PLAIN = Scores(scale=HEAD_DIM**-0.5)
KINDS = (PLAIN, Scores(scale=0.7, window=3), Scores(scale=0.7, window=5, softcap=2.0))
# Nodes by length and by which node, of those before, each continues (modulo; one that would be too deep begins anew).
NODES = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 10**6)), min_size=1, max_size=14)


def layout(nodes: list[tuple[int, int]], deepest: int = 6) -> tuple[list[int], list[int]]:
    """(lengths, continues) of random tries, in the order that `AttentionPlan.build` wants."""
    parents: list[int] = []
    depths: list[int] = []
    for number, (_, chance) in enumerate(nodes):
        parent = chance % (number + 1) - 1
        if parent >= 0 and depths[parent] == deepest:
            parent = NOTHING
        parents.append(parent)
        depths.append(1 if parent == NOTHING else depths[parent] + 1)
    order = [node for node, parent in enumerate(parents) if parent == NOTHING]
    for node in order:
        order.extend(child for child, parent in enumerate(parents) if parent == node)
    return [nodes[node][0] for node in order], [
        NOTHING if parents[node] == NOTHING else order.index(parents[node]) for node in order
    ]


def dense_attention(qkv: torch.Tensor, lengths: list[int], continues: list[int], kind: Scores) -> torch.Tensor:
    """The definition: one softmax under a mask of who may see whom."""
    piece = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    above = torch.zeros(len(lengths), len(lengths), dtype=torch.bool)
    for node, parent in enumerate(continues):
        while parent != NOTHING:
            above[node, parent] = True
            parent = continues[parent]
    order = torch.arange(len(piece))
    visible = (piece[:, None] == piece) & (order[:, None] >= order) | above[piece][:, piece]
    if kind.window is not None:
        positions = visible.sum(1) - 1
        visible &= positions[:, None] - positions < kind.window
    q, k, v = qkv.view(len(qkv), -1, HEAD_DIM).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("qhe,khe->hqk", q, k) * kind.scale
    if kind.softcap is not None:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
    return torch.einsum("hqk,khe->qhe", weights, v).flatten(1)


@pytest.mark.parametrize("attention", [packed_attention, padded_attention, stand_in_attention])
@settings(deadline=None, max_examples=40)
@given(nodes=NODES, kind=st.sampled_from(KINDS), seed=st.integers(0, 99))
def test_attention_and_its_gradient_match_one_masked_softmax(attention: Callable, nodes, kind, seed) -> None:
    lengths, continues = layout(nodes)
    generator = torch.Generator().manual_seed(seed)
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    qkv = 3 * torch.randn(sum(lengths), width, dtype=torch.float64, generator=generator)
    upstream = torch.randn(sum(lengths), HEADS * HEAD_DIM, dtype=torch.float64, generator=generator)
    qkv.requires_grad_()
    plan = AttentionPlan.build(lengths, continues=continues)
    places: list[list[int]] = []
    for length, parent in zip(lengths, continues, strict=True):
        first = places[parent][-1] + 1 if parent != NOTHING else 0
        places.append(list(range(first, first + length)))
    assert plan.positions_n.tolist() == [place for piece in places for place in piece]
    assert plan.longest == 1 + max(place for piece in places for place in piece)
    mine = attention(qkv, HEADS, KV_HEADS, HEAD_DIM, plan, kind)
    exact = dense_attention(qkv, lengths, continues, kind)
    torch.testing.assert_close(mine, exact, rtol=0, atol=1e-12)
    of_mine, of_exact = (torch.autograd.grad(out, qkv, upstream)[0] for out in (mine, exact))
    torch.testing.assert_close(of_mine, of_exact, rtol=0, atol=1e-11)


def random_rows(lengths: list[int], seed: int = 0) -> torch.Tensor:
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    return torch.randn(sum(lengths), width, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def test_a_window_that_covers_every_document_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest document is a chain of pieces; one token more than the window, and it is cut."""
    lengths, continues = [7, 4, 3, 1, 4], [NOTHING, NOTHING, 1, 1, 3]
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


class LargestTensor(TorchDispatchMode):
    """Notes the most values of a tensor that is made within the block."""

    values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple) else (made,):
            self.values = max(self.values, one.numel() if isinstance(one, torch.Tensor) else 0)
        return made


@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_a_shared_prefix_are_no_larger_than_what_is_packed(kind: Scores) -> None:
    """Whole documents need 24 copies of the prefix, made for a few at a time; the backward makes them again."""
    lengths, continues = [30, 20] + [2, 5, 9] * 8, [NOTHING, 0] + [1] * 24
    plan = AttentionPlan.build(lengths, continues=continues)
    rows = random_rows(lengths).detach().double().requires_grad_()
    assert sum(bucket.documents * bucket.length for bucket in plan.copies) > 7 * plan.tokens
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with LargestTensor() as largest:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = padded_attention(rows, HEADS, KV_HEADS, HEAD_DIM, plan, kind)
        out.square().sum().backward()
    scores = 0 if kind.softcap is None else HEADS * max(one.documents * one.length**2 for one in plan.copies)
    assert largest.values <= max(rows.numel(), scores)
    assert sum(kept.values()) == rows.untyped_storage().nbytes()
    exact = rows.detach().clone().requires_grad_()
    expected = dense_attention(exact, lengths, continues, kind)
    expected.square().sum().backward()
    assert rows.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(rows.grad, exact.grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_attended_in_float32(dtype: torch.dtype) -> None:
    lengths, continues = [7, 5, 3, 9, 2], [NOTHING, NOTHING, 1, 1, 3]
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
        ([-1, 2, 0], "piece 1 continues piece 2"),
        ([-1, 1], "piece 1 continues piece 1"),
        ([-1, 3], "continues piece 3"),
        ([-1, -2], "continues piece -2"),
    ],
)
def test_pieces_out_of_order_are_refused(continues: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionPlan.build([2] * len(continues), continues=continues)
    with pytest.raises(ValueError, match="2 pieces, but continues has 1 entries"):
        AttentionPlan.build([1, 1], continues=[-1])


def random_arrays(seed: int, groups: int, members: int, longest: int = 12) -> SampleArrays:
    return build_arrays(make_batch(seed, groups, members, longest=longest))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model") / "m")


def service(model: str, **trainer) -> TrainerService:
    return TrainerService(Context, experiment=make_experiment(model, Path("/nowhere"), trainer=trainer), run_id="test")


def logprobs_and_gradient(decoder: Decoder, arrays: SampleArrays, shared: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each loss token its log-probability, and the gradient of a random function of them all."""
    decoder.zero_grad()
    active = np.flatnonzero(np.bincount(np.repeat(np.arange(arrays.samples), arrays.lengths_s), arrays.loss_mask_n))
    batch = slice_micro_batch(arrays, active, prefix_tree(arrays, active, 1) if shared else None)
    hidden = decoder.forward_packed(torch.from_numpy(batch.input_ids), batch.input_lengths, batch.continues)
    logits = decoder.head(hidden[torch.from_numpy(batch.predictors_m)])
    targets = torch.from_numpy(arrays.token_ids_n[batch.targets_m])
    logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    weights = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(0)).to(logprobs.dtype)
    (logprobs * weights).sum().backward()
    return logprobs.detach(), torch.cat([p.grad.flatten() for p in decoder.parameters() if p.grad is not None])


def require_equal(decoder: Decoder, arrays: SampleArrays, tolerance: float) -> None:
    (alone, of_alone), (mine, of_mine) = (logprobs_and_gradient(decoder, arrays, shared) for shared in (False, True))
    torch.testing.assert_close(mine, alone, rtol=0, atol=tolerance * float(alone.abs().max()))
    torch.testing.assert_close(of_mine, of_alone, rtol=0, atol=tolerance * float(of_alone.abs().max()))


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("attention", [packed_attention, padded_attention, stand_in_attention])
@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2", "qwen3_moe"])
@settings(deadline=None, max_examples=6)
@given(seed=st.integers(0, 10**6), nodes=st.integers(1, 20))
def test_trees_have_the_logprobs_and_gradients_of_whole_documents(
    family: str, attention: Callable, checkpointing: Checkpointing, seed: int, nodes: int
) -> None:
    """Windows of 6 tokens, soft caps and experts too: float32 to 3e-5 of the largest (float64 to 1e-12: below)."""
    decoder = random_model(seed % 7, family=family)
    decoder.checkpointing = checkpointing
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder_module, "packed_attention", attention)
        require_equal(decoder, branching(seed, nodes, vocabulary=40), 3e-5)


def test_a_tree_is_exact_in_float64() -> None:
    require_equal(random_model(1).double(), branching(3, 20, vocabulary=40), 1e-12)


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        ("_path", lambda continues, piece: [piece]),  # a piece attends to the one it continues alone
        ("prefix_lengths", lambda lengths, continues: [0] * len(lengths)),  # positions begin anew
    ],
)
def test_a_wrong_tree_is_seen(monkeypatch: pytest.MonkeyPatch, place: str, wrong: Callable) -> None:
    """A planted fault: the comparison above isn't blind to it."""
    monkeypatch.setattr(f"headway.models.attention_plan.{place}", wrong)
    with pytest.raises(AssertionError):
        require_equal(random_model(1), branching(3, 20, vocabulary=40), 1e-5)


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), nodes=st.integers(1, 30), family=st.sampled_from(["qwen3", "gemma2"]))
def test_flops_are_those_of_the_distinct_prefixes(seed: int, nodes: int, family: str) -> None:
    """Counted by hand: a token of a trie is a distinct prefix, and attends to as many keys as that is long. What is
    left unshared, because it saves too little, is at most 5 % of what there is to save where turns have 200 tokens."""
    config = random_model(0, family=family).config
    windows = [config.layer(index).scores.window or 10**9 for index in range(config.layers)]
    per_token = 2 * sum(config.matmul_parameters(index) for index in range(config.layers))

    def counted(lengths: list[int]) -> float:
        pairs = sum(min(length, window) for window in windows for length in lengths)
        return per_token * len(lengths) + 4 * config.heads * config.head_dim * pairs

    for count, longest, least, tolerance in ((nodes, 6, 1, 0.0), (30, 400, LEAST_SAVED, 0.05)):
        arrays = branching(seed, count, longest=longest)
        everything = np.arange(arrays.samples)
        batch = slice_micro_batch(arrays, everything, prefix_tree(arrays, everything, least))
        apart = config.flops((arrays.lengths_s - 1).tolist(), 0)
        by_hand = apart - counted([len(prefix) for _, prefix in distinct_prefixes(arrays)])
        saved = apart - config.flops(batch.input_lengths, 0, batch.continues)
        assert abs(saved - by_hand) <= tolerance * by_hand


@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 10**6), budget=st.integers(1, 200), members=st.integers(1, 6))
def test_sharing_changes_no_gradient_and_computes_no_more(model: str, seed: int, budget: int, members: int) -> None:
    arrays = branching(seed, 4 * members, longest=20) if seed % 2 else random_arrays(seed, 4, members)
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
    kept, again = service(model), service(model, gradient_checkpointing="full")
    assert torch.equal(gradient(again, arrays), gradient(kept, arrays))
    calls: list[bool] = []
    for layer in again.learner.model.layers:
        layer.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    gradient(again, arrays)
    micro_batches = again.policy.accumulate_gradients(arrays).micro_batches
    assert len(calls) == 2 * 2 * 2 * micro_batches  # two layers, each forward and again, in both calls
