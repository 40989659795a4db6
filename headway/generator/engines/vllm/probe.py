"""Probe of single modules: whether a vLLM model's modules compute with the published weights.

vLLM's linear layers may have their weights only in a packed form that can't be read back, and a head may have a second
copy: so products of modules are compared, not weights. Pure torch; a module is recognised by its attributes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

# Parameters that vLLM fuses, for model classes without a mapping of their own.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
COLUMNS = 8  # unit vectors: their products are columns of the matrix, exact in any precision
DENSE = 2  # random vectors: they depend on every weight, up to rounding
# Allowed differences, as shares of the largest expected value.
EXACT = 1e-6
ROUNDING = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
QUANTISED = 0.15


class Difference(NamedTuple):
    """A module whose output differs from that of the published weights."""

    module: str
    difference: float  # largest, as a share of the largest expected value
    allowed: float

    def __str__(self) -> str:
        return (
            f"module {self.module}: its output differs by {self.difference:.2g} of the largest value, allowed is "
            f"{self.allowed:.2g}"
        )


class _Check(NamedTuple):
    got: Tensor
    expected: Tensor
    allowed: float


def differing_module(
    model: nn.Module, published: Mapping[str, Tensor], update: int, quantised: bool = False
) -> Difference | None:
    """Return the first module, in the model's order, that differs from ``published`` (tensors by Hugging Face's names).

    ``update`` seeds the inputs. Modules without published tensors of their own (attention, rotary embeddings),
    mixtures of experts and matrices of another shape are skipped: the probe of whole sequences covers them.
    """
    fused_names = {**FUSED, **getattr(model, "packed_modules_mapping", {})}
    generator = torch.Generator().manual_seed(update)
    for name, module in model.named_modules():
        weight = _published(name, "weight", fused_names, published)
        if weight is None or weight.ndim > 2 or getattr(module, "input_size", weight.shape[-1]) != weight.shape[-1]:
            continue
        bias = _published(name, "bias", fused_names, published)
        for got, expected, allowed in _checks(module, weight, bias, generator, quantised):
            scale = max(float(expected.abs().max()), 1e-30)
            difference = float((got.float() - expected.float()).abs().max()) / scale
            if not difference <= allowed:  # a NaN differs
                return Difference(name, difference, allowed)
    return None


def _published(name: str, kind: str, fused: Mapping[str, Any], published: Mapping[str, Tensor]) -> Tensor | None:
    """Return the published tensor of a module's ``weight`` or ``bias``; None if there is none."""
    prefix, _, leaf_name = name.rpartition(".")
    name_prefix = f"{prefix}." if prefix else ""
    tensors = [published.get(f"{name_prefix}{part}.{kind}") for part in fused.get(leaf_name, (leaf_name,))]
    if all(part is not None for part in tensors):
        return torch.cat(tensors) if len(tensors) > 1 else tensors[0]  # type: ignore[arg-type]  # none is None
    is_tied_head = name.endswith("lm_head") and kind == "weight"
    return published.get("model.embed_tokens.weight") if is_tied_head else None


def _checks(
    module: Any, weight: Tensor, bias: Tensor | None, generator: torch.Generator, quantised: bool
) -> Iterator[_Check]:
    quant_method = getattr(module, "quant_method", None)
    actual = getattr(module, "weight", None)
    dtype, device = (actual.dtype, actual.device) if isinstance(actual, Tensor) else (weight.dtype, weight.device)
    if bias is not None and isinstance(getattr(module, "bias", None), Tensor):
        yield _Check(module.bias.cpu(), bias, EXACT)
    if weight.ndim == 1 or quant_method is None:
        if isinstance(actual, Tensor) and actual.shape == weight.shape:
            yield _Check(actual.cpu(), weight.to(dtype), EXACT)
        return
    if type(module).__name__ == "VocabParallelEmbedding":  # every quant method has a method ``embedding``
        if isinstance(actual, Tensor) and actual.ndim == 2 and len(actual) >= len(weight) and not quantised:
            yield _Check(actual[: len(weight)].cpu(), weight.to(dtype), EXACT)
        token_ids = torch.randint(len(weight), (COLUMNS,), generator=generator)
        yield _Check(quant_method.embedding(module, token_ids.to(device)).cpu(), weight[token_ids].to(dtype), EXACT)
        return
    if not dtype.is_floating_point or quantised:
        dtype = weight.dtype
    row_count, input_count = weight.shape
    column_indices = torch.randint(input_count, (COLUMNS,), generator=generator)
    random_inputs = torch.randn((DENSE, input_count), generator=generator, dtype=torch.float32).to(dtype)
    input_vectors = torch.cat([functional.one_hot(column_indices, input_count).to(dtype), random_inputs])
    outputs = quant_method.apply(module, input_vectors.to(device)).cpu()[:, :row_count]
    cast_weight = weight.to(dtype)
    yield _Check(outputs[:COLUMNS], cast_weight[:, column_indices].t(), QUANTISED if quantised else EXACT)
    allowed_share = QUANTISED if quantised else ROUNDING.get(dtype, 3e-2)
    yield _Check(outputs[COLUMNS:], functional.linear(random_inputs, cast_weight), allowed_share)
