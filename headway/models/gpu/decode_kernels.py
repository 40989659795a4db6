"""Triton kernels of a decoding step on a paged KV cache; `generator/engines/torch/operators.py` has their references.

Shapes: n rows, h query heads, k KV heads, g = h / k, c head dimension, b blocks of the cache, t tokens of a block,
w blocks of a row's table, s splits, v vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language
from torch import Tensor
from triton.language import constexpr

jit: Any = triton.jit  # a kernel isn't called as it is written
tl: Any = triton.language
_TILE = 64  # keys at a time
_SPLIT_PROGRAMS = 512  # about four for each multiprocessor of an H100 or H200
_MAX_SPLITS = 16
_VOCABULARY_TILE = 4096


@jit
def store_kv_kernel(
    k, v, keys, values, block_n, offset_n, k_stride, v_stride, HEADS: constexpr, TOKENS: constexpr,
    C: constexpr, PADDED_C: constexpr,
):  # fmt: skip
    """Copy a row's key and value of a head into its cell."""
    row, head = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, PADDED_C)
    inside = column < C
    cell = (tl.load(block_n + row).to(tl.int64) * HEADS + head) * TOKENS + tl.load(offset_n + row)
    tl.store(keys + cell * C + column, tl.load(k + row * k_stride + head * C + column, inside), inside)
    tl.store(values + cell * C + column, tl.load(v + row * v_stride + head * C + column, inside), inside)


@jit
def attend_kernel(
    q, keys, values, table, position, out, lse, scale, softcap, window, q_stride, table_stride, HEADS: constexpr,
    GROUP: constexpr, PADDED_GROUP: constexpr, TOKENS: constexpr, C: constexpr, PADDED_C: constexpr,
    SPLITS: constexpr, TILE: constexpr, CAPPED: constexpr,
):  # fmt: skip
    """Attention of a KV head's queries to one split of the row's positions, by an online softmax."""
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    last = tl.load(position + row).to(tl.int32)
    first = tl.maximum(last + 1 - window, 0)
    split_tokens = tl.cdiv(last + 1 - first, SPLITS)
    begin = first + split * split_tokens
    end = tl.minimum(begin + split_tokens, last + 1)
    g, c = tl.arange(0, PADDED_GROUP), tl.arange(0, PADDED_C)
    inside_gc = (g < GROUP)[:, None] & (c < C)[None, :]
    q_gc = tl.load(q + row * q_stride + (head * GROUP + g)[:, None] * C + c[None, :], inside_gc, 0.0)
    largest = tl.full([PADDED_GROUP], -float("inf"), tl.float32)
    total = tl.zeros([PADDED_GROUP], tl.float32)
    sum_gc = tl.zeros([PADDED_GROUP, PADDED_C], tl.float32)
    for start in tl.range(begin, end, TILE, num_stages=3):
        key = start + tl.arange(0, TILE)
        inside = key < end
        block = tl.load(table + row * table_stride + key // TOKENS, inside, 0).to(tl.int64)
        cell = ((block * HEADS + head) * TOKENS + key % TOKENS)[:, None] * C + c[None, :]
        inside_tc = inside[:, None] & (c < C)[None, :]
        scores = tl.dot(q_gc, tl.trans(tl.load(keys + cell, inside_tc, 0.0)), input_precision="ieee") * scale
        if CAPPED:
            scores = (2 * tl.sigmoid(2 * scores / softcap) - 1) * softcap
        scores = tl.where(inside[None, :], scores, -float("inf"))
        next_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - next_largest[:, None])
        shrunk = tl.exp(largest - next_largest)
        value_tc = tl.load(values + cell, inside_tc, 0.0)
        sum_gc = sum_gc * shrunk[:, None] + tl.dot(weights.to(value_tc.dtype), value_tc, input_precision="ieee")
        total = total * shrunk + tl.sum(weights, 1)
        largest = next_largest
    head_g = (row * HEADS + head) * GROUP + g
    mean_gc = sum_gc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + (head_g * SPLITS + split)[:, None] * C + c[None, :], mean_gc.to(out.dtype.element_ty), inside_gc)
    if SPLITS > 1:  # an empty split has no share
        share = tl.where(total > 0, largest + tl.log(tl.where(total > 0, total, 1.0)), -float("inf"))
        tl.store(lse + head_g * SPLITS + split, share, g < GROUP)


@jit
def merge_kernel(parts, lse, out, SPLITS: constexpr, C: constexpr, PADDED_C: constexpr):
    """Merge the splits of a row's query head by their log-sum-exps."""
    head = tl.program_id(0)
    split, c = tl.arange(0, SPLITS), tl.arange(0, PADDED_C)
    lse_s = tl.load(lse + head * SPLITS + split)
    weight_s = tl.exp(lse_s - tl.max(lse_s, 0))
    part_sc = tl.load(parts + (head * SPLITS + split)[:, None] * C + c[None, :], (c < C)[None, :], 0.0)
    mean_c = tl.sum(part_sc * weight_s[:, None], 0) / tl.sum(weight_s, 0)
    tl.store(out + head * C + c, mean_c.to(out.dtype.element_ty), c < C)


@jit
def mixed(state):
    """SplitMix64's finaliser, of unsigned numbers."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@jit
def sample_kernel(
    logits, seed_n, index_n, temperature_n, out, rows, vocabulary, seed_stride, index_stride, temperature_stride,
    TILE: constexpr,
):  # fmt: skip
    """Sample one row's token: pass by pass its largest logit, the total mass, the token at the uniform share of it."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * vocabulary
    temperature = tl.load(temperature_n + row * temperature_stride)
    divisor = tl.where(temperature > 0, temperature, 1.0)
    column = tl.arange(0, TILE)
    largest, likeliest = -float("inf"), 0
    for start in tl.range(0, vocabulary, TILE):
        z = tl.load(logits + start + column, start + column < vocabulary, -float("inf")).to(tl.float32)
        tile_largest = tl.max(z, 0)
        first = tl.min(tl.where(z == tile_largest, start + column, vocabulary), 0)
        likeliest = tl.where(tile_largest > largest, first, likeliest)
        largest = tl.maximum(largest, tile_largest)
    largest = largest / divisor
    total = tl.full([], 0.0, tl.float64)
    for start in tl.range(0, vocabulary, TILE):
        z = tl.load(logits + start + column, start + column < vocabulary, -float("inf")).to(tl.float32)
        total += tl.sum(tl.exp(z / divisor - largest).to(tl.float64), 0)
    seed = tl.load(seed_n + row * seed_stride).to(tl.uint64)
    index = tl.load(index_n + row * index_stride).to(tl.uint64)
    bits = mixed(mixed(seed + 0x9E3779B97F4A7C15) + index * 0x9E3779B97F4A7C15)
    target = total * (((bits >> 32).to(tl.float64) + 0.5) * 2.3283064365386963e-10)  # 2^-32
    passed, token = tl.full([], 0.0, tl.float64), vocabulary - 1
    for start in tl.range(0, vocabulary, TILE):
        z = tl.load(logits + start + column, start + column < vocabulary, -float("inf")).to(tl.float32)
        mass = tl.exp(z / divisor - largest).to(tl.float64)
        tile_mass = tl.sum(mass, 0)
        if (passed <= target) & (passed + tile_mass > target):
            last = tl.max(tl.where(mass > 0, start + column, 0), 0)  # rounding may leave none above the target
            above = (passed + tl.cumsum(mass, 0) > target) & (mass > 0)
            token = tl.min(tl.where(above, start + column, last), 0)
        passed += tile_mass
    token = tl.where(temperature > 0, token, likeliest)
    logprob = tl.load(logits + token).to(tl.float32) / divisor - largest - tl.log(total).to(tl.float32)
    tl.store(out + row, token.to(tl.float32))
    tl.store(out + rows + row, logprob)


def store_kv(k_nkc: Tensor, v_nkc: Tensor, keys: Tensor, values: Tensor, block_n: Tensor, offset_n: Tensor) -> None:
    """See `operators.store_kv`; a row's heads lie one after the other."""
    _, heads, tokens, c = keys.shape
    strides, sizes = (k_nkc.stride(0), v_nkc.stride(0)), (heads, tokens, c, triton.next_power_of_2(c))
    store_kv_kernel[len(k_nkc), heads](k_nkc, v_nkc, keys, values, block_n, offset_n, *strides, *sizes)


def split_count(rows: int, kv_heads: int) -> int:
    """Count of splits, a power of two: it depends on the shapes alone, so that equal steps give equal bits."""
    return min(_MAX_SPLITS, triton.next_power_of_2(triton.cdiv(_SPLIT_PROGRAMS, rows * kv_heads)))


def paged_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, position: Tensor, scale: float, window: int, softcap: float
) -> Tensor:
    """See `operators.paged_attention`; a row's heads lie one after the other."""
    (n, heads, c), (_, kv_heads, tokens, _) = q.shape, keys.shape
    group, splits = heads // kv_heads, split_count(n, kv_heads)
    out = q.new_empty(n, heads * c)
    parts, lse = out, out
    if splits > 1:
        parts = torch.empty(n, heads, splits, c, dtype=torch.float32, device=q.device)
        lse = torch.empty(n, heads, splits, dtype=torch.float32, device=q.device)
    numbers = scale, softcap, window or 1 << 30, q.stride(0), table.stride(0)
    padded_c = max(16, triton.next_power_of_2(c))
    sizes = (kv_heads, group, max(16, triton.next_power_of_2(group)), tokens, c, padded_c, splits, _TILE, softcap > 0)
    attend_kernel[n, kv_heads, splits](q, keys, values, table, position, parts, lse, *numbers, *sizes)
    if splits > 1:
        merge_kernel[n * heads,](parts, lse, out, splits, c, padded_c)
    return out


def sample(logits: Tensor, seed_n: Tensor, index_n: Tensor, temperature_n: Tensor) -> Tensor:
    """See `operators.sample`."""
    logits = logits.contiguous()
    (n, v), out = logits.shape, torch.empty(2, len(logits), device=logits.device)
    strides, tile = (
        (x.stride(0) for x in (seed_n, index_n, temperature_n)),
        min(_VOCABULARY_TILE, triton.next_power_of_2(v)),
    )
    sample_kernel[n,](logits, seed_n, index_n, temperature_n, out, n, v, *strides, tile, num_warps=8)
    return out
