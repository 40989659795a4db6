"""One forward step over slots: new prompts and running requests in the same packed linear layers.

Shapes: n decode rows, p prefill tokens, d width, h query heads, k KV heads, g = h / k, c head dimension,
t KV positions looked at, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headway.generator.kv_cache import SlotCache
from headway.models.decoder import Decoder, DecoderLayer

KV_BUCKET_TOKENS = 32  # the KV range looked at grows in these steps


class Prefill(NamedTuple):
    """A sequence whose KV is to be computed, and the slots that all get it."""

    ids: Sequence[int] | np.ndarray  # [L], L >= 1
    slots: list[int]


class _Block(NamedTuple):
    """Prefills of equal length, contiguous among the packed rows."""

    start: int
    count: int
    length: int
    slots: Tensor  # [m] target slots
    source: Tensor | None  # [m] which of the ``count`` each target takes; None: one to one


class ModelRunner:
    """Runs a Decoder over a SlotCache. Not thread-safe; keeps no request state."""

    def __init__(self, model: Decoder, slots: int, context_tokens: int, fixed_shapes: bool) -> None:
        self.model = model
        self._layers = cast("list[DecoderLayer]", list(model.layers))
        self.fixed_shapes = fixed_shapes
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        with torch.inference_mode():
            position = torch.arange(context_tokens, device=self.device)
            self._cos, self._sin = model.rope(position)
            probe_1d = model.embed(position[:1])
            q, k, _ = self._layers[0].project_qkv(probe_1d, self._cos[:1], self._sin[:1])
            self.vocabulary = model.head(probe_1d).shape[-1]
            self._position_t = position
            self.heads, self.kv_heads, self.head_dimension = q.shape[1], k.shape[1], q.shape[2]
            self.cache = SlotCache(
                len(self._layers), slots, self.kv_heads, context_tokens, self.head_dimension, self.dtype, self.device
            )
        self._scale = self.head_dimension**-0.5

    @torch.inference_mode()
    def prefill(self, prefills: Sequence[Prefill]) -> None:
        """Compute and store KV only."""
        if self.fixed_shapes:
            for one in prefills:
                self._forward([one], None, None, 0)
        elif prefills:
            self._forward(prefills, None, None, 0)

    @torch.inference_mode()
    def step(self, prefills: Sequence[Prefill], pending: np.ndarray, position: np.ndarray) -> Tensor:
        """Store KV of ``prefills``, then of each pending token, and return its successors' logits [n, v].

        Decode row i is slot i. A slot may be prefilled and decoded in the same step: in every layer its prefix is
        written before decode rows look at it.
        """
        if self.fixed_shapes:
            self.prefill(prefills)
            prefills = ()
        longest = int(position.max()) + 1
        reach = self.cache.context_tokens
        if not self.fixed_shapes:
            reach = min(reach, -(-longest // KV_BUCKET_TOKENS) * KV_BUCKET_TOKENS)
        pending_n = torch.from_numpy(pending).to(self.device)
        position_n = torch.from_numpy(position).to(self.device)
        x_nd = self._forward(prefills, pending_n, position_n, reach)
        assert x_nd is not None
        return self.model.head(x_nd)

    def _forward(
        self, prefills: Sequence[Prefill], pending_n: Tensor | None, position_n: Tensor | None, reach: int
    ) -> Tensor | None:
        n = 0 if pending_n is None else len(pending_n)
        ids, position, blocks = self._pack(prefills, n)
        if pending_n is not None and position_n is not None:
            ids = pending_n if ids is None else torch.cat([pending_n, ids])
            position = position_n if position is None else torch.cat([position_n, position])
        assert ids is not None
        assert position is not None
        x_nd = self.model.embed(ids)
        cos, sin = self._cos[position], self._sin[position]
        rows = bias = None
        if position_n is not None:
            rows = self.cache.rows(position_n)
            bias = self._bias(position_n, reach, x_nd.dtype)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            q, k, v = layer.project_qkv(x_nd, cos, sin)
            self._store_prefills(index, k, v, blocks)
            if index == last:  # prefilled rows are needed no further than their KV
                if n == 0:
                    return None
                x_nd, blocks = x_nd[:n], ()
            parts: list[Tensor] = []
            if rows is not None and bias is not None:
                self.cache.flat_keys[index].index_copy_(0, rows, k[:n].reshape(-1, self.head_dimension))
                self.cache.flat_values[index].index_copy_(0, rows, v[:n].reshape(-1, self.head_dimension))
                parts.append(self._decode_attention(index, q[:n], bias, reach))
            parts.extend(self._prefill_attention(q, k, v, block) for block in blocks)
            x_nd = layer.finish(x_nd, parts[0] if len(parts) == 1 else torch.cat(parts))
        return x_nd

    def _pack(self, prefills: Sequence[Prefill], n: int) -> tuple[Tensor | None, Tensor | None, tuple[_Block, ...]]:
        """Sort prefills by length and lay them out after the n decode rows."""
        if not prefills:
            return None, None, ()
        ordered = sorted(prefills, key=lambda prefill: len(prefill.ids))
        lengths = [len(prefill.ids) for prefill in ordered]
        blocks: list[_Block] = []
        start, first = n, 0
        while first < len(ordered):
            length = lengths[first]
            end = first
            while end < len(ordered) and lengths[end] == length:
                end += 1
            same = ordered[first:end]
            slots = [slot for prefill in same for slot in prefill.slots]
            source = [i for i, prefill in enumerate(same) for _ in prefill.slots]
            blocks.append(
                _Block(
                    start,
                    len(same),
                    length,
                    torch.tensor(slots, device=self.device),
                    torch.tensor(source, device=self.device) if len(slots) > len(same) else None,
                )
            )
            start += len(same) * length
            first = end
        ids = np.concatenate([np.asarray(prefill.ids, dtype=np.int64) for prefill in ordered])
        position = np.concatenate([np.arange(length) for length in lengths])
        return torch.from_numpy(ids).to(self.device), torch.from_numpy(position).to(self.device), tuple(blocks)

    def _bias(self, position_n: Tensor, reach: int, dtype: torch.dtype) -> Tensor:
        """Additive mask [n, 1, 1, t]: 0 up to the row's own position, -inf after it."""
        bias = torch.zeros((len(position_n), reach), dtype=dtype, device=self.device)
        bias.masked_fill_(self._position_t[None, :reach] > position_n[:, None], float("-inf"))
        return bias[:, None, None, :]

    def _decode_attention(self, index: int, q_nhc: Tensor, bias: Tensor, reach: int) -> Tensor:
        """The g queries of a KV head stand in the query-length axis, so KV is never repeated."""
        n = len(q_nhc)
        q = q_nhc.reshape(n, self.kv_heads, -1, self.head_dimension)
        keys = self.cache.keys[index][:n, :, :reach]
        values = self.cache.values[index][:n, :, :reach]
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias, scale=self._scale)
        return out.reshape(n, -1)

    def _store_prefills(self, index: int, k: Tensor, v: Tensor, blocks: Sequence[_Block]) -> None:
        for block in blocks:
            end = block.start + block.count * block.length
            shape = (block.count, block.length, self.kv_heads, self.head_dimension)
            for cache, new in ((self.cache.keys[index], k), (self.cache.values[index], v)):
                rows = new[block.start : end].view(shape).transpose(1, 2)
                cache[block.slots, :, : block.length] = rows if block.source is None else rows[block.source]

    def _prefill_attention(self, q: Tensor, k: Tensor, v: Tensor, block: _Block) -> Tensor:
        rows = slice(block.start, block.start + block.count * block.length)
        shape = (block.count, block.length, -1, self.head_dimension)
        q, k, v = (one[rows].view(shape).transpose(1, 2) for one in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self._scale, enable_gqa=self.heads != self.kv_heads
        )
        return out.transpose(1, 2).reshape(block.count * block.length, -1)
