"""Flash attention of variable lengths on a CPU, by PyTorch's for equal lengths, with the arguments of a GPU's
(`gpu/attention.py`); dropout, longest lengths and random state aren't used.

Shape suffixes: n packed tokens, h query heads, g key/value heads, e head dimension, b documents of a bucket,
l padded length of a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headway.models.attention_plan import AttentionPlan, Bucket

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _Rows(NamedTuple):
    """Neighbouring rows, with the functions of a `Bucket`."""

    span: slice

    def take(self, rows: Tensor) -> Tensor:
        return rows[None, self.span]

    def put(self, rows: Tensor, values: Tensor) -> None:
        rows[self.span] = values[0].flatten(1)

    take_zeroed = take


def cpu_flash(plan: AttentionPlan) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward for the pieces of a plan, and for its shared prefixes. They are given at least float32:
    sums over keys lose no precision, and without bfloat16 instructions a backward in it takes eight times as long."""
    return partial(_forward, plan), partial(_backward, plan)


def _calls(plan: AttentionPlan, is_causal: bool) -> Iterator[tuple[Bucket | _Rows, Bucket | _Rows]]:
    """The rows of the queries and of the keys of each call."""
    if is_causal:
        yield from ((bucket, bucket) for bucket in plan.buckets)
        return
    ends = zip(*(part.tolist() for part in plan.shared_sequences[:2]), strict=True)
    first_query, first_key = next(ends)
    for query, key in ends:
        yield _Rows(slice(first_query, query)), _Rows(slice(first_key, key))
        first_query, first_key = query, key


def _forward(plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor, *lengths: Any, scale: float) -> tuple[Tensor, ...]:
    is_causal = lengths[5]
    out_nhe, lse_nh = q.new_empty(q.shape), q.new_empty(q.shape[:2])
    for rows, keys in _calls(plan, is_causal):
        inputs = _taken(rows, q), _taken(keys, k), _taken(keys, v)
        out_bhle, lse_bhl = _flash(*inputs, 0.0, is_causal, scale=scale)
        rows.put(out_nhe.flatten(1), out_bhle.transpose(1, 2))
        rows.put(lse_nh, lse_bhl.transpose(1, 2))
    return out_nhe, lse_nh.t()


def _backward(
    plan: AttentionPlan, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *lengths: Any, scale: float
) -> tuple[Tensor, ...]:
    lse, is_causal, head_counts = lengths[0], lengths[6], [x.shape[1] for x in (q, k, v)]
    joint = q.new_empty(len(q), sum(head_counts), q.shape[2]) if is_causal else None
    grads = [x.new_empty(x.shape) for x in (q, k, v)] if joint is None else joint.split(head_counts, dim=1)
    for rows, keys in _calls(plan, is_causal):
        grad_heads = rows.take_zeroed(grad.flatten(1)).unflatten(-1, grad.shape[1:]).transpose(1, 2)
        inputs = _taken(rows, q), _taken(keys, k), _taken(keys, v), _taken(rows, out)
        lse_heads = rows.take(lse.t()).transpose(1, 2)
        part_grads = _flash_backward(grad_heads, *inputs, lse_heads, 0.0, is_causal, scale=scale)
        for side, part, part_grad in zip((rows, keys, keys), grads, part_grads, strict=True):
            side.put(part.flatten(1), part_grad.transpose(1, 2))
    return tuple(grads)


def _taken(side: Bucket | _Rows, x_nhe: Tensor) -> Tensor:
    """The rows of a call as [b, h, l, e]."""
    return side.take(x_nhe.flatten(1)).unflatten(-1, x_nhe.shape[1:]).transpose(1, 2)
