"""Forward steps over rows with block tables: new prompts and running requests in the same matrix products.

Shapes: n decode rows, m prefills, d width, h query heads, k KV heads, c head dimension, w blocks of a row's table,
v vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from headway.generator.engines.requests import EngineRequest
from headway.generator.engines.sampling import RowSampling, Sampled, sample_tokens
from headway.generator.engines.torch.adapters import AdapterRevisions
from headway.generator.engines.torch.block_pool import BLOCK_TOKENS, blocks_for, whole_blocks
from headway.generator.engines.torch.kv_cache import PagedCache
from headway.generator.engines.torch.native_decode import NativeDecode, can_decode
from headway.generator.engines.torch.operators import gathered, paged_attention, store_kv
from headway.models.configuration import Scores
from headway.models.cpu import native
from headway.models.decoder import Decoder, DecoderLayer
from headway.models.experts import aligned
from headway.models.hidden_states import HiddenStates
from headway.models.loading import OverwrittenValues
from headway.models.lora import Lora
from headway.models.masked import causal_attention, masked_attention, visible_mask
from headway.records.generation import POLICY_ADAPTER, PathScores, Probe, ProbeScores
from headway.records.tokens import EXPERTS, ExpertRouting, TokenRows

_NONE = np.zeros(0, np.int64)
_FEW = 1 / 16  # of all values: more are packed anew sooner than overwritten one by one


class Prefill(NamedTuple):
    """A sequence whose KV is computed from ``start`` on, for a row of the block table that has the tokens before."""

    ids: Sequence[int] | np.ndarray  # [L], L > start
    row: int
    start: int = 0
    update: int = 0  # number of the update whose weights compute it: see `AdapterRevisions`

    @property
    def tokens(self) -> int:
        """Count of tokens to compute."""
        return len(self.ids) - self.start


class _EqualPrefills(NamedTuple):
    """Prefills of equal start and length, contiguous among the packed rows."""

    first: int  # packed row
    length: int
    start: int  # KV tokens computed before
    row_m: Tensor  # [m] their rows of the block table, on the host

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + len(self.row_m) * self.length)


class _Packed(NamedTuple):
    """The rows of a forward pass: those that attend through the block table, then prefills."""

    ids: Tensor
    position: Tensor
    cells: tuple[Tensor, Tensor]  # block and position inside it, of every row
    decoded: int  # count of rows, the first ones, whose output is wanted
    table_nw: Tensor  # of those that attend through it, as far as one of them reaches
    prefills: tuple[_EqualPrefills, ...]


class ModelRunner:
    """Runs a Decoder over a PagedCache. Not thread-safe; keeps no request state."""

    def __init__(
        self,
        model: Decoder,
        slots: int,
        context_tokens: int,
        fixed_shapes: bool,
        native_kernels: bool = True,
        keep_experts: bool = False,
        capacity_tokens: int | None = None,
    ) -> None:
        """``keep_experts``: keep the experts of every token of a mixture, for `take_rows`. ``capacity_tokens``: of the
        cache; by default, of all slots' contexts."""
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
            self._cos, self._sin = model.rope(torch.arange(context_tokens, device=self.device))
        self.kv_heads, self.head_dimension = model.config.kv_heads, model.config.head_dim
        capacity_tokens = slots * whole_blocks(context_tokens) if capacity_tokens is None else capacity_tokens
        routing = model.config.routing if keep_experts else None
        # A row more than slots: of a prompt whose KV is computed in several steps.
        self.cache = self._make_cache(slots + 1, context_tokens, capacity_tokens, routing)
        self.adapters = AdapterRevisions(model, fixed_shapes)
        self._kernels = native.kernels_for(self.dtype, self.device) if native_kernels else None
        attention_fits = native.attention_fits(model.config.heads // self.kv_heads, self.head_dimension)
        self._attention_kernels = self._kernels if attention_fits else None
        self._native_decode: NativeDecode | None = None
        self.weights_changed()

    def _make_cache(
        self, rows: int, context_tokens: int, capacity_tokens: int, routing: ExpertRouting | None = None
    ) -> PagedCache:
        sizes = (len(self._layers), self.kv_heads, self.head_dimension)
        return PagedCache(rows, context_tokens, capacity_tokens, sizes, self.dtype, self.device, routing)

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

    def stage_changes(self, changes: Sequence[OverwrittenValues] | None) -> None:
        """Prepare the kernels' copies for all values that will be overwritten, beside the steps; None: not known."""
        if self._kernels is not None:
            most_values = _FEW * sum(weight.numel() for weight in self._parameters.values())
            few = changes is not None and sum(len(change.values) for change in changes) < most_values
            known = [(self._parameters[name], positions, values) for name, positions, values in changes or ()]
            self._kernels.stage_changes(known if few else None)

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

    def uncapturable(self) -> str:
        """The reason why `logits` can't be captured; "": it can."""
        if self.adapters:
            return "it serves adapters"
        if self.cache.routing is not None:
            return "the experts of every token are kept"
        experts = [layer.down_weight for layer in self._layers if layer.kind.sparse][:1]
        is_grouped = self.device.type == "cpu" or self.dtype == torch.bfloat16  # by one kernel, which needs no offsets
        if experts and (self.fixed_shapes or not is_grouped or not aligned(experts[0])):
            return "the products of its mixture wait for the host"
        return ""

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
                self._forward([prefill], _NONE, _NONE, _NONE)
        elif prefills:
            self._forward(prefills, _NONE, _NONE, _NONE)

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

        Decode row i is row i of the block table. A row may be prefilled and decoded in the same step: in every layer
        its prefix is written before decode rows attend to it.
        """
        if self.fixed_shapes:
            self.prefill(prefills)
            prefills = ()
        x_nd = self._forward(prefills, pending, position, update)
        assert x_nd is not None
        with native.using(self._kernels):
            return self.model.head(x_nd)

    @torch.inference_mode()
    def score(self, probe: Probe) -> ProbeScores:
        """Score a probe without a prompt on a cache of its own: by one prefill (``prefill``), and by two and then token
        by token (``decode``)."""
        ids, revision, scores_by_path = probe.ids, self.adapters.newest(POLICY_ADAPTER), dict[str, PathScores]()
        update = 0 if revision is None else revision.update
        third, token_count = max(1, len(ids) // 3), len(ids)
        with self.on_cache(self.new_cache(len(ids))):
            for path, ends in {"prefill": [token_count], "decode": [third, *range(2 * third, token_count + 1)]}.items():
                states, logits = HiddenStates(), list[Tensor]()
                for start, end in itertools.pairwise([0, *ends]):
                    logits.append(
                        self._score_part(ids[:end], start, update, path == "decode" and end > 2 * third, states)
                    )
                    states.end_pass()
                scores_by_path[path] = states.scores(torch.cat(logits), ids)
        return ProbeScores(probe=probe, precision=str(self.dtype).removeprefix("torch."), paths=scores_by_path)

    def new_cache(self, tokens: int) -> PagedCache:
        """Make a cache for one row of ``tokens`` tokens, which has its blocks."""
        cache = self._make_cache(1, tokens, tokens)
        cache.pool.allocate(0, tokens)
        return cache

    @contextmanager
    def on_cache(self, cache: PagedCache) -> Iterator[None]:
        """Compute on another cache inside the block; no experts are kept."""
        kept_cache, kept_decode = self.cache, self._native_decode
        self.cache = cache
        if kept_decode is not None and self._kernels is not None:
            self._native_decode = NativeDecode(self.model, cache, self._kernels)
        try:
            yield
        finally:
            self.cache, self._native_decode = kept_cache, kept_decode
            for layer in self._layers:
                if layer.routed:  # which no cache takes
                    layer.routed.clear()

    @torch.inference_mode()
    def prompt_logits(self, prefill: Prefill) -> Tensor:
        """Store KV of a prefill, and return the logits after each of its tokens."""
        x_nd = self._forward([prefill], _NONE, _NONE, _NONE, every_row=True)
        assert x_nd is not None
        with native.using(self._kernels):
            return self.model.head(x_nd)

    def _score_part(self, ids: tuple[int, ...], start: int, update: int, decodes: bool, states: HiddenStates) -> Tensor:
        """Return the logits after each of ``ids`` from ``start`` on, and store their KV."""
        if decodes:
            x_nd = self._forward([], np.array([ids[start]]), np.array([start]), np.array([update]), states)
        else:
            x_nd = self._forward([Prefill(ids, 0, start, update)], _NONE, _NONE, _NONE, states, every_row=True)
        assert x_nd is not None
        with native.using(self._kernels):
            return self.model.head(x_nd)

    def _forward(
        self,
        prefills: Sequence[Prefill],
        pending: np.ndarray,
        position: np.ndarray,
        update: np.ndarray,
        states: HiddenStates | None = None,
        *,
        every_row: bool = False,
    ) -> Tensor | None:
        """Return the residual stream after the last layer of decode rows, and of prefilled ones with ``every_row``."""
        prefills = sorted(prefills, key=lambda prefill: (prefill.start, prefill.tokens))
        self.adapters.rows.assign(np.concatenate([update, *(np.full(p.tokens, p.update) for p in prefills)]))
        with native.using(self._kernels):
            if not prefills and self._native_decode is not None:
                position_n = torch.from_numpy(position)
                x_nd = self.model.embed(torch.from_numpy(pending))
                if states is not None:
                    states.add(x_nd)
                order_and_groups = self.adapters.rows.groups()
                return self._native_decode(
                    x_nd, self._cos[position_n], self._sin[position_n], position_n, *order_and_groups, states
                )
            return self._layers_forward(self._packed(prefills, pending, position), states, every_row=every_row)

    def logits(self, ids_n: Tensor, position_n: Tensor, table_nw: Tensor, sampled: int) -> Tensor:
        """Store KV of rows, each with a block table, and return the logits after the first ``sampled`` of them."""
        block_n = table_nw.gather(1, (position_n // BLOCK_TOKENS)[:, None])[:, 0]
        cells = block_n.long(), position_n % BLOCK_TOKENS
        x_nd = self._layers_forward(_Packed(ids_n, position_n, cells, sampled, table_nw, ()))
        assert x_nd is not None
        return self.model.head(x_nd)

    def _layers_forward(
        self, rows: _Packed, states: HiddenStates | None = None, *, every_row: bool = False
    ) -> Tensor | None:
        n, prefills = len(rows.table_nw), rows.prefills
        x_nd = self.model.embed(rows.ids)
        if states is not None:
            states.add(x_nd)
        cos, sin = self._cos[rows.position], self._sin[rows.position]
        last_index = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            scores = layer.kind.scores
            q, k, v = layer.project_qkv(x_nd, cos, sin)
            stored = slice(n if self._natively(scores) else 0, None)  # the native kernels store decode rows themselves
            blocks, offsets = (cell[stored] for cell in rows.cells)
            if len(blocks):
                store_kv(k[stored], v[stored], self.cache.keys[index], self.cache.values[index], blocks, offsets)
            if index == last_index and not every_row:  # of the other rows only the KV is needed
                if rows.decoded == 0:
                    break
                n, prefills = rows.decoded, ()
                x_nd = x_nd[:n]
            parts = [self._decode_attention(index, (q[:n], k[:n], v[:n]), rows, scores)] if n else []
            parts.extend(self._prefill_attention(index, q, k, v, equal, rows.position, scores) for equal in prefills)
            x_nd = layer.finish(x_nd, parts[0] if len(parts) == 1 else torch.cat(parts))
            if states is not None:
                states.add(x_nd)
        self._store_experts(rows)
        return x_nd if rows.decoded or every_row else None

    def _packed(self, prefills: Sequence[Prefill], pending: np.ndarray, position: np.ndarray) -> _Packed:
        """Pack prefills, sorted by start and length, after the decode rows."""
        n, tables = len(pending), self.cache.pool.tables
        equal_prefills: list[_EqualPrefills] = []
        first_row = n
        for (start, length), group in itertools.groupby(prefills, key=lambda prefill: (prefill.start, prefill.tokens)):
            row_m = torch.tensor([prefill.row for prefill in group])
            equal_prefills.append(_EqualPrefills(first_row, length, start, row_m))
            first_row += len(row_m) * length
        ids = [np.asarray(prefill.ids[prefill.start :], dtype=np.int64) for prefill in prefills]
        positions = np.concatenate([position, *(np.arange(prefill.start, len(prefill.ids)) for prefill in prefills)])
        rows = np.concatenate([np.arange(n), *(np.full(prefill.tokens, prefill.row) for prefill in prefills)])
        reach = tables.shape[1] if self.fixed_shapes else blocks_for(int(position.max(initial=-1)) + 1)
        cells = tables[rows, positions // BLOCK_TOKENS].astype(np.int64), positions % BLOCK_TOKENS
        to_device = (torch.from_numpy(array).to(self.device) for array in cells)
        return _Packed(
            ids=torch.from_numpy(np.concatenate([pending, *ids])).to(self.device),
            position=torch.from_numpy(positions).to(self.device),
            cells=(next(to_device), next(to_device)),
            decoded=n,
            table_nw=torch.from_numpy(tables[:n, :reach]).to(self.device),
            prefills=tuple(equal_prefills),
        )

    def _natively(self, scores: Scores) -> bool:
        """Whether the native kernels compute attention of decode rows with these scores."""
        return self._attention_kernels is not None and scores.softcap is None

    def _decode_attention(self, index: int, qkv: Sequence[Tensor], rows: _Packed, scores: Scores) -> Tensor:
        """Attention of decode rows, [n, h * c]; the native kernels also store their keys and values."""
        position_n, cache = rows.position[: len(qkv[0])], (self.cache.keys[index], self.cache.values[index])
        if self._natively(scores):
            return self._native_attention(index, qkv, None, position_n, scores, write=True)
        table_nw, how = rows.table_nw[: len(qkv[0])], (scores.scale, scores.window or 0, scores.softcap or 0.0)
        return paged_attention(qkv[0], *cache, table_nw, position_n, *how)

    def _native_attention(
        self, index: int, qkv: Sequence[Tensor], row_n: Tensor | None, position_n: Tensor, scores: Scores, write: bool
    ) -> Tensor:
        """Attention of single rows by the native kernels, each over its own length or window."""
        assert self._attention_kernels is not None
        (q, k, v), keys, values = qkv, self.cache.keys[index], self.cache.values[index]
        return self._attention_kernels.attention(
            q, k, v, keys, values, self.cache.table, row_n, position_n, scores.scale, write, scores.window
        )

    def _store_experts(self, rows: _Packed) -> None:
        """Keep the experts of a step's tokens. Those of prefilled ones in the last layer are unknown: nothing computes
        them, as nothing reads them."""
        cache, column = self.cache, 0
        for layer in self._layers:
            if cache.routing is None or layer.routed is None:
                continue
            chosen_experts = layer.routed.pop().to(cache.experts.dtype) if layer.routed else None
            columns, column = slice(column, column + cache.routing.per_token), column + cache.routing.per_token
            computed = 0 if chosen_experts is None else len(chosen_experts)
            for part, experts in ((slice(computed), chosen_experts), (slice(computed, None), cache.unknown)):
                blocks, offsets = (cell[part] for cell in rows.cells)
                if experts is not None and len(blocks):
                    cache.experts[blocks, offsets, columns] = experts

    def take_rows(self, request: EngineRequest, position: np.ndarray) -> dict[str, TokenRows]:
        """Return the experts of a running request's tokens that its caller lacks, as rows; {} if none are kept.
        ``position``: count of computed tokens, by slot."""
        routing, first_token = self.cache.routing, request.rows
        if routing is None or request.slot < 0 or first_token >= (end_token := int(position[request.slot])):
            return {}
        request.rows = end_token
        blocks = self.cache.table[request.slot, : blocks_for(end_token)].to(self.device).long()
        experts = self.cache.experts[blocks].flatten(0, 1)[first_token:end_token].cpu().numpy()
        return {EXPERTS: TokenRows.of(experts.view(f"<u{routing.item_bytes}"), routing.item_bytes)}

    def _prefill_attention(
        self, index: int, q: Tensor, k: Tensor, v: Tensor, equal: _EqualPrefills, position: Tensor, scores: Scores
    ) -> Tensor:
        q, k, v = (tensor[equal.rows] for tensor in (q, k, v))
        if equal.start and self._natively(scores):
            row_n = equal.row_m.repeat_interleave(equal.length)
            return self._native_attention(index, (q, k, v), row_n, position[equal.rows], scores, write=False)
        shape = (len(equal.row_m), equal.length, -1, self.head_dimension)
        q, k, v = (tensor.view(shape).transpose(1, 2) for tensor in (q, k, v))
        if equal.start:  # the whole context is in the cache: its last part was just stored
            end = equal.start + equal.length
            table = self.cache.table[equal.row_m, : blocks_for(end)].to(self.device)
            k, v = (gathered(part[index], table)[:, :, :end] for part in (self.cache.keys, self.cache.values))
            out = masked_attention(q, k, v, visible_mask(end, scores.window, self.device, equal.start), scores)
        else:
            out = causal_attention(q, k, v, scores)
        return out.transpose(1, 2).reshape(len(q) * equal.length, -1)
