"""Operators of a decoding step on a paged KV cache: the plain torch bodies here are the reference and run on CPUs, and
`models/gpu/decode_kernels.py` has those of GPUs.

Shapes: n rows, h query heads, k KV heads, c head dimension, b blocks of the cache, t tokens of a block, w blocks of a
row's table, v vocabulary.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headway.models.configuration import Scores
from headway.models.masked import masked_attention

Body = Callable[..., Any]
_LIBRARY = torch.library.Library("headway", "FRAGMENT")
_GOLDEN, _MIX_1, _MIX_2 = (x - (1 << 64) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _operator(schema: str, fake: Body) -> Callable[[Body], Body]:
    """Define an operator of the body's name; on GPUs its body is the function of this name in `decode_kernels`."""

    def define(body: Body) -> Body:
        def on_gpu(*arguments: Any) -> Any:
            return getattr(importlib.import_module("headway.models.gpu.decode_kernels"), body.__name__)(*arguments)

        _LIBRARY.define(f"{body.__name__}{schema}")
        for key, implementation in (("CPU", body), ("CUDA", on_gpu), ("Meta", fake)):
            _LIBRARY.impl(body.__name__, implementation, key)
        return getattr(torch.ops.headway, body.__name__)

    return define


def gathered(cache_bktc: Tensor, table_nw: Tensor) -> Tensor:
    """The blocks of each row one after the other, [n, k, w * t, c]."""
    return cache_bktc[table_nw.long()].transpose(1, 2).flatten(2, 3)


@_operator(
    "(Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor block, Tensor offset) -> ()", lambda *_: None
)
def store_kv(k_nkc: Tensor, v_nkc: Tensor, keys: Tensor, values: Tensor, block_n: Tensor, offset_n: Tensor) -> None:
    """Store each row's key and value in the caches ``keys`` and ``values`` [b, k, t, c]."""
    keys[block_n, :, offset_n] = k_nkc
    values[block_n, :, offset_n] = v_nkc


@_operator(
    "(Tensor q, Tensor keys, Tensor values, Tensor table, Tensor position, float scale, int window, float softcap)"
    " -> Tensor",
    lambda q, *_: q.new_empty(q.shape[0], q.shape[1] * q.shape[2]),
)
def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, position: Tensor, scale: float, window: int, softcap: float
) -> Tensor:
    """Attention of row i, q [n, h, c], to positions 0 .. position[i] of the blocks table[i] of the caches [b, k, t, c],
    or to the last ``window`` of them (0: all), [n, h * c]. ``softcap`` 0: none."""
    n, _, c = q.shape
    key_t = torch.arange(table.shape[1] * keys.shape[2], device=q.device)
    visible_nt = key_t <= position[:, None]
    if window:
        visible_nt &= key_t > position[:, None] - window
    mask = visible_nt[:, None, None]
    # Blocks that nothing has written since may contain NaN, which no mask removes.
    keys, values = (gathered(cache, table).masked_fill(~mask.transpose(2, 3), 0) for cache in (keys, values))
    # A KV head's queries lie on the query axis, so that KV isn't repeated.
    grouped_q, scores = q.reshape(n, keys.shape[1], -1, c), Scores(scale=scale, softcap=softcap or None)
    return masked_attention(grouped_q, keys, values, mask, scores).reshape(n, -1)


@_operator(
    "(Tensor logits, Tensor seed, Tensor index, Tensor temperature) -> Tensor",
    lambda logits, *_: logits.new_empty(2, len(logits), dtype=torch.float32),
)
def sample(logits_nv: Tensor, seed_n: Tensor, index_n: Tensor, temperature_n: Tensor) -> Tensor:
    """Sample the token number ``index_n`` of each row's response by `sampling.counter_uniform`: ids and
    log-probabilities, float32 [2, n]. Temperature 0: the most likely token, its log-probability at temperature 1."""
    logprobs_nv = torch.log_softmax(logits_nv.float() / temperature_n.where(temperature_n > 0, 1.0)[:, None], dim=-1)
    cdf_nv = logprobs_nv.exp().cumsum(-1, dtype=torch.float64)
    target_n = uniform(seed_n, index_n) * cdf_nv[:, -1]
    sampled_n = torch.searchsorted(cdf_nv, target_n[:, None], right=True)[:, 0].clamp_(max=cdf_nv.shape[1] - 1)
    tokens_n = sampled_n.where(temperature_n > 0, logprobs_nv.argmax(-1))
    return torch.stack([tokens_n.float(), logprobs_nv.gather(1, tokens_n[:, None])[:, 0]])


def uniform(seed_n: Tensor, index_n: Tensor) -> Tensor:
    """`sampling.counter_uniform` in torch's signed integers, which wrap as unsigned ones do."""

    def shifted(state: Tensor, bits: int) -> Tensor:
        return (state >> bits) & ((1 << (64 - bits)) - 1)

    def mixed(state: Tensor) -> Tensor:
        state = (state ^ shifted(state, 30)) * _MIX_1
        state = (state ^ shifted(state, 27)) * _MIX_2
        return state ^ shifted(state, 31)

    return (shifted(mixed(mixed(seed_n + _GOLDEN) + index_n * _GOLDEN), 32).double() + 0.5) * 2.0**-32
