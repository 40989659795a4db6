"""The decoder's products, and its element-wise parts with hand-written gradients, which pass over memory less often
than autograd's.

All are exact (tests compare with plain autograd). Shape suffixes: n packed tokens, d width, h query heads,
g key/value heads, e head dimension, f intermediate width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from headway.config.adapter import Quantization
from headway.models.cpu import native
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


def _wide(x: Tensor) -> Tensor:
    """``x`` in at least float32."""
    return x if x.dtype == torch.float64 else x.float()


def _normalise(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x / rms(x) over the last axis and 1 / rms(x), both at least float32."""
    wide = _wide(x)
    inverse = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    inverse = inverse.square_().mul_(1 / x.shape[-1]).add_(epsilon).rsqrt_()
    return wide * inverse, inverse


def _normalise_backward(grad: Tensor, unit: Tensor, inverse: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of weight * unit with respect to x (float32) and, per row, to weight (not summed yet)."""
    per_weight = grad * unit
    projection = (per_weight @ weight).mul_(1 / grad.shape[-1]).unsqueeze(-1)
    return (grad * weight).addcmul_(unit, projection, value=-1).mul_(inverse), per_weight


def _with_gradients(x: Tensor, weight: Tensor | None = None) -> native.Kernels | None:
    """The native kernels if they have gradients (float32), else None."""
    kernels = native.active(x, weight)
    return kernels if kernels is not None and kernels.dtype == torch.float32 else None


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_nd: Tensor, weight: Tensor, epsilon: float, offset: float) -> Tensor:
        ctx.fast = None if offset else _with_gradients(x_nd, weight)
        if ctx.fast is not None:
            inverses_n = x_nd.new_empty(x_nd.shape[0])
            ctx.save_for_backward(x_nd, inverses_n, weight)
            return ctx.fast.rms_norm(x_nd, weight, epsilon, inverses_n)
        unit, inverse = _normalise(x_nd, epsilon)
        ctx.dtype, ctx.offset = x_nd.dtype, offset
        ctx.save_for_backward(unit.to(x_nd.dtype), inverse, weight)
        return _weighted(unit, weight, offset, x_nd.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        unit, inverse, weight = ctx.saved_tensors
        if ctx.fast is not None:
            return *ctx.fast.rms_norm_backward(grads[0], unit, weight, inverse), None, None
        wide_weight = with_offset(weight, ctx.offset) if ctx.offset else _wide(weight)
        grad_x, per_weight = _normalise_backward(_wide(grads[0]), _wide(unit), inverse, wide_weight)
        grad_weight = per_weight.sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return grad_x.to(ctx.dtype), grad_weight, None, None


def rms_norm(x_nd: Tensor, weight: Tensor, epsilon: float, offset: float = 0.0) -> Tensor:
    """RMSNorm over the last axis of [N, d], computed in float32 (Zhang & Sennrich 2019, Eq. 4).

    The result has the dtype of x. ``offset`` is added to the weight (Gemma: 1).
    """
    if torch.is_grad_enabled():
        return _RmsNorm.apply(x_nd, weight, epsilon, offset)  # pyright: ignore[reportReturnType]
    if not offset and (kernels := native.active(x_nd, weight)) is not None:
        return kernels.rms_norm(x_nd, weight, epsilon)
    return _weighted(_normalise(x_nd, epsilon)[0], weight, offset, x_nd.dtype)


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


def _weighted(unit: Tensor, weight: Tensor, offset: float, dtype: torch.dtype) -> Tensor:
    """``unit * (weight + offset)``. With an offset the result is rounded once at the end, since in bfloat16 1 + weight
    would lose most of the weight."""
    if offset:
        return (unit * with_offset(weight, offset)).to(dtype)
    return unit.to(dtype) * weight.to(dtype)


def with_offset(weight: Tensor, offset: float) -> Tensor:
    """``weight + offset`` in at least float32."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32)) + offset


def _pairs(x: Tensor) -> Tensor:
    """View neighbouring elements of the last axis as complex numbers."""
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


class _NormRotate(torch.autograd.Function):
    """Query/key norm and rotary embedding in place on the joint projection; values pass through."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, cos: Tensor, sin: Tensor, sizes: Sizes
    ) -> Tensor:
        ctx.mark_dirty(qkv)
        ctx.fast = _with_gradients(qkv, q_norm)
        if ctx.fast is not None:
            rotated_shape = (qkv.shape[0], sizes[0] + sizes[1])
            norm_outputs = ()
            if q_norm is not None and k_norm is not None:
                norm_outputs = (qkv.new_empty(*rotated_shape, sizes[2]), qkv.new_empty(rotated_shape))
            ctx.fast.norm_rotate(qkv, q_norm, k_norm, cos, sin, sizes, *norm_outputs)
            ctx.sizes = sizes
            ctx.save_for_backward(cos, sin, *norm_outputs, *((q_norm, k_norm) if norm_outputs else ()))
            return qkv
        rotation = torch.complex(cos, sin)
        saved = _norm_rotate(qkv, q_norm, k_norm, rotation, sizes)
        ctx.sizes, ctx.normed = sizes, saved is not None
        ctx.save_for_backward(rotation, *(saved or ()), *((q_norm, k_norm) if saved is not None else ()))
        return qkv

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None, None]:
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        if ctx.fast is not None:
            cos, sin, *norms = ctx.saved_tensors
            return grad, *ctx.fast.norm_rotate_backward(grad, norms, cos, sin, ctx.sizes), None, None, None
        heads, kv_heads, head_dim, _ = ctx.sizes
        rotation, *saved_norms = ctx.saved_tensors
        rotated_grad = grad.view(grad.shape[0], -1, head_dim)[:, : heads + kv_heads]
        turned = torch.view_as_real(_pairs(_wide(rotated_grad)) * rotation.conj()).flatten(-2)
        if not ctx.normed:
            rotated_grad.copy_(turned)
            return grad, None, None, None, None, None
        unit, inverse, q_norm, k_norm = saved_norms
        parts = ((slice(0, heads), q_norm), (slice(heads, heads + kv_heads), k_norm))
        grads_of_weights: list[Tensor | None] = []
        for (part, weight), needs_grad in zip(parts, ctx.needs_input_grad[1:3], strict=True):
            wide = _wide(weight)
            grad_x, per_weight = _normalise_backward(turned[:, part], unit[:, part], inverse[:, part], wide)
            rotated_grad[:, part].copy_(grad_x)
            grads_of_weights.append(per_weight.sum((0, 1)).to(weight.dtype) if needs_grad else None)
        return grad, grads_of_weights[0], grads_of_weights[1], None, None, None


def _norm_rotate(
    qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, rotation: Tensor, sizes: Sizes
) -> tuple[Tensor, Tensor] | None:
    """Overwrite the query and key part of ``qkv``. Returns the norm's unit vectors and inverse scales for the
    backward; None: there is no norm."""
    heads, kv_heads, head_dim, epsilon = sizes
    query_key = qkv.view(qkv.shape[0], -1, head_dim)[:, : heads + kv_heads]
    if q_norm is None or k_norm is None:
        query_key.copy_(torch.view_as_real(_pairs(_wide(query_key)) * rotation).flatten(-2))
        return None
    unit, inverse = _normalise(query_key, epsilon)
    weight = torch.cat((q_norm.expand(heads, -1), k_norm.expand(kv_heads, -1)))
    query_key.copy_(torch.view_as_real(_pairs(unit * _wide(weight)) * rotation).flatten(-2))
    return unit, inverse


def norm_rotate(
    qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, cos: Tensor, sin: Tensor, sizes: Sizes
) -> Tensor:
    """Overwrite and return ``qkv`` [N, (Hq + 2 Hkv) Dh], with query and key normed per head (if weights are given) and
    rotated by position (RoFormer, Eq. 34). Rotated pairs are neighbours; cos and sin are float32 [N, 1, Dh / 2]."""
    if torch.is_grad_enabled():
        return _NormRotate.apply(qkv, q_norm, k_norm, cos, sin, sizes)  # pyright: ignore[reportReturnType]
    if (kernels := native.active(qkv, q_norm)) is not None:
        kernels.norm_rotate(qkv, q_norm, k_norm, cos, sin, sizes)
    else:
        _norm_rotate(qkv, q_norm, k_norm, torch.complex(cos, sin), sizes)
    return qkv


def _gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _silu_gradient(grad: Tensor, x: Tensor, out: Tensor) -> None:
    torch.ops.aten.silu_backward.grad_input(grad, x, grad_input=out)


def _gelu_gradient(grad: Tensor, x: Tensor, out: Tensor) -> None:
    torch.ops.aten.gelu_backward.grad_input(grad, x, approximate="tanh", grad_input=out)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, activation: Any, gradient: Any) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.activation, ctx.gradient = activation, gradient
        ctx.fast = _with_gradients(gate_up) if activation is functional.silu else None
        if ctx.fast is not None:
            return ctx.fast.gated_silu(gate_up)
        gate_nf, up_nf = gate_up.chunk(2, dim=-1)
        return activation(gate_nf).mul_(up_nf)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gate_up,) = ctx.saved_tensors
        if ctx.fast is not None:
            return ctx.fast.gated_silu_backward(grads[0], gate_up), None, None
        gate_nf, up_nf = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        ctx.gradient(grads[0] * up_nf, gate_nf, grad_gate)
        torch.mul(ctx.activation(gate_nf), grads[0], out=grad_up)
        return out, None, None


def gated_silu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate and up side by side: [N, 2f] to [N, f] (Shazeer 2020, SwiGLU)."""
    if torch.is_grad_enabled():
        return _Gated.apply(gate_up, functional.silu, _silu_gradient)  # pyright: ignore[reportReturnType]
    if (kernels := native.active(gate_up)) is not None:
        return kernels.gated_silu(gate_up)
    gate_nf, up_nf = gate_up.chunk(2, dim=-1)
    return functional.silu(gate_nf).mul_(up_nf)


def gated_gelu(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up with the tanh approximation of gelu: [N, 2f] to [N, f] (Shazeer 2020, GEGLU)."""
    if torch.is_grad_enabled():
        return _Gated.apply(gate_up, _gelu, _gelu_gradient)  # pyright: ignore[reportReturnType]
    gate_nf, up_nf = gate_up.chunk(2, dim=-1)
    return _gelu(gate_nf).mul_(up_nf)


GATED: dict[str, Callable[[Tensor], Tensor]] = {"silu": gated_silu, "gelu_tanh": gated_gelu}


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
