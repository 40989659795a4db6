"""Low-rank adapters: h = W x + scale * B A x beside the decoder's frozen matrices (LoRA, Hu et al. 2022, Eq. 3).

The merged matrix never exists. Shape suffixes: n rows, d input features, f output features, r rank, x experts,
m (row, expert) pairs sorted by expert.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor, nn

from headway.config.adapter import Quantization
from headway.models.adapter_targets import AdaptedTarget, AdapterTarget
from headway.models.decoder import Decoder, DecoderLayer
from headway.models.experts import LayerAdapter, grouped_linear
from headway.models.loading import copy_into


class LoraPair(NamedTuple):
    """A target's two matrices."""

    target: AdapterTarget
    scale: float
    a: nn.Parameter  # [r, d]; of experts [x, r, d]
    b: nn.Parameter  # [f, r] in the decoder's order of rows; of experts [x, f, r]


class Dropout:
    """Dropout of an adapter's inputs while ``key`` is set. The mask depends on rate, key, target and shape alone, so
    that a layer that is recomputed for its gradients has the same mask."""

    def __init__(self, rate: float = 0.0) -> None:
        self.rate = rate
        self.key: str | None = None

    def applied(self, x_nd: Tensor, target: str) -> Tensor:
        """``x_nd`` with a share ``rate`` of its elements set to 0 and the others scaled up to keep the mean."""
        generator = torch.Generator(x_nd.device).manual_seed(
            xxhash.xxh3_64_intdigest(f"{self.key}/{target}".encode()) >> 1
        )
        kept_mask = torch.rand(x_nd.shape, generator=generator, device=x_nd.device) >= self.rate
        return x_nd * kept_mask / (1 - self.rate)


class LayerLora:
    """The part of an adapter in one layer, which a `DecoderLayer` calls."""

    def __init__(self, pairs: Sequence[LoraPair], dropout: Dropout) -> None:
        self._dropout = dropout
        self.products: dict[str, list[LoraPair]] = {}
        for pair in pairs:
            self.products.setdefault(pair.target.product, []).append(pair)

    def add(self, product: str, out_nf: Tensor, x_nd: Tensor) -> Tensor:
        """Add the adapter's part of ``product`` (qkv, output, gate_up, down, router) to its result, in place."""
        pairs = self.products.get(product)
        if pairs is None:
            return out_nf
        if self._dropout.key is None:
            return _add_low_rank(out_nf, x_nd, pairs)
        for pair in pairs:  # each target has a separate mask, as in PEFT
            out_nf = _add_low_rank(out_nf, self._dropout.applied(x_nd, pair.target.name), [pair])
        return out_nf

    def add_experts(self, product: str, out_mf: Tensor, x_md: Tensor, expert_m: Tensor, row_m: Tensor) -> Tensor:
        """Add the adapter's part of ``product`` (gate_up, down) of a mixture's experts. ``expert_m`` ascends;
        ``row_m``: the row of the layer's input of each pair."""
        for pair in self.products.get(product, ()):
            inner_mr = _by_expert(x_md, pair.a, expert_m)
            out_mf = out_mf + _by_expert(inner_mr, pair.b, expert_m) * pair.scale
        return out_mf


class Lora:
    """An adapter's weights, float32 unless cast, by name, in the order of the decoder's layers.

    `use` makes a decoder compute with them. B is initially zero, so that a new adapter changes nothing.
    """

    def __init__(
        self,
        targets: Sequence[AdaptedTarget],
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self.targets = tuple(targets)
        self.dropout = Dropout()
        self.base = ""  # digest of its base model's files; "": unknown
        self.quantization: Quantization | None = None  # of its base model in training
        self.parameters: dict[str, nn.Parameter] = {}
        generator = torch.Generator().manual_seed(seed)
        pairs_by_layer: dict[int, list[LoraPair]] = {}
        for adapted in self.targets:
            target, rank = adapted.target, adapted.rank
            expert_shape = (target.experts,) if target.experts else ()
            bound = 1 / math.sqrt(target.columns)  # as torch's linear layers and PEFT
            a = torch.empty(*expert_shape, rank, target.columns).uniform_(-bound, bound, generator=generator)
            b = torch.zeros(*expert_shape, target.rows, rank)
            pair = LoraPair(target, adapted.scale, *(nn.Parameter(matrix.to(device, dtype)) for matrix in (a, b)))
            self.parameters |= {f"{target.name}.lora_A": pair.a, f"{target.name}.lora_B": pair.b}
            pairs_by_layer.setdefault(target.layer, []).append(pair)
        self.layers = {layer: LayerLora(pairs, self.dropout) for layer, pairs in pairs_by_layer.items()}

    def pairs(self) -> Iterator[LoraPair]:
        """Yield the two matrices of every target."""
        for layer in self.layers.values():
            for pairs in layer.products.values():
                yield from pairs

    def weights(self) -> dict[str, Tensor]:
        """The published weights: every matrix by name, without copying."""
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def copy_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite the matrices. Raises ConfigurationError, before any change, if names or shapes differ."""
        copy_into(self.parameters, tensors)


def use(model: Decoder, adapter: Mapping[int, LayerAdapter] | None) -> None:
    """Make ``model`` compute with ``adapter`` (a `Lora`'s ``layers``, by number); None: without an adapter."""
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        layer.adapter = None if adapter is None else adapter.get(number)


@contextmanager
def disabled(model: Decoder, lora: Lora) -> Iterator[None]:
    """Make ``model`` compute without its adapter inside the block."""
    use(model, None)
    try:
        yield
    finally:
        use(model, lora.layers)


@torch.no_grad()
def merge(model: Decoder, lora: Lora) -> None:
    """Add the adapter to the weights of ``model``: W + scale * B A, in at least float32, rounded once."""
    for number, layer in enumerate(model.layers):
        for product, pairs in lora.layers[number].products.items() if number in lora.layers else ():
            weight = getattr(layer, f"{product}_weight")
            for target, scale, a, b in pairs:
                part = weight.narrow(-2, target.first, target.rows)
                dtype = torch.promote_types(part.dtype, torch.float32)
                part.copy_(part.to(dtype) + scale * (b.to(part.device, dtype) @ a.to(part.device, dtype)))


def _add_low_rank(out_nf: Tensor, x_nd: Tensor, pairs: Sequence[LoraPair]) -> Tensor:
    row_spans = tuple((pair.target.first, pair.target.rows, pair.scale) for pair in pairs)
    matrices = (matrix for pair in pairs for matrix in (pair.a, pair.b))
    return _AddLowRank.apply(out_nf, x_nd, row_spans, *matrices)  # pyright: ignore[reportReturnType]


class _AddLowRank(torch.autograd.Function):
    """``out[:, rows] += scale * x A^T B^T`` in place, for several pairs that share an input, without another pass over
    ``out`` in forward or backward."""

    @staticmethod
    def forward(
        ctx: Any, out_nf: Tensor, x_nd: Tensor, places: tuple[tuple[int, int, float], ...], *matrices: Tensor
    ) -> Tensor:
        ctx.mark_dirty(out_nf)
        dtype = x_nd.dtype
        a_rd = torch.cat(matrices[::2]).to(dtype)
        inner_nr = x_nd @ a_rd.t()
        ctx.places, ctx.ranks = places, [len(a) for a in matrices[::2]]
        ctx.save_for_backward(x_nd, inner_nr, a_rd, *matrices[1::2])
        for (first, rows, scale), inner, b_fr in zip(places, inner_nr.split(ctx.ranks, 1), matrices[1::2], strict=True):
            out_nf.narrow(1, first, rows).addmm_(inner, b_fr.to(dtype).t(), alpha=scale)
        return out_nf

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_nd, inner_nr, a_rd, *b = ctx.saved_tensors
        inner_grads, b_grads = [], []
        for (first, rows, scale), inner, b_fr in zip(ctx.places, inner_nr.split(ctx.ranks, 1), b, strict=True):
            part = grads[0].narrow(1, first, rows)
            inner_grads.append((part @ b_fr.to(part.dtype)).mul_(scale))
            b_grads.append((part.t() @ inner).mul_(scale).to(b_fr.dtype))
        to_inner_nr = torch.cat(inner_grads, 1)
        a_grads = (to_inner_nr.t() @ x_nd).to(b[0].dtype).split(ctx.ranks)
        matrix_grads = (gradient for pair in zip(a_grads, b_grads, strict=True) for gradient in pair)
        return grads[0], to_inner_nr @ a_rd if ctx.needs_input_grad[1] else None, None, *matrix_grads


def _by_expert(rows_md: Tensor, weights_xfd: Tensor, expert_m: Tensor) -> Tensor:
    ends_x = torch.searchsorted(expert_m, torch.arange(len(weights_xfd), device=expert_m.device), right=True)
    return grouped_linear(rows_md, weights_xfd, ends_x)
