"""Causal attention with a sliding window or soft-capped scores, or plain if a layer has neither.

Shape suffixes: b documents, h query heads, g key/value heads, l queries, t keys, e head dimension, w window.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from headway.models.configuration import Scores


def causal_attention(q_bhle: Tensor, k_bgle: Tensor, v_bgle: Tensor, scores: Scores) -> Tensor:
    """Attention of documents of equal length to themselves, [b, h, l, e].

    The cost of a window is linear in the length, because documents beyond twice its size are split into blocks.
    """
    length = q_bhle.shape[2]
    window = scores.window if scores.window is not None and scores.window < length else None
    if window is not None and length > 2 * window:
        return _windowed_in_blocks(q_bhle, k_bgle, v_bgle, scores, window)
    if window is None and scores.softcap is None:
        uses_groups, dtype = q_bhle.shape[1] != k_bgle.shape[1], q_bhle.dtype
        if q_bhle.device.type == "cpu" and dtype.itemsize < 4:  # as the trainer and the native kernels compute it
            q_bhle, k_bgle, v_bgle = q_bhle.float(), k_bgle.float(), v_bgle.float()
        return functional.scaled_dot_product_attention(
            q_bhle, k_bgle, v_bgle, is_causal=True, scale=scores.scale, enable_gqa=uses_groups
        ).to(dtype)
    return masked_attention(q_bhle, k_bgle, v_bgle, visible_mask(length, window, q_bhle.device), scores)


def visible_mask(length: int, window: int | None, device: torch.device, first: int = 0) -> Tensor:
    """A mask of the keys visible to a document's queries from ``first`` on: bool [length - first, length]."""
    key_t = torch.arange(length, device=device)
    query_l1 = key_t[first:, None]
    mask = key_t <= query_l1
    return mask if window is None else mask & (key_t > query_l1 - window)


def masked_attention(q_bhle: Tensor, k_bgte: Tensor, v_bgte: Tensor, mask: Tensor, scores: Scores) -> Tensor:
    """Attention under ``mask``, [l, t] or [b, 1, l, t]: bool (True: visible) or added to the scores; [b, h, l, e].

    The mask includes the window; only the scale and soft cap of ``scores`` are used.
    """
    heads, kv_heads = q_bhle.shape[1], k_bgte.shape[1]
    if (cap := scores.softcap) is None:
        return functional.scaled_dot_product_attention(
            q_bhle, k_bgte, v_bgte, attn_mask=mask, scale=scores.scale, enable_gqa=heads != kv_heads
        )
    b, _, length, e = q_bhle.shape
    grouped_q = q_bhle.reshape(b, kv_heads, -1, e)  # the queries of a key head are contiguous: keys are not repeated
    dot_products = grouped_q @ k_bgte.transpose(2, 3)
    wide_scores = dot_products.to(torch.promote_types(dot_products.dtype, torch.float32))
    capped = (wide_scores * (scores.scale / cap)).tanh() * cap
    capped = capped.view(b, kv_heads, -1, length, k_bgte.shape[2])
    if mask.ndim == 4:
        mask = mask[:, :, None]
    capped = capped.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else capped + mask
    weights = torch.softmax(capped, dim=-1).to(v_bgte.dtype).flatten(2, 3)
    return (weights @ v_bgte).reshape(b, heads, length, e)


def _windowed_in_blocks(q_bhle: Tensor, k_bgle: Tensor, v_bgle: Tensor, scores: Scores, window: int) -> Tensor:
    """Attention in blocks of ``window`` queries, each over the keys of its own and the previous block."""
    b, heads, length, e = q_bhle.shape
    blocks = -(-length // window)
    padding = blocks * window - length
    q = functional.pad(q_bhle, (0, 0, 0, padding)).unflatten(2, (blocks, window)).transpose(1, 2).flatten(0, 1)
    k, v = (_with_previous(x, blocks, window, padding) for x in (k_bgle, v_bgle))
    query = torch.arange(window, device=q.device)[:, None]
    key = torch.arange(2 * window, device=q.device)[None, :]
    band = (key > query) & (key <= query + window)  # [w, 2w]
    mask = band.expand(blocks, 1, window, 2 * window).clone()
    mask[0] &= key >= window  # the first block has no previous one
    out = masked_attention(q, k, v, mask.repeat(b, 1, 1, 1), scores)
    return out.unflatten(0, (b, blocks)).transpose(1, 2).reshape(b, heads, -1, e)[:, :, :length]


def _with_previous(x_bgle: Tensor, blocks: int, window: int, padding: int) -> Tensor:
    """Each block's keys or values, preceded by those of the previous block: [b * blocks, g, 2w, e]."""
    padded = functional.pad(x_bgle, (0, 0, window, padding)).unflatten(2, (blocks + 1, window))
    doubled = torch.cat((padded[:, :, :-1], padded[:, :, 1:]), dim=3)
    return doubled.transpose(1, 2).flatten(0, 1)
