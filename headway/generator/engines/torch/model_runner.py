"""Forward steps over slots: new prompts and running requests in the same matrix products.

Shapes: n decode rows, p prefill tokens, d width, h query heads, k KV heads, g = h / k, c head dimension,
t KV positions attended to, v vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from headway.generator.engines.requests import EngineRequest
from headway.generator.engines.sampling import RowSampling, Sampled, sample_tokens
from headway.generator.engines.torch.adapters import AdapterRevisions
from headway.generator.engines.torch.kv_cache import SlotCache
from headway.generator.engines.torch.native_decode import NativeDecode, can_decode
from headway.models.configuration import Scores
from headway.models.cpu import native
from headway.models.decoder import Decoder, DecoderLayer
from headway.models.hidden_states import HiddenStates
from headway.models.lora import Lora
from headway.models.masked import causal_attention, masked_attention, visible_mask
from headway.records.generation import POLICY_ADAPTER, PathScores, Probe, ProbeScores
from headway.records.tokens import EXPERTS, TokenRows

KV_BUCKET_TOKENS = 32  # the KV range attended to grows in these steps
_NONE = np.zeros(0, np.int64)


class Prefill(NamedTuple):
    """A sequence whose KV is computed from ``start`` on, for all of ``slots``, which have the tokens before."""

    ids: Sequence[int] | np.ndarray  # [L], L > start
    slots: list[int]
    start: int = 0
    update: int = 0  # number of the update whose weights compute it: see `AdapterRevisions`

    @property
    def tokens(self) -> int:
        """Count of tokens to compute."""
        return len(self.ids) - self.start


class _Block(NamedTuple):
    """Prefills of equal start and length, contiguous among the packed rows."""

    first: int  # packed row
    count: int
    length: int
    start: int  # KV tokens computed before
    slots: Tensor  # [m] target slots
    source: Tensor | None  # [m] index of each target's prefill in the block; None: one to one
    leaders: Tensor  # [count] one target slot of each prefill

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.count * self.length)


class ModelRunner:
    """Runs a Decoder over a SlotCache. Not thread-safe; keeps no request state."""

    def __init__(
        self,
        model: Decoder,
        slots: int,
        context_tokens: int,
        fixed_shapes: bool,
        native_kernels: bool = True,
        keep_experts: bool = False,
    ) -> None:
        """``keep_experts``: keep the experts of every token of a mixture, for `take_rows`."""
        self.model = model
        self._layers = cast("list[DecoderLayer]", list(model.layers))
        self.fixed_shapes = fixed_shapes
        for layer in self._layers:
            layer.fixed_shapes = fixed_shapes
            layer.routed = [] if keep_experts and layer.kind.sparse else None
        self._parameters = dict(model.named_parameters())
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        with torch.inference_mode():
            position = torch.arange(context_tokens, device=self.device)
            self._cos, self._sin = model.rope(position)
            probe_1d = model.embed(position[:1])
            q, k, _ = self._layers[0].project_qkv(probe_1d, self._cos[:1], self._sin[:1])
            self._position_t = position
            self.heads, self.kv_heads, self.head_dimension = q.shape[1], k.shape[1], q.shape[2]
            sizes = (len(self._layers), slots, self.kv_heads, context_tokens, self.head_dimension)
            self.cache = SlotCache(*sizes, self.dtype, self.device, model.config.routing if keep_experts else None)
        self.adapters = AdapterRevisions(model, fixed_shapes)
        self._kernels = native.kernels_for(self.dtype, self.device) if native_kernels else None
        attention_fits = native.attention_fits(self.heads // self.kv_heads, self.head_dimension)
        self._attention_kernels = self._kernels if attention_fits else None
        self._native_decode: NativeDecode | None = None
        self.weights_changed()
        self._plain_windows = {
            layer.kind.scores.window for layer in self._layers if not self._natively(layer.kind.scores)
        }

    def register(self, name: str, lora: Lora, version: int, update: int) -> None:
        """See `AdapterRevisions.register`; its dtype and device become the model's."""
        for pair in lora.pairs():
            pair.a.data, pair.b.data = (matrix.data.to(self.device, self.dtype) for matrix in (pair.a, pair.b))
        self.adapters.register(name, lora, version, update, self._native_decode)

    def stage(self, name: str, content: Tensor, size: int) -> None:
        """Prepare the kernels' copy of the next value of a weight, of which ``size`` bytes are there, beside the
        steps."""
        if self._kernels is not None and (weight := self._parameters.get(name)) is not None and content.ndim == 2:
            self._kernels.stage(weight, content, size // content[0].nbytes)

    def weights_changed(self, *, staged: bool = False) -> None:
        """Repack the kernels' copies of the weights; call this after every change of the model's weights. ``staged``:
        to what `stage` was called with."""
        model, kernels = self.model, self._kernels
        if kernels is None:
            return
        lookup_weight = model.embedding_weight if model.head_weight is not None else None
        matrices = (weight for weight in model.parameters() if weight.ndim == 2 and weight is not lookup_weight)
        kernels.pack(matrices, staged=staged)
        if self._attention_kernels is not None and can_decode(model, kernels):
            self._native_decode = NativeDecode(model, self.cache, kernels)

    def forget_panels(self) -> None:
        """Free the kernels' copies of the weights until `weights_changed`: nothing can be computed meanwhile."""
        self._native_decode = None
        if self._kernels is not None:
            self._kernels.pack(())

    def tensors(self) -> Iterator[Tensor]:
        """Yield weights, buffers and the cache: all that can leave the device."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        yield self.cache.all
        if self.cache.routing is not None:
            yield self.cache.experts

    @torch.inference_mode()
    def prefill(self, prefills: Sequence[Prefill]) -> None:
        """Compute and store KV, without sampling."""
        if self.fixed_shapes:
            for prefill in prefills:
                self._forward([prefill], None, None, _NONE, 0)
        elif prefills:
            self._forward(prefills, None, None, _NONE, 0)

    @torch.inference_mode()
    def sample(self, logits_nv: Tensor, how: RowSampling) -> Sampled:
        """Sample token ids and log-probabilities."""
        with native.using(self._kernels):
            return sample_tokens(logits_nv, how)

    @torch.inference_mode()
    def step(
        self, prefills: Sequence[Prefill], pending: np.ndarray, position: np.ndarray, update: np.ndarray = _NONE
    ) -> Tensor:
        """Store KV of ``prefills``, then of each pending token, and return its successors' logits [n, v]. ``update``:
        of each row, as `Prefill.update`.

        Decode row i is slot i. A slot may be prefilled and decoded in the same step: in every layer its prefix is
        written before decode rows attend to it.
        """
        if self.fixed_shapes:
            self.prefill(prefills)
            prefills = ()
        longest_tokens = int(position.max()) + 1
        reach_tokens = self.cache.context_tokens
        if not self.fixed_shapes:
            reach_tokens = min(reach_tokens, -(-longest_tokens // KV_BUCKET_TOKENS) * KV_BUCKET_TOKENS)
        pending_n = torch.from_numpy(pending).to(self.device)
        position_n = torch.from_numpy(position).to(self.device)
        x_nd = self._forward(prefills, pending_n, position_n, update, reach_tokens)
        assert x_nd is not None
        with native.using(self._kernels):
            return self.model.head(x_nd)

    @torch.inference_mode()
    def score(self, probe: Probe) -> ProbeScores:
        """Score a probe without a prompt on a cache of its own: by one prefill (``prefill``), and by two and then token
        by token (``decode``)."""
        ids, revision, scores_by_path = probe.ids, self.adapters.newest(POLICY_ADAPTER), dict[str, PathScores]()
        update = 0 if revision is None else revision.update
        kept_cache, kept_decode = self.cache, self._native_decode
        self.cache = SlotCache(
            len(self._layers), 1, self.kv_heads, len(ids), self.head_dimension, self.dtype, self.device
        )
        if kept_decode is not None and self._kernels is not None:
            self._native_decode = NativeDecode(self.model, self.cache, self._kernels)
        third, token_count = max(1, len(ids) // 3), len(ids)
        try:
            for path, ends in {"prefill": [token_count], "decode": [third, *range(2 * third, token_count + 1)]}.items():
                states, logits = HiddenStates(), list[Tensor]()
                for start, end in itertools.pairwise([0, *ends]):
                    logits.append(
                        self._score_part(ids[:end], start, update, path == "decode" and end > 2 * third, states)
                    )
                    states.end_pass()
                scores_by_path[path] = states.scores(torch.cat(logits), ids)
        finally:
            self.cache, self._native_decode = kept_cache, kept_decode
            for layer in self._layers:
                if layer.routed:  # experts of the probe, which no cache takes
                    layer.routed.clear()
        return ProbeScores(probe=probe, precision=str(self.dtype).removeprefix("torch."), paths=scores_by_path)

    def _score_part(self, ids: tuple[int, ...], start: int, update: int, decodes: bool, states: HiddenStates) -> Tensor:
        """Return the logits after each of ``ids`` from ``start`` on, and store their KV."""
        if decodes:
            pending, position = (torch.tensor([number], device=self.device) for number in (ids[start], start))
            x_nd = self._forward([], pending, position, np.array([update]), self.cache.context_tokens, states)
        else:
            x_nd = self._forward([Prefill(ids, [0], start, update)], None, None, _NONE, 0, states)
        assert x_nd is not None
        with native.using(self._kernels):
            return self.model.head(x_nd)

    def _forward(
        self,
        prefills: Sequence[Prefill],
        pending_n: Tensor | None,
        position_n: Tensor | None,
        update: np.ndarray,
        reach: int,
        states: HiddenStates | None = None,
    ) -> Tensor | None:
        """Return the residual stream after the last layer of decode rows; with ``states`` of prefilled ones too."""
        prefills = sorted(prefills, key=lambda prefill: (prefill.start, prefill.tokens))
        if self.adapters:
            self.adapters.rows.assign(np.concatenate([update, *(np.full(p.tokens, p.update) for p in prefills)]))
        with native.using(self._kernels):
            return self._layers_forward(prefills, pending_n, position_n, reach, states)

    def _layers_forward(
        self,
        prefills: Sequence[Prefill],
        pending_n: Tensor | None,
        position_n: Tensor | None,
        reach: int,
        states: HiddenStates | None,
    ) -> Tensor | None:
        n = 0 if pending_n is None else len(pending_n)
        ids, position, blocks = self._pack(prefills, n)
        if pending_n is not None and position_n is not None:
            ids = pending_n if ids is None else torch.cat([pending_n, ids])
            position = position_n if position is None else torch.cat([position_n, position])
        assert ids is not None
        assert position is not None
        x_nd = self.model.embed(ids)
        if states is not None:
            states.add(x_nd)
        cos, sin = self._cos[position], self._sin[position]
        if position_n is not None and not blocks and self._native_decode is not None:
            row_order, adapter_groups = self.adapters.rows.groups()
            return self._native_decode(x_nd, cos, sin, position_n, row_order, adapter_groups, states)
        cache_rows = None
        window_bias: dict[int | None, Tensor] = {}
        if position_n is not None and self._plain_windows:
            cache_rows = self.cache.rows(position_n)
            window_bias = {window: self._bias(position_n, reach, x_nd.dtype, window) for window in self._plain_windows}
        last_index, all_blocks = len(self._layers) - 1, blocks
        for index, layer in enumerate(self._layers):
            scores = layer.kind.scores
            q, k, v = layer.project_qkv(x_nd, cos, sin)
            self._store_prefills(index, k, v, blocks)
            if index == last_index and states is None:  # of prefilled rows only the KV is needed
                if n == 0:
                    self._store_experts(position_n, all_blocks)
                    return None
                x_nd, blocks = x_nd[:n], ()
            parts: list[Tensor] = []
            if position_n is not None and self._natively(scores):
                parts.append(self._native_attention(index, (q[:n], k[:n], v[:n]), None, position_n, scores, write=True))
            elif cache_rows is not None:
                self.cache.flat_keys[index].index_copy_(0, cache_rows, k[:n].reshape(-1, self.head_dimension))
                self.cache.flat_values[index].index_copy_(0, cache_rows, v[:n].reshape(-1, self.head_dimension))
                parts.append(self._decode_attention(index, q[:n], window_bias[scores.window], reach, scores))
            parts.extend(self._prefill_attention(index, q, k, v, block, position, scores) for block in blocks)
            x_nd = layer.finish(x_nd, parts[0] if len(parts) == 1 else torch.cat(parts))
            if states is not None:
                states.add(x_nd)
        self._store_experts(position_n, all_blocks)
        return x_nd

    def _pack(self, prefills: Sequence[Prefill], n: int) -> tuple[Tensor | None, Tensor | None, tuple[_Block, ...]]:
        """Pack prefills, sorted by start and length, after the n decode rows: (ids, positions, blocks)."""
        if not prefills:
            return None, None, ()
        blocks: list[_Block] = []
        first_row = n
        for (start, length), group in itertools.groupby(prefills, key=lambda prefill: (prefill.start, prefill.tokens)):
            equal_prefills = list(group)
            slots = [slot for prefill in equal_prefills for slot in prefill.slots]
            source_indices = [i for i, prefill in enumerate(equal_prefills) for _ in prefill.slots]
            blocks.append(
                _Block(
                    first_row,
                    len(equal_prefills),
                    length,
                    start,
                    torch.tensor(slots, device=self.device),
                    torch.tensor(source_indices, device=self.device) if len(slots) > len(equal_prefills) else None,
                    torch.tensor([prefill.slots[0] for prefill in equal_prefills], device=self.device),
                )
            )
            first_row += len(equal_prefills) * length
        ids = np.concatenate([np.asarray(sequence.ids[sequence.start :], dtype=np.int64) for sequence in prefills])
        position = np.concatenate([np.arange(sequence.start, len(sequence.ids)) for sequence in prefills])
        return torch.from_numpy(ids).to(self.device), torch.from_numpy(position).to(self.device), tuple(blocks)

    def _natively(self, scores: Scores) -> bool:
        """Whether the native kernels compute attention of decode rows with these scores."""
        return self._attention_kernels is not None and scores.softcap is None

    def _bias(self, position_n: Tensor, reach: int, dtype: torch.dtype, window: int | None) -> Tensor:
        """Additive mask [n, 1, 1, t]: 0 up to the row's own position as far back as the window, -inf elsewhere."""
        bias = torch.zeros((len(position_n), reach), dtype=dtype, device=self.device)
        bias.masked_fill_(self._position_t[None, :reach] > position_n[:, None], float("-inf"))
        if window is not None and window < reach:
            bias.masked_fill_(self._position_t[None, :reach] <= position_n[:, None] - window, float("-inf"))
        return bias[:, None, None, :]

    def _decode_attention(self, index: int, q_nhc: Tensor, bias: Tensor, reach: int, scores: Scores) -> Tensor:
        """Attention of decode rows, [n, h * c]. A KV head's g queries lie on the query axis: KV isn't repeated."""
        n = len(q_nhc)
        q = q_nhc.reshape(n, self.kv_heads, -1, self.head_dimension)
        keys = self.cache.keys[index][:n, :, :reach]
        values = self.cache.values[index][:n, :, :reach]
        out = masked_attention(q, keys, values, bias, scores)
        return out.reshape(n, -1)

    def _native_attention(
        self, index: int, qkv: Sequence[Tensor], slot_n: Tensor | None, position_n: Tensor, scores: Scores, write: bool
    ) -> Tensor:
        """Attention of single rows by the native kernels, each over its own length or window."""
        assert self._attention_kernels is not None
        (q, k, v), keys, values = qkv, self.cache.keys[index], self.cache.values[index]
        return self._attention_kernels.attention(
            q, k, v, keys, values, slot_n, position_n, scores.scale, write, scores.window
        )

    def _store_prefills(self, index: int, k: Tensor, v: Tensor, blocks: Sequence[_Block]) -> None:
        for block in blocks:
            block_shape = (block.count, block.length, self.kv_heads, self.head_dimension)
            for cache, new_rows in ((self.cache.keys[index], k), (self.cache.values[index], v)):
                kv_rows = new_rows[block.rows].view(block_shape).transpose(1, 2)
                end = block.start + block.length
                cache[block.slots, :, block.start : end] = kv_rows if block.source is None else kv_rows[block.source]

    def _store_experts(self, position_n: Tensor | None, blocks: Sequence[_Block]) -> None:
        """Keep the experts of a step's tokens. Those of prefilled ones in the last layer are unknown: nothing computes
        them, as nothing reads them."""
        cache, column = self.cache, 0
        for layer in self._layers:
            if cache.routing is None or layer.routed is None:
                continue
            chosen_experts = layer.routed.pop().to(cache.experts.dtype) if layer.routed else None
            columns, column = slice(column, column + cache.routing.per_token), column + cache.routing.per_token
            if position_n is not None and chosen_experts is not None:
                n = len(position_n)
                cache.experts[torch.arange(n, device=self.device), position_n, columns] = chosen_experts[:n]
            for block in blocks:
                block_experts = cache.unknown
                if chosen_experts is not None and len(chosen_experts) >= block.rows.stop:
                    block_experts = chosen_experts[block.rows].view(block.count, block.length, -1)
                    block_experts = block_experts if block.source is None else block_experts[block.source]
                cache.experts[block.slots, block.start : block.start + block.length, columns] = block_experts

    def take_rows(self, request: EngineRequest, position: np.ndarray) -> dict[str, TokenRows]:
        """Return the experts of a running request's tokens that its caller lacks, as rows; {} if none are kept.
        ``position``: count of computed tokens, by slot."""
        routing, first_token = self.cache.routing, request.rows
        if routing is None or request.slot < 0 or first_token >= (end_token := int(position[request.slot])):
            return {}
        request.rows = end_token
        experts = self.cache.experts[request.slot, first_token:end_token].cpu().numpy()
        return {EXPERTS: TokenRows.of(experts.view(f"<u{routing.item_bytes}"), routing.item_bytes)}

    def _prefill_attention(
        self, index: int, q: Tensor, k: Tensor, v: Tensor, block: _Block, position: Tensor, scores: Scores
    ) -> Tensor:
        q, k, v = (tensor[block.rows] for tensor in (q, k, v))
        if block.start and self._natively(scores):
            slot_n = block.leaders.repeat_interleave(block.length)
            return self._native_attention(index, (q, k, v), slot_n, position[block.rows], scores, write=False)
        block_shape = (block.count, block.length, -1, self.head_dimension)
        q, k, v = (tensor.view(block_shape).transpose(1, 2) for tensor in (q, k, v))
        if block.start:  # the whole context is in the cache: the block's own part was just stored
            end = block.start + block.length
            k, v = self.cache.keys[index][block.leaders, :, :end], self.cache.values[index][block.leaders, :, :end]
            mask = visible_mask(end, scores.window, self.device, block.start)
            out = masked_attention(q, k, v, mask, scores)
        else:
            out = causal_attention(q, k, v, scores)
        return out.transpose(1, 2).reshape(block.count * block.length, -1)
