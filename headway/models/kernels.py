"""The decoder's products, and its element-wise parts with hand-written gradients, which pass over memory less often
than autograd's, by the operators of `gpu/operators.py`; without gradients by C++ inside `native.using`.

All are exact (tests compare with plain autograd). Shape suffixes: n packed tokens, d width, h query heads,
g key/value heads, e head dimension, f intermediate width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from headway.config.adapter import Quantization
from headway.models.cpu import native
from headway.models.gpu import operators
from headway.models.gpu.recomputation import note_recomputable
from headway.runtime.imports import import_extra

Sizes = tuple[int, int, int, float]  # query heads, key/value heads, head dimension, norm epsilon


class QuantizedMatrix:
    """A matrix [f, d], or all experts' [x, f, d], without gradients, stored as codes and the scale of each block.
    The matrix is computed when a product needs it."""

    def __init__(self, weight: Tensor, quantization: Quantization) -> None:
        self.shape, self._quantization = weight.shape, quantization
        library, flat_weight = _bitsandbytes(), weight.detach().float().reshape(-1, weight.shape[-1]).contiguous()
        if quantization == "4bit":
            self._codes, self._state = library.quantize_4bit(flat_weight, blocksize=64, quant_type="nf4")
        else:
            self._codes, self._state = library.quantize_blockwise(flat_weight, blocksize=256)

    def __len__(self) -> int:
        return self.shape[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedMatrix:
        return self

    @property
    def nbytes(self) -> int:
        """The memory of codes and scales, in bytes."""
        return self._codes.nbytes + self._state.absmax.nbytes

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """The dequantised matrix."""
        library = _bitsandbytes()
        dequantise = library.dequantize_4bit if self._quantization == "4bit" else library.dequantize_blockwise
        return dequantise(self._codes, self._state).view(self.shape).to(dtype)


def _bitsandbytes() -> Any:
    return import_extra("bitsandbytes", "qlora", "model.quantization").functional


def rms_norm(x_nd: Tensor, weight: Tensor, epsilon: float, offset: float = 0.0) -> Tensor:
    """RMSNorm over the last axis of [N, d], computed in float32 (Zhang & Sennrich 2019, Eq. 4).

    The result has the dtype of x. ``offset`` is added to the weight (Gemma: 1).
    """
    if not torch.is_grad_enabled() and not offset and (kernels := native.active(x_nd, weight)) is not None:
        return kernels.rms_norm(x_nd, weight, epsilon)
    if not torch.is_grad_enabled():
        return operators.rms_norm(x_nd, weight, epsilon, offset)[0]
    return normed_stream(x_nd, weight, epsilon, offset)[0]


def normed_stream(x_nd: Tensor, weight: Tensor, epsilon: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """`rms_norm` of the residual stream, and the stream for what follows. One pass adds both gradients."""
    if not torch.is_grad_enabled():
        return rms_norm(x_nd, weight, epsilon, offset), x_nd
    outputs: Any = operators.NormedStream.apply(x_nd, weight, epsilon, offset)
    return note_recomputable(outputs[0], rms_norm, x_nd, weight, epsilon, offset), outputs[1]


class _FrozenProduct(torch.autograd.Function):
    """``product(x, matrix)`` that keeps no matrix for the backward, which dequantises it again; the gradient of x is
    ``product(gradient, matrix^T)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedMatrix, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        ctx.weight, ctx.product, ctx.dtype = weight, product, x.dtype
        return product(x, weight.matrix(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.product(grads[0], ctx.weight.matrix(grads[0].dtype).mT).to(ctx.dtype), None, None


def frozen_product(x: Tensor, weight: QuantizedMatrix, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """``product(x, matrix)`` for a product that is linear in x and has the rows of the matrix as outputs."""
    return _FrozenProduct.apply(x, weight, product)  # pyright: ignore[reportReturnType]


def linear(
    x_nd: Tensor, weight: Tensor | QuantizedMatrix, bias: Tensor | None = None, add: Tensor | None = None
) -> Tensor:
    """x @ weight.T (+ bias) (+ add): [N, d] and [V, d] to [N, V]. ``add`` is fused into the product, and so rounded
    once with it."""
    if isinstance(weight, QuantizedMatrix):
        out = frozen_product(x_nd, weight, functional.linear)
        out = out if bias is None else out + bias
        return out if add is None else add + out
    if not torch.is_grad_enabled() and (kernels := native.active(x_nd, weight)) is not None and kernels.packs(weight):
        return kernels.linear(x_nd, weight, bias, add)
    if add is None:
        return functional.linear(x_nd, weight, bias)
    if bias is not None:
        return add + functional.linear(x_nd, weight, bias)
    return torch.addmm(add, x_nd, weight.t())


def norm_rotate(
    qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, cos: Tensor, sin: Tensor, sizes: Sizes
) -> Tensor:
    """``qkv`` [N, (Hq + 2 Hkv) Dh] with query and key normed per head (if weights are given) and rotated by position
    (RoFormer, Eq. 34); without gradients C++ overwrites ``qkv``. Rotated pairs are neighbours; cos and sin are float32
    [N, 1, Dh / 2]."""
    if not torch.is_grad_enabled() and (kernels := native.active(qkv, q_norm)) is not None:
        kernels.norm_rotate(qkv, q_norm, k_norm, cos, sin, sizes)
        return qkv
    inputs = qkv, q_norm, k_norm, cos, sin, sizes[0], sizes[1], sizes[3]
    return note_recomputable(operators.norm_rotate(*inputs)[0], lambda *x: operators.norm_rotate(*x)[0], *inputs)


def gated_silu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate and up side by side: [N, 2f] to [N, f] (Shazeer 2020, SwiGLU)."""
    if not torch.is_grad_enabled() and (kernels := native.active(gate_up)) is not None:
        return kernels.gated_silu(gate_up)
    return note_recomputable(operators.gated(gate_up, False), operators.gated, gate_up, False)


def gated_gelu(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up with the tanh approximation of gelu: [N, 2f] to [N, f] (Shazeer 2020, GEGLU)."""
    return note_recomputable(operators.gated(gate_up, True), operators.gated, gate_up, True)


GATED: dict[str, Callable[[Tensor], Tensor]] = {"silu": gated_silu, "gelu_tanh": gated_gelu}


def target_logprobs(
    logits_cv: Tensor,
    targets_c: Tensor,
    temperature: float,
    outside_cv: Tensor | None = None,
    masses_c: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability [C] of each target and entropy [C] of softmax(logits / temperature), both with gradients and at
    least float32. ``outside_cv`` excludes ids; the log-probability of the others is written to ``masses_c``. On a GPU
    the gradient overwrites the logits."""
    logits_cv = logits_cv.contiguous()
    if outside_cv is None or masses_c is None:
        return operators.chosen_logprobs(logits_cv, targets_c, temperature)[:2]
    all_c = operators.chosen_logprobs(logits_cv.detach(), targets_c, temperature)[0]
    logits_cv = logits_cv.masked_fill(outside_cv, -math.inf)
    logprobs_c, entropies_c, _ = operators.chosen_logprobs(logits_cv, targets_c, temperature)
    masses_c.copy_(all_c - logprobs_c.detach())
    return logprobs_c, entropies_c


class PadDocuments(torch.autograd.Function):
    """Packed rows [N, W] to one padded block [b*l, W] per bucket.

    Attention gives padding a gradient of exactly zero, since no document attends to later rows and padded outputs are
    never used. The gradient of a packed row is therefore that of the one padded row that holds it.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, scatter_n: Tensor, *gathers: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(scatter_n)
        ctx.buckets = len(gathers)
        return tuple(rows.index_select(0, gather) for gather in gathers)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (scatter_n,) = ctx.saved_tensors
        padded = grads[0] if len(grads) == 1 else torch.cat(grads)
        return (padded.index_select(0, scatter_n), None, *(None,) * ctx.buckets)


class UnpadDocuments(torch.autograd.Function):
    """Padded blocks [b*l, W] back to packed rows [N, W]; the gradient of padding is zero."""

    @staticmethod
    def forward(ctx: Any, scatter_n: Tensor, *blocks: Tensor) -> Tensor:
        ctx.save_for_backward(scatter_n)
        ctx.sizes = [len(block) for block in blocks]
        return torch.cat(blocks).index_select(0, scatter_n)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (scatter_n,) = ctx.saved_tensors
        padded = grads[0].new_zeros(sum(ctx.sizes), grads[0].shape[1])
        padded.index_copy_(0, scatter_n, grads[0])
        return (None, *padded.split(ctx.sizes))
