"""All layers of a decode step in one call of the native kernels, for models that they support entirely.

A decode step of a small model is about forty operations of ten microseconds: calling them one by one from Python
costs a quarter of the step.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from headway.generator.engines.torch.block_pool import BLOCK_TOKENS
from headway.generator.engines.torch.kv_cache import PagedCache
from headway.models.cpu.native import DecodeSizes, Kernels, LayerPointers, LowRankPointers, RowGroup, address
from headway.models.decoder import Decoder, DecoderLayer
from headway.models.hidden_states import HiddenStates
from headway.models.lora import Lora, LoraPair

_PRODUCTS = ("qkv", "output", "gate_up", "down")  # of a layer, in the order of the kernel


class AdapterPanels(NamedTuple):
    """An adapter in the order that the kernel reads; ``kept``: the memory that it points to."""

    products: ctypes.Array[LowRankPointers]
    most_rank: int  # largest sum of the ranks of a product's targets
    kept: list[Tensor]


class NativeDecode:
    """A decode step on raw addresses of parameters, cache and kernel panels; rebuild it when the weights change."""

    def __init__(self, model: Decoder, cache: PagedCache, kernels: Kernels) -> None:
        layers = cast("list[DecoderLayer]", list(model.layers))
        cfg = model.config
        self._kernels = kernels
        self._model, self._cache = model, cache  # kept: their memory is addressed
        self._layers = (LayerPointers * len(layers))(
            *(_pointers(layer, index, cache, kernels) for index, layer in enumerate(layers))
        )
        decode_sizes = (cfg.width, cfg.heads, cfg.kv_heads, cfg.head_dim, cfg.intermediate)
        self._sizes = DecodeSizes(*decode_sizes, cache.table.shape[1], BLOCK_TOKENS, cfg.norm_epsilon)

    def __call__(
        self,
        x_nd: Tensor,
        cos: Tensor,
        sin: Tensor,
        position_n: Tensor,
        order: np.ndarray | None = None,
        adapters: Sequence[tuple[AdapterPanels, int, int]] = (),
        states: HiddenStates | None = None,
    ) -> Tensor:
        """Return the residual stream [n, d] after the last layer; row i is at position_n[i] of the table's row i.
        ``order``, ``adapters``: see `RowAdapters.groups`. With ``states`` each layer is a call of its own, and is
        recorded."""
        most_rank = max((panels.most_rank for panels, _, _ in adapters), default=0)
        slot_n = None if order is None else torch.from_numpy(order)
        if slot_n is not None:
            x_nd, cos, sin, position_n = (tensor.index_select(0, slot_n) for tensor in (x_nd, cos, sin, position_n))
        layer_calls = [self._layers] if states is None else [(LayerPointers * 1)(layer) for layer in self._layers]
        for call_index, layer_pointers in enumerate(layer_calls):
            offset = call_index * len(_PRODUCTS) * ctypes.sizeof(LowRankPointers)
            row_groups = [
                RowGroup(first, rows, ctypes.addressof(panels.products) + offset) for panels, first, rows in adapters
            ]
            tensors = (cos, sin, self._cache.table, slot_n, position_n)
            self._kernels.decode(x_nd, layer_pointers, *tensors, self._sizes, row_groups, most_rank)
            if states is not None:
                states.add(x_nd)
        return x_nd if slot_n is None else torch.empty_like(x_nd).index_copy_(0, slot_n, x_nd)

    def adapter_panels(self, lora: Lora) -> AdapterPanels:
        """Pack an adapter for the decode step, scaled."""
        product_pointers = (LowRankPointers * (len(self._layers) * len(_PRODUCTS)))()
        kept_tensors: list[Tensor] = []
        for layer_index, layer in lora.layers.items():
            for product_name, pairs in layer.products.items():
                weight: Tensor = getattr(self._model.layers[layer_index], f"{product_name}_weight")
                a, b, spans = self._low_rank(pairs, len(weight))
                kept_tensors += (a, b, spans)
                pointers = LowRankPointers(address(a), address(b), address(spans), sum(len(pair.a) for pair in pairs))
                product_pointers[layer_index * len(_PRODUCTS) + _PRODUCTS.index(product_name)] = pointers
        return AdapterPanels(product_pointers, max(pointers.rank for pointers in product_pointers), kept_tensors)

    def _low_rank(self, pairs: Sequence[LoraPair], columns: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return (panels of A, panels of B, spans) of the targets of one product of ``columns``: their A's one after
        the other, their B's as blocks of one matrix. A panel's span is the ranks of targets that it has columns of."""
        ranks = [len(pair.a) for pair in pairs]
        panel_columns = self._kernels.panel_columns
        b_fr, spans = torch.zeros(columns, sum(ranks)), torch.zeros(-(-columns // panel_columns), 2, dtype=torch.int64)
        for pair, rank_end in zip(pairs, itertools.accumulate(ranks), strict=True):
            first_column, column_count, first_rank = pair.target.first, pair.target.rows, rank_end - len(pair.a)
            b_fr[first_column : first_column + column_count, first_rank:rank_end] = pair.b.detach() * pair.scale
            touched_spans = spans[first_column // panel_columns : -(-(first_column + column_count) // panel_columns)]
            touched_spans[:, 0] = torch.where(touched_spans[:, 1] > 0, touched_spans[:, 0], first_rank)
            touched_spans[:, 1] = rank_end
        a_rd = torch.cat([pair.a.detach() for pair in pairs])
        return self._kernels.packed(a_rd), self._kernels.packed(b_fr), spans


def can_decode(model: Decoder, kernels: Kernels) -> bool:
    """Whether `NativeDecode` supports all of this model's layers. Their attention must fit the kernels."""
    layers = cast("list[DecoderLayer]", list(model.layers))
    family = model.config.family
    return (
        family.activation == "silu"
        and not family.norm_offset
        and not family.output_norms
        and not family.local_rope
        and all(layer.kind.scores.softcap is None and not layer.kind.sparse for layer in layers)
        and all(kernels.packs(weight) for layer in layers for weight in (layer.qkv_weight, layer.down_weight))
    )


def _pointers(layer: DecoderLayer, index: int, cache: PagedCache, kernels: Kernels) -> LayerPointers:
    scores = layer.kind.scores
    return LayerPointers(
        input_norm=address(layer.input_norm),
        qkv=kernels.panels(layer.qkv_weight),
        qkv_bias=address(layer.qkv_bias),
        q_norm=address(layer.q_norm),
        k_norm=address(layer.k_norm),
        output=kernels.panels(layer.output_weight),
        output_bias=address(layer.output_bias),
        post_norm=address(layer.post_norm),
        gate_up=kernels.panels(layer.gate_up_weight),
        gate_up_bias=address(layer.gate_up_bias),
        down=kernels.panels(layer.down_weight),
        down_bias=address(layer.down_bias),
        keys=address(cache.keys[index]),
        values=address(cache.values[index]),
        window=scores.window or cache.table.shape[1] * BLOCK_TOKENS,
        scale=scores.scale,
    )
