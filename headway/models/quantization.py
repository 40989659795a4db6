"""A frozen base in 4 or 8 bits, by bitsandbytes: NF4 in blocks of 64 (QLoRA, Dettmers et al. 2023, section 3), or its
dynamic 8-bit type in blocks of 256 (Dettmers et al. 2022). Embeddings, norms, routers and the head stay as they are.

A trainer keeps the codes and dequantises a matrix for each product; an engine keeps the dequantised matrix. Both come
from the same float32 values in the same order, so that both compute with the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from headway.config.adapter import Quantization
from headway.models.decoder import Decoder, DecoderLayer
from headway.models.kernels import QuantizedMatrix
from headway.models.loading import load_for_generation, load_model, parse_dtype

_MATRICES = ("qkv_weight", "output_weight", "gate_up_weight", "down_weight")


def load_frozen(path: str | Path, bits: Quantization, device: str | torch.device) -> Decoder:
    """Load the model in folder ``path`` with quantised matrices, for a trainer. Raises ConfigurationError without
    bitsandbytes. While it loads, the complete float32 model is in the host's memory."""
    model = load_model(path)
    for layer, name in _matrices(model):
        quantized = QuantizedMatrix(getattr(layer, name).to(device), bits)
        delattr(layer, name)
        setattr(layer, name, quantized)
    return model.to(device).requires_grad_(False)


def load_sampled(
    path: str | Path, bits: Quantization | None, dtype: str | torch.dtype, device: torch.device
) -> Decoder:
    """Load the model in folder ``path`` for an engine, with dequantised matrices in ``dtype``. ``bits`` None: the
    folder's weights, not quantised."""
    if bits is None:
        return load_for_generation(path, dtype, device)
    model = load_model(path)
    with torch.no_grad():
        for layer, name in _matrices(model):
            weight: nn.Parameter = getattr(layer, name)
            weight.copy_(QuantizedMatrix(weight, bits).matrix(torch.float32))
    return model.to(parse_dtype(dtype)).to(device)


def _matrices(model: Decoder) -> Iterator[tuple[DecoderLayer, str]]:
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        yield from ((layer, name) for name in _MATRICES)
