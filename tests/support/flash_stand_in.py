"""Torch's flash attention of variable lengths, by its definition: the signatures of the operators of CUDA, in any
precision, with what they require of their arguments."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from headway.models.attention import HOPPER, attention_way, padded_attention
from headway.models.attention_plan import AttentionPlan
from headway.models.configuration import Scores
from headway.models.gpu.attention import Flash, flash_attention


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: None = None,
    alibi_slopes: None = None,
    block_table: None = None,
    num_splits: None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    require((query, key, value), (cum_seq_q, cum_seq_k), (max_q, max_k))
    assert (dropout_p, return_debug_mask) == (0.0, False)
    out, lse = torch.full_like(query, math.nan).contiguous(), query.new_full((query.shape[1], len(query)), math.nan)
    for rows, keys in sequences(cum_seq_q, cum_seq_k):
        q, k, v = query[rows], widened(key[keys], query), widened(value[keys], query)
        scores = torch.einsum("qhe,khe->hqk", q, k) * scale
        scores = scores.masked_fill(~visible(len(q), len(k), is_causal, window_size_left, window_size_right), -math.inf)
        lse[:, rows] = scores.logsumexp(-1)
        out[rows] = torch.einsum("hqk,khe->qhe", scores.softmax(-1), v)
    return out, lse, torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64), query.new_empty(0)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    require((query, key, value), (cum_seq_q, cum_seq_k), (max_q, max_k))
    assert (dropout_p, rng_state.dtype) == (0.0, torch.uint64)
    assert logsumexp.is_contiguous()
    assert logsumexp.shape == (query.shape[1], len(query))
    grad_q, grad_k, grad_v = (torch.full_like(x, math.nan).contiguous() for x in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    for rows, keys in sequences(cum_seq_q, cum_seq_k):
        q, k, v = query[rows], widened(key[keys], query), widened(value[keys], query)
        scores = torch.einsum("qhe,khe->hqk", q, k) * scale
        scores = scores.masked_fill(~visible(len(q), len(k), is_causal, window_size_left, window_size_right), -math.inf)
        weights = (scores - logsumexp[:, rows, None]).exp()
        of_weights = torch.einsum("qhe,khe->hqk", grad_out[rows], v)
        of_scores = weights * (of_weights - (grad_out[rows] * out[rows]).sum(-1).t()[..., None]) * scale
        grad_q[rows] = torch.einsum("hqk,khe->qhe", of_scores, k)
        grad_k[keys] = torch.einsum("hqk,qhe->khe", of_scores, q).unflatten(1, (-1, groups)).sum(2)
        grad_v[keys] = torch.einsum("hqk,qhe->khe", weights, grad_out[rows]).unflatten(1, (-1, groups)).sum(2)
    return grad_q, grad_k, grad_v


def require(parts: tuple[Tensor, ...], ends: tuple[Tensor, Tensor], longest: tuple[int, int]) -> None:
    query, key, value = parts
    assert all(part.stride(-1) == 1 for part in parts)
    for end, most, rows in zip(ends, longest, (query, key), strict=True):
        assert end.dtype == torch.int32
        assert end.is_contiguous()
        assert end[0] == 0
        assert end[-1] == len(rows)
        assert most >= 2
        assert int(end.diff().max()) <= most
    assert len(ends[0]) == len(ends[1])
    assert key.shape == value.shape


def sequences(*ends: Tensor) -> Iterator[tuple[slice, ...]]:
    for index in range(len(ends[0]) - 1):
        yield tuple(slice(int(end[index]), int(end[index + 1])) for end in ends)


def widened(x: Tensor, query: Tensor) -> Tensor:
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def visible(queries: int, keys: int, is_causal: bool, left: int | None, right: int | None) -> Tensor:
    """Both sequences end together."""
    distance = torch.arange(keys) - (torch.arange(queries)[:, None] + keys - queries)
    mask = distance <= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        mask &= distance >= -left
    return mask if right is None else mask & (distance <= right)


FLASH = Flash(forward, backward)


def stand_in_attention(
    qkv: Tensor, heads: int, kv_heads: int, head_dim: int, plan: AttentionPlan, scores: Scores
) -> Tensor:
    """`packed_attention` as a GPU would compute it in bfloat16."""
    sizes: Any = heads, kv_heads, head_dim, plan
    if attention_way("cuda", torch.bfloat16, 8, plan, scores, HOPPER)[0] == "padded":
        return padded_attention(qkv, *sizes, scores)
    return flash_attention(qkv, *sizes, scores, FLASH)
