"""Causal attention over packed documents: documents of similar length share one padded call, and documents with a
common prefix share that prefix's rows.

`attention_plan.py` defines the *pieces* of a packed micro-batch.

Shape suffixes: n packed tokens, h query heads, g key/value heads, e head dimension, b documents of a bucket,
l padded length of a bucket, w width of the joint projection (h + 2g) * e.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headway.models.attention_plan import AttentionPlan
from headway.models.configuration import Scores
from headway.models.cpu.cpu_attention import CpuAttention
from headway.models.kernels import PadDocuments, UnpadDocuments
from headway.models.masked import causal_attention


def packed_attention(
    qkv: Tensor, heads: int, kv_heads: int, head_dim: int, plan: AttentionPlan, scores: Scores
) -> Tensor:
    """Causal attention of each document to itself, from the joint projection [N, (Hq+2Hkv)*Dh] to [N, Hq*Dh].

    A window at least as long as every document hides nothing: such a layer is computed without one.
    """
    if scores.window is not None and scores.window >= plan.longest:
        scores = replace(scores, window=None)
    if qkv.device.type == "cpu" and scores == Scores(scale=head_dim**-0.5):
        return CpuAttention.apply(qkv, (heads, kv_heads, head_dim), plan)  # pyright: ignore[reportReturnType]
    return padded_attention(qkv, heads, kv_heads, head_dim, plan, scores)


def padded_attention(
    qkv: Tensor, heads: int, kv_heads: int, head_dim: int, plan: AttentionPlan, scores: Scores
) -> Tensor:
    """As `packed_attention`, by PyTorch's own attention on whole documents: each document attends from its own copy of
    a shared prefix, the rest of the layer still computes it once. Padding follows a document, so causality hides it.

    Autograd would keep the copies of every layer until the backward, many times the memory of the packed rows. So with
    shared prefixes only ``qkv`` is kept, and the backward computes this attention again.
    """
    sizes = (heads, kv_heads, head_dim)
    if plan.shared and torch.is_grad_enabled():
        return checkpoint(  # pyright: ignore[reportReturnType]
            _attend_whole, qkv, sizes, plan, scores, use_reentrant=False, preserve_rng_state=False
        )
    return _attend_whole(qkv, sizes, plan, scores)


def _attend_whole(qkv: Tensor, sizes: tuple[int, int, int], plan: AttentionPlan, scores: Scores) -> Tensor:
    heads, kv_heads, head_dim = sizes
    buckets, scatter_n = plan.whole
    blocks = PadDocuments.apply(qkv, scatter_n, bool(plan.shared), *(bucket.gather_bl for bucket in buckets))
    outputs: list[Tensor] = []
    for bucket, block in zip(buckets, blocks, strict=True):  # pyright: ignore[reportArgumentType]
        padded = block.view(bucket.documents, bucket.length, -1, head_dim).transpose(1, 2)
        q, k, v = padded.split((heads, kv_heads, kv_heads), dim=1)
        out = causal_attention(q, k, v, scores)
        outputs.append(out.transpose(1, 2).reshape(bucket.documents * bucket.length, -1))
    return UnpadDocuments.apply(scatter_n, *outputs)  # pyright: ignore[reportReturnType]
