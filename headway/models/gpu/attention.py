"""Packed causal attention by flash kernels of variable lengths, which compute shared prefixes of any depth once: one
call for all pieces, each with itself, and one for those that continue a prefix. On a GPU without padding.

Flash attention also gives each query's log-sum-exp, which makes attention divisible by keys: the parts' outputs are
weighted by exp(lse_part - lse), lse = log sum exp(lse_part). Its backward needs no gradient of the log-sum-exp: given
the *merged* output and log-sum-exp, each part's own backward is exact, because P = exp(S - lse) and
dS = P * (dP - rowsum(dO * O)) (FlashAttention-2, Dao 2023, section 3.1.2) hold for any subset of the keys.

Shapes: n packed tokens, h query heads, g key/value heads, e head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headway.models.attention_plan import AttentionPlan
from headway.models.configuration import Scores
from headway.models.gpu.operators import merge_attention, wide


class Flash(NamedTuple):
    """Functions with the signatures of torch's flash attention. ``is_cpu``: they are given at least float32, and the
    gradients of query, key and value are parts of one tensor."""

    forward: Callable[..., Any] = torch.ops.aten._flash_attention_forward.default
    backward: Callable[..., Any] = torch.ops.aten._flash_attention_backward.default
    is_cpu: bool = False

    def widened(self, *tensors: Tensor) -> list[Tensor]:
        return [wide(tensor) if self.is_cpu else tensor for tensor in tensors]


FLASH = Flash()


def flash_attention(
    qkv: Tensor, heads: int, kv_heads: int, head_dim: int, plan: AttentionPlan, scores: Scores, flash: Flash = FLASH
) -> Tensor:
    """`packed_attention` where `attention_way` chooses it."""
    sizes = (heads, kv_heads, head_dim)
    return _FlashAttention.apply(qkv, sizes, plan, scores, flash)  # pyright: ignore[reportReturnType]


class _FlashAttention(torch.autograd.Function):
    """Packed attention with gradient, [N, W] to [N, Hq*Dh]."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, sizes: tuple[int, int, int], plan: AttentionPlan, scores: Scores, flash: Flash
    ) -> Tensor:
        how: dict[str, Any] = {"scale": scores.scale}
        if scores.window is not None:
            how |= {"window_size_left": scores.window - 1, "window_size_right": 0}
        q_nhe, k_nge, v_nge = _heads(flash.widened(qkv)[0], sizes)
        out_nhe, lse_hn, *states = flash.forward(q_nhe, k_nge, v_nge, *plan.sequences, 0.0, True, False, **how)
        if plan.shared:
            first, parts = plan.first_continued, _of_prefixes(plan, k_nge, v_nge)
            part = flash.forward(q_nhe[first:], *parts, *plan.shared_sequences, 0.0, False, False, **how)
            merge_attention(out_nhe[first:], lse_hn[:, first:], *part[:2])
        out_nhe = out_nhe.to(qkv.dtype)
        ctx.save_for_backward(qkv, out_nhe, lse_hn, *states[:2])
        ctx.inputs = sizes, plan, flash, how
        return out_nhe.flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, out_nhe, lse_hn, *states = ctx.saved_tensors
        sizes, plan, flash, how = ctx.inputs
        wide_qkv, out_nhe, grad_nhe = flash.widened(qkv, out_nhe, grads[0].view(out_nhe.shape))
        q_nhe, k_nge, v_nge = _heads(wide_qkv, sizes)
        tensors = grad_nhe, q_nhe, k_nge, v_nge, out_nhe, lse_hn
        own_grads = flash.backward(*tensors, *plan.sequences, 0.0, True, *states, **how)
        grad_rows: Any = own_grads[0]._base if flash.is_cpu else torch.cat(own_grads, dim=1)
        if plan.shared:
            first, parts = plan.first_continued, _of_prefixes(plan, k_nge, v_nge)
            tensors = grad_nhe[first:], q_nhe[first:], *parts, out_nhe[first:], lse_hn[:, first:].contiguous()
            part_grads = flash.backward(*tensors, *plan.shared_sequences, 0.0, False, *states, **how)
            grad_rows[first:, : sizes[0]].add_(part_grads[0])
            _add_to_prefixes(grad_rows[:, sizes[0] :], torch.cat(part_grads[1:], dim=1), plan)
        return grad_rows.flatten(1).to(qkv.dtype), None, None, None, None


def _heads(qkv: Tensor, sizes: tuple[int, int, int]) -> tuple[Tensor, ...]:
    """Query [n, h, e], key and value [n, g, e] as views of the joint rows."""
    heads, kv_heads, head_dim = sizes
    return qkv.view(len(qkv), -1, head_dim).split((heads, kv_heads, kv_heads), dim=1)


def _of_prefixes(plan: AttentionPlan, *parts: Tensor) -> list[Tensor]:
    """The rows of all shared prefixes, one after another: mostly the first rows of the pack, and then a view."""
    spans = plan.shared_spans
    if len(spans) == 1:
        return [part[spans[0]] for part in parts]
    return [torch.cat([part[span] for span in spans]) for part in parts]


def _add_to_prefixes(grad_rows: Tensor, grad_prefixes: Tensor, plan: AttentionPlan) -> None:
    """Add the gradient of `_of_prefixes`. A row that is part of several prefixes has a sum in float32."""
    spans, sums = plan.shared_spans, grad_rows
    if len(spans) > 1:
        sums = grad_rows.to(torch.promote_types(grad_rows.dtype, torch.float32))
    for span, grad in zip(spans, grad_prefixes.split([span.stop - span.start for span in spans]), strict=True):
        sums[span].add_(grad)
    if sums is not grad_rows:
        grad_rows.copy_(sums)
