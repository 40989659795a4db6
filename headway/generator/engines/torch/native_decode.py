"""All layers of a decode step in one call of the native kernels, for models that they support entirely.

A decode step of a small model is about forty operations of ten microseconds: calling them one by one from Python
costs a quarter of the step.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor

from headway.generator.engines.torch.kv_cache import SlotCache
from headway.models.cpu.native import DecodeSizes, Kernels, LayerPointers, address
from headway.models.decoder import Decoder, DecoderLayer


class NativeDecode:
    """A decode step on raw addresses of parameters, cache and kernel panels; rebuild it when the weights change."""

    def __init__(self, model: Decoder, cache: SlotCache, kernels: Kernels) -> None:
        layers = cast("list[DecoderLayer]", list(model.layers))
        c = model.config
        self._kernels = kernels
        self._kept = (model, cache)  # keeps the addressed memory alive
        self._layers = (LayerPointers * len(layers))(
            *(_pointers(layer, index, cache, kernels) for index, layer in enumerate(layers))
        )
        sizes = (c.width, c.heads, c.kv_heads, c.head_dim, c.intermediate, cache.context_tokens)
        self._sizes = DecodeSizes(*sizes, c.norm_epsilon)

    def __call__(self, x_nd: Tensor, cos: Tensor, sin: Tensor, position_n: Tensor) -> Tensor:
        """Compute the residual stream [n, d] after the last layer, in place; row i is at position_n[i] of slot i."""
        self._kernels.decode(x_nd, self._layers, cos, sin, position_n, self._sizes)
        return x_nd


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


def _pointers(layer: DecoderLayer, index: int, cache: SlotCache, kernels: Kernels) -> LayerPointers:
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
        window=scores.window or cache.context_tokens,
        scale=scores.scale,
    )
