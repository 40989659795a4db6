"""Gradients of a decoder whose tokens and experts are divided among the ranks of a `RankPool`, and of one rank."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed
from torch import Tensor

from headway.models import lora
from headway.models.adapter_targets import AdaptedTarget, targets_of
from headway.models.decoder import Decoder
from headway.models.experts import ExpertReplay
from headway.models.parallel import context as context_module
from headway.models.parallel.context import ContextRanks, TargetShare
from headway.models.parallel.division import Division
from headway.models.parallel.exchange import RankGroup, _Exchange
from headway.models.parallel.experts import ExpertRanks
from tests.conformance.reference import random_model

EXPERTS = ("gate_up_weight", "down_weight")


@dataclass(frozen=True)
class Layout:
    """``ranks`` of which neighbours are a context group; an expert group's are neighbours, or of each context group
    one if ``crossed``."""

    ranks: int
    context: int = 1
    experts: int = 1
    crossed: bool = False

    def groups(self, size: int, crossed: bool) -> list[list[int]]:
        if crossed:
            step = self.ranks // size
            return [list(range(first, self.ranks, step)) for first in range(step)]
        return [list(range(first, first + size)) for first in range(0, self.ranks, size)]


@dataclass(frozen=True)
class Case:
    """A model and how its gradient is computed."""

    family: str = "qwen3"
    checkpointing: str = "none"
    loss: str = "token"  # or "sequence"
    shared: bool = False
    replay: bool = False
    adapter: bool = False
    dtype: str = "float32"
    batches: str = "uneven"  # or "short": fewer tokens than ranks; "late": all loss tokens are in one slice; "two experts": have all tokens


@dataclass(frozen=True)
class MicroBatch:
    ids: Tensor
    lengths: list[int]
    continues: list[int]
    predictors_m: np.ndarray
    targets_m: Tensor
    sequence_m: Tensor
    chosen: Tensor | None  # [N, layers, K]

    @classmethod
    def random(cls, seed: int, lengths: list[int], continues: list[int] | None, case: Case) -> MicroBatch:
        random = np.random.default_rng(seed)
        tokens = sum(lengths)
        predictors = np.arange(tokens) if case.batches == "short" else np.flatnonzero(random.random(tokens) < 0.8)
        if case.batches == "late":
            predictors = predictors[predictors > 0.8 * tokens]
        random.shuffle(predictors)  # with shared prefixes they don't ascend
        piece_n = np.repeat(np.arange(len(lengths)), lengths)
        chosen = random.random((tokens, 2, 4)).argsort(-1)[..., :2]
        chosen[random.random(tokens) < 0.2] = -1
        if case.batches == "two experts":
            chosen[:] = 0, 1
        return cls(
            ids=torch.from_numpy(random.integers(0, 40, tokens)),
            lengths=lengths,
            continues=continues or [-1] * len(lengths),
            predictors_m=predictors,
            targets_m=torch.from_numpy(random.integers(0, 40, len(predictors))),
            sequence_m=torch.from_numpy(piece_n[predictors]),
            chosen=torch.from_numpy(chosen) if case.replay else None,
        )

    @classmethod
    def without_targets(cls, replay: bool) -> MicroBatch:
        nothing = np.zeros(0, np.int64)
        unknown = torch.full((1, 2, 2), -1) if replay else None
        return cls(torch.zeros(1, dtype=torch.int64), [1], [-1], nothing, *[torch.from_numpy(nothing)] * 2, unknown)


def micro_batches(case: Case) -> list[MicroBatch]:
    """Five micro-batches of different sizes."""
    shapes: list[tuple[list[int], list[int] | None]] = [([9, 4, 17], None), ([3], None), ([30, 2, 2], None)]
    shapes += [([5, 6, 7, 8, 9], None), ([21, 20], None)]
    if case.shared:
        shapes = [([8, 3, 5, 4], [-1, 0, 0, 2]), ([11, 6, 2, 7, 9], [-1, -1, 0, 0, 1]), ([13], None), *shapes[:2]]
    if case.batches == "short":
        shapes = [([1], None), ([1, 1], None), ([3], None), ([1, 2], None)]
    return [MicroBatch.random(seed, *shape, case) for seed, shape in enumerate(shapes)]


def build(case: Case) -> tuple[Decoder, dict[str, torch.nn.Parameter]]:
    """The model, and an adapter's parameters."""
    model = random_model(3, family=case.family).to(getattr(torch, case.dtype))
    model.checkpointing = case.checkpointing
    if not case.adapter:
        return model, {}
    adapter = lora.Lora([AdaptedTarget(target=target, rank=2, alpha=3.0) for target in targets_of(model.config)], seed=5)
    for name, parameter in adapter.parameters.items():  # B isn't zero, so that A has gradients
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        parameter.data.normal_(0, 0.3, generator=generator)
    lora.use(model, adapter.layers)
    model.requires_grad_(False)
    return model, adapter.parameters


def loss_of(case: Case, logprobs_m: Tensor, batch: MicroBatch) -> Tensor:
    if not len(batch.targets_m):
        return 0 * logprobs_m.sum()
    weights_m = (batch.targets_m % 7 - 2).to(logprobs_m.dtype)
    if case.loss == "token":
        return (logprobs_m * weights_m).sum()
    means = logprobs_m.new_zeros(len(batch.lengths)).scatter_reduce(0, batch.sequence_m, logprobs_m, "mean")
    return ((means[batch.sequence_m] + 3).exp() * weights_m).sum()  # each token's ratio is that of its sequence


def accumulate(model: Decoder, case: Case, batches: list[MicroBatch]) -> list[float]:
    """The losses of the micro-batches, whose gradients are added up."""
    losses = []
    for batch in batches:
        replay = [] if batch.chosen is None else [ExpertReplay.of(batch.chosen)]
        hidden_nd = model.forward_packed(batch.ids, batch.lengths, batch.continues, *replay)
        context, share = model.division.context, None
        rows, targets = torch.from_numpy(batch.predictors_m), batch.targets_m
        if context is not None:
            share = context.share(batch.predictors_m, len(batch.ids), torch.device("cpu"))
            rows, targets = share.rows, targets[share.own]
        logits = model.head(hidden_nd.index_select(0, rows)).float()
        logprobs = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
        loss = loss_of(case, logprobs if share is None else share.gather(logprobs), batch)
        loss.backward()
        losses.append(float(loss.detach()))
    return losses


@functools.cache
def alone(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and gradients of one rank."""
    model, adapter = build(case)
    losses = accumulate(model, case, micro_batches(case))
    return losses, _gradients({**dict(model.named_parameters()), **adapter})


def divided(layout: Layout, case: Case, fault: str = "") -> tuple[list[float], dict[str, Tensor]]:
    """Losses of this rank's micro-batches, and the gradients of all ranks added up, on each of a `RankPool`'s ranks."""
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        model, adapter = build(case)
        division, expert_ranks, same_experts = _division(layout)
        model.divide(division)
        batches, copies = micro_batches(case), layout.ranks // layout.context
        while len(batches) % copies:
            batches.append(MicroBatch.without_targets(case.replay))
        copy = torch.distributed.get_rank() // layout.context
        losses = accumulate(model, case, batches[copy::copies])
        gradients = _gradients({**dict(model.named_parameters()), **adapter})
        for name, gradient in gradients.items():
            if layout.experts > 1 and name.endswith(EXPERTS):
                torch.distributed.all_reduce(gradient, group=same_experts)
                parts = [torch.empty_like(gradient) for _ in range(layout.experts)]
                torch.distributed.all_gather(parts, gradient, group=expert_ranks)
                gradients[name] = torch.cat(parts)
            else:
                torch.distributed.all_reduce(gradient)
    return losses, gradients if torch.distributed.get_rank() == 0 else {}


def _gradients(parameters: dict[str, Any]) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in parameters.items()
        if parameter.requires_grad
    }


@functools.cache
def _division(layout: Layout) -> tuple[Division, Any, Any]:
    """This rank's division, its expert group, and the group of the ranks that have the same experts."""
    context = _own_group(layout.groups(layout.context, False)) if layout.context > 1 else None
    experts = same_experts = None
    if layout.experts > 1:
        experts = _own_group(layout.groups(layout.experts, layout.crossed))
        same_experts = _own_group(layout.groups(layout.ranks // layout.experts, not layout.crossed))
    division = Division(
        context=None if context is None else ContextRanks(RankGroup(context)),
        experts=None if experts is None else ExpertRanks(RankGroup(experts)),
    )
    return division, experts, same_experts


def _own_group(groups: list[list[int]]) -> Any:
    made = [torch.distributed.new_group(ranks) for ranks in groups]
    rank = torch.distributed.get_rank()
    return next(group for group, ranks in zip(made, groups, strict=True) if rank in ranks)


# --- faults, by what is wrong ----------------------------------------------------------------------------------------


def _gather_sums() -> Any:
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone()
        torch.distributed.all_reduce(total)
        return total.index_select(0, ctx.own), None

    return patch.object(context_module._Gather, "backward", staticmethod(backward))


def _gather_detached_order() -> Any:
    def share(self: ContextRanks, *args: Any) -> TargetShare:
        shared = plain(self, *args)
        return shared._replace(order_m=torch.sort(shared.order_m).values)

    plain = ContextRanks.share
    return patch.object(ContextRanks, "share", share)


def _slices_begin_at_zero() -> Any:
    plain = Decoder.rope
    return patch.object(Decoder, "rope", lambda self, positions: plain(self, torch.arange(len(positions))))


def _copies_without_gradient() -> Any:
    def by_rank(part: Tensor, size: int) -> Tensor:
        rows, heads, head_dim = part.shape
        copies = max(1, size // heads)
        rest = [part[:, :, None].detach()] * (copies - 1)
        return torch.cat([part[:, :, None], *rest], 2).reshape(rows, size, -1 if rows else head_dim)

    return patch.object(context_module, "_by_rank", by_rank)


def _exchange_without_return() -> Any:
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        received, sent = ctx.back
        back = ctx.ranks.all_to_all(grads[0], received, sent)
        first = sum(sent[: ctx.ranks.rank])
        kept = torch.zeros_like(back)
        kept[first : first + sent[ctx.ranks.rank]] = back[first : first + sent[ctx.ranks.rank]]
        return kept, None, None, None

    return patch.object(_Exchange, "backward", staticmethod(backward))


def _exchange_averages() -> Any:
    plain = _Exchange.backward

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return plain(ctx, grads[0] / ctx.ranks.size)

    return patch.object(_Exchange, "backward", staticmethod(backward))


def _replay_of_the_first_rows() -> Any:
    def layer(self: ExpertReplay, index: int, rows: slice = slice(None)) -> ExpertReplay:
        count = len(self.chosen[rows])
        return ExpertReplay(self.chosen[:count, index], self.counts[index])

    return patch.object(ExpertReplay, "layer", layer)


@contextlib.contextmanager
def _own_loss() -> Iterator[None]:
    """Each rank's loss is of its own tokens: a sequence's mean is that of its part."""

    def gather(self: TargetShare, scores: Tensor) -> Tensor:
        mine = torch.zeros(len(self.order_m), dtype=scores.dtype)
        return mine.index_copy(0, self.own, scores)

    with patch.object(TargetShare, "gather", gather):
        yield


FAULTS: dict[str, Any] = {
    "gather sums": _gather_sums,
    "gather in the ranks' order": _gather_detached_order,
    "each rank has its own loss": _own_loss,
    "slices begin at position 0": _slices_begin_at_zero,
    "copied heads without gradient": _copies_without_gradient,
    "gradients aren't sent back": _exchange_without_return,
    "gradients are averaged": _exchange_averages,
    "replay of the first rows": _replay_of_the_first_rows,
}
