"""Faults of divided models, by what is wrong: each is planted in this process while its block runs."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed
from torch import Tensor

from headway.models.decoder import Decoder
from headway.models.experts import ExpertReplay
from headway.models.parallel import context as context_module
from headway.models.parallel.context import ContextRanks, TargetShare
from headway.models.parallel.exchange import _Exchange


def _gather_sums() -> Any:
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone()
        torch.distributed.all_reduce(total)
        return total.index_select(0, ctx.own), None

    return patch.object(context_module._Gather, "backward", staticmethod(backward))


def _gather_in_order_of_ranks() -> Any:
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


def _own_loss() -> Any:
    def gather(self: TargetShare, scores: Tensor) -> Tensor:  # a sequence's mean is that of this rank's part
        zeros = scores.new_zeros(len(self.order_m), *scores.shape[1:])
        return zeros.index_copy(0, self.own, scores)

    return patch.object(TargetShare, "gather", gather)


FAULTS: dict[str, Any] = {
    "gather sums": _gather_sums,
    "gather in the ranks' order": _gather_in_order_of_ranks,
    "each rank has its own loss": _own_loss,
    "slices begin at position 0": _slices_begin_at_zero,
    "copied heads without gradient": _copies_without_gradient,
    "gradients aren't sent back": _exchange_without_return,
    "gradients are averaged": _exchange_averages,
    "replay of the first rows": _replay_of_the_first_rows,
}
