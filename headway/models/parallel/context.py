"""Context parallelism: ranks divide the tokens of a micro-batch, and in attention its heads (DeepSpeed Ulysses, Jacobs
et al. 2023, arXiv 2309.14509).

Attention sees the complete pack, so that its plan, windows, soft caps and shared prefixes are those of one rank.

Shape suffixes: n packed tokens of this rank, N of all ranks, c ranks, h query heads, g key/value heads, e head
dimension, m loss tokens of the micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from headway.models.attention import packed_attention
from headway.models.attention_plan import AttentionPlan
from headway.models.configuration import Scores
from headway.models.parallel.divisors import heads_of_rank
from headway.models.parallel.exchange import RankGroup


class ContextRanks:
    """Ranks that are given the same micro-batches, of which each computes a slice of the tokens."""

    def __init__(self, ranks: RankGroup) -> None:
        self.ranks = ranks

    def padded(self, ids_n: Tensor, lengths: list[int]) -> tuple[Tensor, list[int]]:
        """The token ids and lengths of a micro-batch of at least one token for each rank. Fewer are padded behind the
        last piece, which no other continues; they have no targets, and no token sees them."""
        missing = max(0, self.ranks.size - len(ids_n))
        return functional.pad(ids_n, (0, missing)), [*lengths[:-1], lengths[-1] + missing]

    def counts(self, tokens: int) -> list[int]:
        """The tokens of each rank: equally many or one more, and at least one."""
        size = self.ranks.size
        tokens = max(tokens, size)
        return [tokens * (rank + 1) // size - tokens * rank // size for rank in range(size)]

    def rows(self, tokens: int) -> slice:
        """The packed rows that this rank computes."""
        counts = self.counts(tokens)
        first = sum(counts[: self.ranks.rank])
        return slice(first, first + counts[self.ranks.rank])

    def attention(
        self, qkv: Tensor, heads: int, kv_heads: int, head_dim: int, plan: AttentionPlan, scores: Scores
    ) -> Tensor:
        """`packed_attention` of all ranks' tokens, from and to this rank's rows: [n, (Hq+2Hkv)*Dh] to [n, Hq*Dh]."""
        parts = qkv.view(len(qkv), -1, head_dim).split((heads, kv_heads, kv_heads), dim=1)
        all_qkv = self._gather(parts, plan.tokens)
        own_heads, own_kv_heads = (heads_of_rank(count, self.ranks.size) for count in (heads, kv_heads))
        out = packed_attention(all_qkv, own_heads, own_kv_heads, head_dim, plan, scores)
        return self.scatter_tokens(out, plan.tokens)

    def gather_tokens(self, parts: Sequence[Tensor], tokens: int) -> list[Tensor]:
        """This rank's heads of all tokens, each part [N, own heads, e], from all heads of this rank's tokens, each part
        [n, heads, e]. A part with fewer heads than ranks is copied, so that each rank has one of its heads."""
        counts = [heads_of_rank(part.shape[1], self.ranks.size) for part in parts]
        widths = [count * part.shape[2] for count, part in zip(counts, parts, strict=True)]
        joint_parts = self._gather(parts, tokens).split(widths, dim=1)
        return [part.unflatten(1, (count, -1)) for count, part in zip(counts, joint_parts, strict=True)]

    def _gather(self, parts: Sequence[Tensor], tokens: int) -> Tensor:
        """`gather_tokens` with the parts side by side, [N, w]."""
        rows, counts = len(parts[0]), self.counts(tokens)
        by_rank = torch.cat([_by_rank(part, self.ranks.size) for part in parts], dim=2)
        return self.ranks.exchange(by_rank.transpose(0, 1).flatten(0, 1), [rows] * self.ranks.size, counts)

    def scatter_tokens(self, out: Tensor, tokens: int) -> Tensor:
        """All heads of this rank's tokens, [n, c*w], from this rank's heads of all tokens, [N, w]."""
        counts = self.counts(tokens)
        rows, size = counts[self.ranks.rank], self.ranks.size
        out_cnw = self.ranks.exchange(out, counts, [rows] * size).view(size, rows, out.shape[1])
        return out_cnw.transpose(0, 1).flatten(1)

    def share(self, predictors_m: np.ndarray, tokens: int, device: torch.device) -> TargetShare:
        """This rank's part of the loss tokens. ``predictors_m``: the packed row that predicts each, in any order."""
        ends = list(itertools.accumulate(self.counts(tokens)))
        owner_m = np.searchsorted(ends, predictors_m, side="right")
        order_m = np.argsort(owner_m, kind="stable")
        counts = np.bincount(owner_m, minlength=self.ranks.size)
        first = int(counts[: self.ranks.rank].sum())
        own = order_m[first : first + counts[self.ranks.rank]]
        rows = predictors_m[own] - self.rows(tokens).start
        order, own, rows = (torch.from_numpy(indices).to(device) for indices in (order_m, own, rows))
        return TargetShare(ranks=self.ranks, own=own, rows=rows, order_m=order, counts=counts.tolist())


class TargetShare(NamedTuple):
    """The loss tokens of a micro-batch that a rank scores. All ranks then compute the same loss of all loss tokens,
    because a loss may depend on all tokens of a sequence (GSPO, sequence masks)."""

    ranks: RankGroup
    own: Tensor  # int64: indices of this rank's loss tokens among the micro-batch's
    rows: Tensor  # int64: the row of this rank's slice that predicts each
    order_m: Tensor  # int64: the loss tokens of rank 0, then of rank 1 and so on
    counts: list[int]  # loss tokens of each rank

    def gather(self, scores: Tensor) -> Tensor:
        """The scores [M, ...] of all loss tokens in the micro-batch's order, from those of this rank's. The gradients
        of all ranks' parameters add up to that of one loss: the backward takes this rank's part and sums nothing."""
        return _Gather.apply(scores, self)  # pyright: ignore[reportReturnType]


class _Gather(torch.autograd.Function):
    """`TargetShare.gather`."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, share: TargetShare) -> Tensor:
        ctx.own = share.own
        copies = scores.repeat(share.ranks.size, *(1 for _ in scores.shape[1:]))
        by_rank = share.ranks.all_to_all(copies, [len(scores)] * share.ranks.size, share.counts)
        return torch.empty_like(by_rank).index_copy_(0, share.order_m, by_rank)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].index_select(0, ctx.own), None


def _by_rank(part_nhe: Tensor, size: int) -> Tensor:
    """The heads of each rank, [n, c, w]. The gradient of a head that several ranks have is the sum of theirs."""
    rows, heads, head_dim = part_nhe.shape
    own_heads = heads_of_rank(heads, size)
    copies = size * own_heads // heads
    return part_nhe[:, :, None].expand(-1, -1, copies, -1).reshape(rows, size, own_heads * head_dim)
