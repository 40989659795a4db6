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


class SegmentedLayer:
    """A layer's `LayerAdapter` whose rows have different adapters: consecutive segments of rows, each with one."""

    def __init__(self, segments: Sequence[tuple[int, int, LayerLora]]) -> None:
        """``segments``: the first row, the number of rows, and their adapter's part in the layer."""
        self._segments = segments

    def add(self, product: str, out_nf: Tensor, x_nd: Tensor) -> Tensor:
        """See `LayerLora.add`."""
        parts = [(first, rows, layer.products.get(product, ())) for first, rows, layer in self._segments if rows]
        parts = [part for part in parts if part[2]]
        return _add_segments(out_nf, x_nd, parts) if parts else out_nf

    def add_experts(self, product: str, out_mf: Tensor, x_md: Tensor, expert_m: Tensor, row_m: Tensor) -> Tensor:
        """See `LayerLora.add_experts`."""
        for first, rows, layer in self._segments:
            index_k = ((row_m >= first) & (row_m < first + rows)).nonzero()[:, 0]
            if product in layer.products and len(index_k):
                part_kf = torch.zeros(len(index_k), out_mf.shape[1], dtype=out_mf.dtype, device=out_mf.device)
                part_kf = layer.add_experts(product, part_kf, x_md[index_k], expert_m[index_k], row_m[index_k])
                out_mf = out_mf.index_add(0, index_k, part_kf)
        return out_mf


def segmented(adapters: Sequence[tuple[Lora, int]]) -> dict[int, SegmentedLayer]:
    """The layers' adapters, for `use`, of a pass whose first rows have the first adapter, and so on. ``adapters``: each
    adapter without dropout, with the number of its rows."""
    segments_by_layer: dict[int, list[tuple[int, int, LayerLora]]] = {}
    first_row = 0
    for lora, rows in adapters:
        for number, layer in lora.layers.items():
            segments_by_layer.setdefault(number, []).append((first_row, rows, layer))
        first_row += rows
    return {number: SegmentedLayer(segments) for number, segments in segments_by_layer.items()}


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
    return _add_segments(out_nf, x_nd, [(0, len(x_nd), pairs)])


def _add_segments(out_nf: Tensor, x_nd: Tensor, segments: Sequence[tuple[int, int, Sequence[LoraPair]]]) -> Tensor:
    """Add to each segment of rows (its first row, their number) what its pairs compute from it."""
    places = tuple(
        (first, rows, tuple((pair.target.first, pair.target.rows, pair.scale) for pair in pairs))
        for first, rows, pairs in segments
    )
    matrices = (matrix for _, _, pairs in segments for pair in pairs for matrix in (pair.a, pair.b))
    return _AddLowRank.apply(out_nf, x_nd, places, *matrices)  # pyright: ignore[reportReturnType]


_Places = tuple[tuple[int, int, tuple[tuple[int, int, float], ...]], ...]  # first row, rows; of each pair (columns)


class _AddLowRank(torch.autograd.Function):
    """``out[:, rows] += scale * x A^T B^T`` in place, for several pairs that share an input, without another pass over
    ``out`` in forward or backward; each segment of rows has its own pairs."""

    @staticmethod
    def forward(ctx: Any, out_nf: Tensor, x_nd: Tensor, places: _Places, *matrices: Tensor) -> Tensor:
        ctx.mark_dirty(out_nf)
        dtype, inners, down_matrices = x_nd.dtype, list[Tensor](), list[Tensor]()
        pairs = iter(zip(matrices[::2], matrices[1::2], strict=True))
        for first_row, rows, spans in places:
            own_pairs = [next(pairs) for _ in spans]
            x_sd, out_sf = x_nd.narrow(0, first_row, rows), out_nf.narrow(0, first_row, rows)
            a_rd = torch.cat([a for a, _ in own_pairs]).to(dtype)
            inner_sr = x_sd @ a_rd.t()
            ranks = [len(a) for a, _ in own_pairs]
            for (first, columns, scale), inner, (_, b_fr) in zip(
                spans, inner_sr.split(ranks, 1), own_pairs, strict=True
            ):
                out_sf.narrow(1, first, columns).addmm_(inner, b_fr.to(dtype).t(), alpha=scale)
            inners.append(inner_sr)
            down_matrices.append(a_rd)
        ctx.places, ctx.ranks = places, [len(a) for a in matrices[::2]]
        ctx.save_for_backward(x_nd, *inners, *down_matrices, *matrices[1::2])
        return out_nf

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_nd, *saved = ctx.saved_tensors
        segments = len(ctx.places)
        inners, down_matrices, b = saved[:segments], saved[segments : 2 * segments], iter(saved[2 * segments :])
        ranks, matrix_grads, x_grad_nd = iter(ctx.ranks), list[Tensor](), None
        for (first_row, rows, spans), inner_sr, a_rd in zip(ctx.places, inners, down_matrices, strict=True):
            inner_grads, b_grads, own_ranks = list[Tensor](), list[Tensor](), [next(ranks) for _ in spans]
            grad_sf, x_sd = grads[0].narrow(0, first_row, rows), x_nd.narrow(0, first_row, rows)
            for (first, columns, scale), inner in zip(spans, inner_sr.split(own_ranks, 1), strict=True):
                part, b_fr = grad_sf.narrow(1, first, columns), next(b)
                inner_grads.append((part @ b_fr.to(part.dtype)).mul_(scale))
                b_grads.append((part.t() @ inner).mul_(scale).to(b_fr.dtype))
            to_inner_sr = torch.cat(inner_grads, 1)
            a_grads = (to_inner_sr.t() @ x_sd).to(b_grads[0].dtype).split(own_ranks)
            matrix_grads += [gradient for pair in zip(a_grads, b_grads, strict=True) for gradient in pair]
            if ctx.needs_input_grad[1]:
                if rows == len(x_nd):
                    x_grad_nd = to_inner_sr @ a_rd
                else:
                    x_grad_nd = torch.zeros_like(x_nd) if x_grad_nd is None else x_grad_nd
                    torch.mm(to_inner_sr, a_rd, out=x_grad_nd.narrow(0, first_row, rows))
        return grads[0], x_grad_nd, None, *matrix_grads


def _by_expert(rows_md: Tensor, weights_xfd: Tensor, expert_m: Tensor) -> Tensor:
    ends_x = torch.searchsorted(expert_m, torch.arange(len(weights_xfd), device=expert_m.device), right=True)
    return grouped_linear(rows_md, weights_xfd, ends_x)
