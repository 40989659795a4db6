"""Causal attention over packed documents: documents of similar length share one padded call.

Shape suffixes: n packed tokens, h query heads, g key/value heads, e head dimension, b documents of a bucket,
l padded length of a bucket.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from headway.models.kernels import PadDocuments, UnpadDocuments

PADDING_RATIO = 1.25  # a bucket holds documents at least 1/1.25 as long as its longest


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Documents computed together, each padded on the right to ``length`` tokens."""

    documents: int
    length: int
    gather_bl: Tensor  # [b*l] packed index of each position; padding points at the document's last token


@dataclass(frozen=True, kw_only=True)
class AttentionPlan:
    """How the documents of one micro-batch are grouped; computed once and shared by its layers."""

    tokens: int
    positions_n: Tensor  # [N] position inside its document
    buckets: tuple[Bucket, ...]
    scatter_n: Tensor  # [N] index of each packed token in the concatenation of all buckets

    @classmethod
    def build(cls, lengths: list[int], device: torch.device | str = "cpu") -> AttentionPlan:
        """Group documents of ``lengths`` (each >= 1) into few buckets of nearly equal length."""
        if not lengths or min(lengths) < 1:
            raise ValueError(f"every document needs at least one token; lengths = {lengths}")
        sizes = torch.tensor(lengths, dtype=torch.int64)
        starts = torch.cumsum(sizes, 0) - sizes
        total = int(sizes.sum())
        positions = torch.arange(total) - torch.repeat_interleave(starts, sizes)
        order = torch.argsort(sizes, stable=True, descending=True)
        scatter = torch.empty(total, dtype=torch.int64)
        buckets: list[Bucket] = []
        offset = 0
        for members in _split(sizes, order):
            length = int(sizes[members[0]])
            columns = torch.arange(length)
            valid = columns < sizes[members][:, None]
            gather = starts[members][:, None] + torch.minimum(columns, sizes[members][:, None] - 1)
            padded = offset + torch.arange(len(members) * length).view(len(members), length)
            scatter[gather[valid]] = padded[valid]
            buckets.append(Bucket(documents=len(members), length=length, gather_bl=gather.flatten().to(device)))
            offset += len(members) * length
        return cls(tokens=total, positions_n=positions.to(device), buckets=tuple(buckets), scatter_n=scatter.to(device))


def _split(sizes: Tensor, order: Tensor) -> list[Tensor]:
    """Cut the documents, longest first, where the padding to the bucket's longest would exceed the ratio."""
    ordered = sizes[order].tolist()
    cuts = [0]
    for i, size in enumerate(ordered):
        if ordered[cuts[-1]] > PADDING_RATIO * size + 1:
            cuts.append(i)
    cuts.append(len(ordered))
    return [order[a:b] for a, b in itertools.pairwise(cuts)]


def packed_attention(qkv: Tensor, heads: int, kv_heads: int, head_dim: int, plan: AttentionPlan) -> Tensor:
    """Causal attention of each document to itself, from the joint projection [N, (Hq+2Hkv)*Dh] to [N, Hq*Dh].

    Padding stands after a document, so causality hides it.
    """
    blocks = PadDocuments.apply(qkv, plan.scatter_n, *(bucket.gather_bl for bucket in plan.buckets))
    outputs: list[Tensor] = []
    for bucket, block in zip(plan.buckets, blocks, strict=True):  # pyright: ignore[reportArgumentType]
        padded = block.view(bucket.documents, bucket.length, -1, head_dim).transpose(1, 2)
        q, k, v = padded.split((heads, kv_heads, kv_heads), dim=1)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        outputs.append(out.transpose(1, 2).reshape(bucket.documents * bucket.length, -1))
    return UnpadDocuments.apply(plan.scatter_n, *outputs)  # pyright: ignore[reportReturnType]
