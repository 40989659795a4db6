"""Operators of a decoding step on a paged KV cache.

Shapes: n rows, h query heads, k KV heads, c head dimension, b blocks of the cache, t tokens of a block, w blocks of a
row's table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.models.configuration import Scores
from headway.models.masked import masked_attention


def gathered(cache_bktc: Tensor, table_nw: Tensor) -> Tensor:
    """The blocks of each row one after the other, [n, k, w * t, c]."""
    return cache_bktc[table_nw.long()].transpose(1, 2).flatten(2, 3)


def paged_attention(
    q_nhc: Tensor, keys_bktc: Tensor, values_bktc: Tensor, table_nw: Tensor, position_n: Tensor, scores: Scores
) -> Tensor:
    """Attention of row i to positions 0 .. position[i] of its blocks, or to the last ``window`` of them, [n, h * c]."""
    n, _, c = q_nhc.shape
    key_t = torch.arange(table_nw.shape[1] * keys_bktc.shape[2], device=q_nhc.device)
    visible_nt = key_t <= position_n[:, None]
    if scores.window is not None:
        visible_nt &= key_t > position_n[:, None] - scores.window
    mask = visible_nt[:, None, None]
    # Blocks that nobody has written since may contain NaN, and 0 x NaN is NaN.
    values = gathered(values_bktc, table_nw).masked_fill(~mask.transpose(2, 3), 0)
    # A KV head's queries lie on the query axis, so that KV isn't repeated.
    q = q_nhc.reshape(n, keys_bktc.shape[1], -1, c)
    return masked_attention(q, gathered(keys_bktc, table_nw), values, mask, scores).reshape(n, -1)
