"""Packed causal attention on a CPU, which computes shared prefixes of any depth once.

PyTorch's flash attention for CPUs also gives each query's log-sum-exp, which makes attention divisible by keys: the
parts' outputs are weighted by exp(lse_part - lse), lse = log sum exp(lse_part). Its backward needs no gradient of the
log-sum-exp: given the *merged* output and log-sum-exp, each part's own backward is exact, because P = exp(S - lse) and
dS = P * (dP - rowsum(dO * O)) (FlashAttention-2, Dao 2023, section 3.1.2) hold for any subset of the keys.

Shape suffixes: n packed tokens, h query heads, g key/value heads, e head dimension, b documents of a bucket,
l padded length of a bucket, w width of the joint projection (h + 2g) * e.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headway.models.attention_plan import AttentionPlan, SharedPrefix

Sizes = tuple[int, int, int]  # query heads, key/value heads, head dimension

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CpuAttention(torch.autograd.Function):
    """Packed attention with gradient, [N, W] to [N, Hq*Dh], in double, float, bfloat16 and half."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, sizes: Sizes, plan: AttentionPlan) -> Tensor:
        heads, _, head_dim = sizes
        wide_qkv = _widened(qkv)
        if len(plan.buckets) == 1 and plan.buckets[0].first == 0:  # the rows are in packed order already
            out_bhle, lse_bhl = _flash(*_split_heads(plan.buckets[0].take(wide_qkv), sizes), 0.0, True)
            out, lse = (x.transpose(1, 2).reshape(plan.tokens, -1) for x in (out_bhle, lse_bhl))
        else:
            out = wide_qkv.new_empty(plan.tokens, heads * head_dim)
            lse = wide_qkv.new_empty(plan.tokens, heads)
            for bucket in plan.buckets:
                out_bhle, lse_bhl = _flash(*_split_heads(bucket.take(wide_qkv), sizes), 0.0, True)
                bucket.put(out, out_bhle.transpose(1, 2))
                bucket.put(lse, lse_bhl.transpose(1, 2))
        if plan.shared:
            _merge_prefixes(wide_qkv, out, lse, sizes, plan)
        out = out.to(qkv.dtype)
        ctx.save_for_backward(qkv, out, lse)
        ctx.sizes, ctx.plan = sizes, plan
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        saved_qkv, out, lse = ctx.saved_tensors
        sizes, plan = ctx.sizes, ctx.plan
        qkv, out, grad = _widened(saved_qkv), _widened(out), _widened(grads[0])
        grad_qkv = torch.empty_like(qkv)
        for bucket in plan.buckets:
            grad_heads, out_heads = (_heads(block, sizes[2]) for block in (bucket.take_zeroed(grad), bucket.take(out)))
            q, k, v = _split_heads(bucket.take(qkv), sizes)
            qkv_grads = _flash_backward(grad_heads, q, k, v, out_heads, bucket.take(lse).transpose(1, 2), 0.0, True)
            for rows, part_grad in zip(_columns(grad_qkv, sizes), qkv_grads, strict=True):
                bucket.put(rows, part_grad.transpose(1, 2))
        for prefix in plan.shared:
            q, k, v = _query_and_prefix(qkv, prefix, sizes)
            grad_heads, out_heads = (_heads(rows[None, prefix.queries], sizes[2]) for rows in (grad, out))
            lse_heads = lse[None, prefix.queries].transpose(1, 2)
            qkv_grads = _flash_backward(grad_heads, q, k, v, out_heads, lse_heads, 0.0, False)
            all_spans = ((prefix.queries,), prefix.keys, prefix.keys)
            for rows, spans, part_grad in zip(_columns(grad_qkv, sizes), all_spans, qkv_grads, strict=True):
                span_grads = part_grad[0].transpose(0, 1).flatten(1).split([span.stop - span.start for span in spans])
                for span, span_grad in zip(spans, span_grads, strict=True):
                    rows[span] += span_grad
        return grad_qkv.to(saved_qkv.dtype), None, None


def _merge_prefixes(qkv: Tensor, out: Tensor, lse: Tensor, sizes: Sizes, plan: AttentionPlan) -> None:
    """Merge the prefixes' part, in place, into the attention of the rows that continue them, each with one prefix."""
    heads, _, head_dim = sizes
    first = plan.first_continued
    out_own, lse_own = out[first:].view(-1, heads, head_dim), lse[first:]
    out_prefix, lse_prefix = torch.empty_like(out_own), torch.empty_like(lse_own)
    for prefix in plan.shared:
        rows = slice(prefix.queries.start - first, prefix.queries.stop - first)
        out_bhle, lse_bhl = _flash(*_query_and_prefix(qkv, prefix, sizes), 0.0, False)
        out_prefix[rows] = out_bhle[0].transpose(0, 1)
        lse_prefix[rows] = lse_bhl[0].transpose(0, 1)
    # The prefix's share of the softmax is 1 / (1 + exp(lse_own - lse_prefix)).
    out_own.lerp_(out_prefix, torch.sigmoid(lse_prefix - lse_own).unsqueeze(-1))
    lse_own.copy_(torch.logaddexp(lse_own, lse_prefix))


def _widened(rows: Tensor) -> Tensor:
    """Cast ``rows`` to at least float32, so that sums over keys lose no precision. On a CPU without bfloat16
    instructions the flash backward takes eight times as long in bfloat16. Attention is a small share of the FLOP."""
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def _query_and_prefix(qkv: Tensor, prefix: SharedPrefix, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [1, Hq, q, Dh] of the pieces that continue a prefix, keys and values [1, Hkv, p, Dh] of the prefix."""
    heads, kv_heads, head_dim = sizes
    q, _, _ = _split_heads(qkv[None, prefix.queries], sizes)
    kv = [qkv[rows, heads * head_dim :] for rows in prefix.keys]
    k, v = _heads((kv[0] if len(kv) == 1 else torch.cat(kv))[None], head_dim).split((kv_heads, kv_heads), dim=1)
    return q, k, v


def _heads(block: Tensor, head_dim: int) -> Tensor:
    """[b, l, x * Dh] as [b, x, l, Dh] (a view)."""
    return block.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def _split_heads(block: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
    heads, kv_heads, head_dim = sizes
    return _heads(block, head_dim).split((heads, kv_heads, kv_heads), dim=1)


def _columns(rows: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
    """The query, key and value columns of joint rows [N, W] (views)."""
    heads, kv_heads, head_dim = sizes
    return rows.split((heads * head_dim, kv_heads * head_dim, kv_heads * head_dim), dim=1)
