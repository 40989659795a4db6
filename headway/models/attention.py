"""Causal attention over packed documents, which compute a common prefix once. `attention_way` chooses how: by flash
attention of CPUs or GPUs, or in padded calls of documents of similar length.

`attention_plan.py` defines the *pieces* of a packed micro-batch.

Shape suffixes: n packed tokens, h query heads, g key/value heads, e head dimension, b documents of a bucket,
l padded length of a bucket, w width of the joint projection (h + 2g) * e.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from headway.models.attention_plan import AttentionPlan, Bucket
from headway.models.configuration import Scores
from headway.models.cpu.cpu_attention import cpu_flash
from headway.models.gpu.attention import FLASH, Flash, flash_attention
from headway.models.kernels import PadDocuments, UnpadDocuments
from headway.models.masked import causal_attention

HOPPER = (9, 0)


def packed_attention(
    qkv: Tensor, heads: int, kv_heads: int, head_dim: int, plan: AttentionPlan, scores: Scores
) -> Tensor:
    """Causal attention of each document to itself, from the joint projection [N, (Hq+2Hkv)*Dh] to [N, Hq*Dh].

    A window at least as long as every document hides no key, so such a layer is computed without a window.
    """
    if scores.window is not None and scores.window >= plan.longest:
        scores = replace(scores, window=None)
    capability = torch.cuda.get_device_capability(qkv.device) if qkv.device.type == "cuda" else HOPPER
    way, _ = attention_way(qkv.device.type, qkv.dtype, head_dim, plan, scores, capability)
    if way == "padded":
        return padded_attention(qkv, heads, kv_heads, head_dim, plan, scores)
    flash = Flash(*cpu_flash(plan), is_cpu=True) if way == "cpu" else FLASH
    return flash_attention(qkv, heads, kv_heads, head_dim, plan, scores, flash)


def attention_way(
    device_type: str, dtype: torch.dtype, head_dim: int, plan: AttentionPlan, scores: Scores, gpu: tuple[int, int]
) -> tuple[Literal["cpu", "flash", "padded"], str]:
    """How `packed_attention` computes a layer, and for "padded" the reason. ``gpu``: its compute capability."""
    if device_type == "cpu":
        is_plain = scores.window is None and scores.softcap is None
        return ("cpu", "") if is_plain else ("padded", "a CPU's flash attention has no windows and soft caps")
    required = {
        f"flash attention takes bfloat16 and float16, not {dtype}": dtype in (torch.bfloat16, torch.float16),
        "flash attention needs a GPU of compute capability 8.0": gpu >= (8, 0),
        f"flash attention takes heads of 8, 16 ... 256, not {head_dim}": not head_dim % 8 and head_dim <= 256,
        f"this GPU has no gradients for heads of {head_dim}": head_dim <= 192 or gpu in ((8, 0), HOPPER, (10, 0)),
        "torch's flash attention has no soft caps": scores.softcap is None,
        "a window begins elsewhere for each piece behind a shared prefix": scores.window is None or not plan.shared,
    }
    reason = next((reason for reason, is_met in required.items() if not is_met), "")
    return ("padded", reason) if reason else ("flash", "")


def padded_attention(
    qkv: Tensor, heads: int, kv_heads: int, head_dim: int, plan: AttentionPlan, scores: Scores
) -> Tensor:
    """`packed_attention` by PyTorch's attention on complete documents. Each document attends with its own copy of a
    shared prefix, which the rest of the layer computes once. Padding follows a document, so causality hides it.

    All copies together would take many times the memory of the packed rows. They are therefore made for a part of the
    documents at a time, with no more rows than are packed. The backward keeps only ``qkv`` and makes them again.
    """
    sizes = (heads, kv_heads, head_dim)
    if plan.shared:
        return _AttendCopies.apply(qkv, sizes, plan, scores)  # pyright: ignore[reportReturnType]
    blocks = PadDocuments.apply(qkv, plan.scatter_n, *(bucket.gather_bl for bucket in plan.buckets))
    outputs = [
        _attend(block, sizes, bucket, scores).flatten(0, 1)
        for bucket, block in zip(plan.buckets, blocks, strict=True)  # pyright: ignore[reportArgumentType]
    ]
    return UnpadDocuments.apply(plan.scatter_n, *outputs)  # pyright: ignore[reportReturnType]


def _attend(block: Tensor, sizes: tuple[int, int, int], bucket: Bucket, scores: Scores) -> Tensor:
    """Attention of a bucket's documents, from their padded rows [b*l, w] to [b, l, h*e]."""
    heads, kv_heads, head_dim = sizes
    padded = block.view(bucket.documents, bucket.length, -1, head_dim).transpose(1, 2)
    q, k, v = padded.split((heads, kv_heads, kv_heads), dim=1)
    return causal_attention(q, k, v, scores).transpose(1, 2).flatten(2)


class _AttendCopies(torch.autograd.Function):
    """Attention of documents that share rows, [N, w] to [N, h*e], for each bucket of `AttentionPlan.copies` in turn."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, sizes: tuple[int, int, int], plan: AttentionPlan, scores: Scores) -> Tensor:
        ctx.save_for_backward(qkv)
        ctx.how = sizes, plan, scores
        copies = plan.copies
        outputs = (_attend(qkv.index_select(0, copy.gather_bl), sizes, copy, scores).flatten(0, 1) for copy in copies)
        kept_rows = torch.cat([copy_rows[copy.outputs[1]] for copy, copy_rows in zip(copies, outputs, strict=True)])
        return torch.empty_like(kept_rows).index_copy_(0, torch.cat([copy.outputs[0] for copy in copies]), kept_rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (qkv,) = ctx.saved_tensors
        sizes, plan, scores = ctx.how
        grad_qkv = torch.zeros_like(qkv, dtype=torch.promote_types(qkv.dtype, torch.float32))
        for bucket in plan.copies:
            with torch.enable_grad():
                block = qkv.detach().index_select(0, bucket.gather_bl).requires_grad_()
                out = _attend(block, sizes, bucket, scores)
            (block_grad,) = torch.autograd.grad(out, block, bucket.take_zeroed(grads[0]))
            grad_qkv.index_add_(0, bucket.gather_bl, block_grad.to(grad_qkv.dtype))
        return grad_qkv.to(qkv.dtype), None, None, None
