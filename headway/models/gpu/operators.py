"""The decoder's element-wise parts as operators of torch, ``headway::NAME``, with their gradients.

Each has a body in plain torch, which defines what is right and computes on CPUs, where the C++ of `native.using` takes
over what it can, and on the meta device; and a Triton body for CUDA (`kernels.py`). They are defined by
`torch.library.Library`: the first call of a `custom_op` imports torch's compiler, which takes 3 s at every start, and
each call takes three times as long.

Shapes: n packed tokens, d width, h query heads, k key/value heads, e head dimension, f intermediate width,
c rows of a chunk, v vocabulary; w = (h + 2k) e, query, key and value side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from headway.models.cpu import native
from headway.runtime.devices import native_kernels_enabled

_LIBRARY = torch.library.Library("headway", "DEF")
_HAS_TRITON = find_spec("triton") is not None  # which torch for CUDA requires, where there are builds of it
Body = Callable[..., Any]


def _define(schema: str, plain: Body) -> Body:
    """Define an operator and return it."""
    name = schema.partition("(")[0]

    def on_cuda(*arguments: Any) -> Any:
        dtypes = (argument.dtype for argument in arguments if isinstance(argument, Tensor))
        if torch.float64 in dtypes or not native_kernels_enabled() or not _HAS_TRITON:
            return plain(*arguments)
        with torch.cuda.device_of(arguments[0]):  # Triton launches on the current GPU
            return getattr(import_module("headway.models.gpu.kernels"), name)(*arguments)

    _LIBRARY.define(schema)
    for key, body in (("CPU", plain), ("CUDA", on_cuda), ("Meta", plain)):
        _LIBRARY.impl(name, body, key)
    return getattr(torch.ops.headway, name).default


def _with_gradient(operator: Body, setup: Body, backward: Body) -> None:
    torch.library.register_autograd(operator, backward, setup_context=setup, lib=_LIBRARY)  # pyright: ignore[reportArgumentType]


def _native(x: Tensor, weight: Tensor | None = None) -> native.Kernels | None:
    """The C++ kernels if they have gradients (float32)."""
    kernels = native.active(x, weight)
    return kernels if kernels is not None and kernels.dtype == torch.float32 else None


def wide(x: Tensor) -> Tensor:
    """``x`` in at least float32."""
    return x if x.dtype == torch.float64 else x.float()


def with_offset(weight: Tensor, offset: float) -> Tensor:
    """``weight + offset`` in at least float32."""
    return wide(weight) + offset


def _float32(like: Tensor, *shape: int) -> Tensor:
    """Room for sums over elements of ``like``, in at least float32."""
    return like.new_empty(shape, dtype=torch.promote_types(like.dtype, torch.float32))


# --- RMSNorm ---------------------------------------------------------------------------------------------


def _normalise(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x / rms(x) over the last axis and 1 / rms(x), both at least float32."""
    x = wide(x)
    inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    inverse = inverse.square_().mul_(1 / x.shape[-1]).add_(epsilon).rsqrt_()
    return x * inverse, inverse


def _normalise_backward(grad: Tensor, unit: Tensor, inverse: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of weight * unit with respect to x (float32) and, per row, to weight (not summed yet)."""
    per_weight = grad * unit
    projection = (per_weight @ weight).mul_(1 / grad.shape[-1]).unsqueeze(-1)
    return (grad * weight).addcmul_(unit, projection, value=-1).mul_(inverse), per_weight


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float, offset: float) -> tuple[Tensor, Tensor]:
    if not offset and (kernels := _native(x, weight)) is not None:
        inverse_n = x.new_empty(len(x))
        return kernels.rms_norm(x, weight, epsilon, inverse_n), inverse_n
    unit, inverse = _normalise(x, epsilon)
    if offset:  # rounded once at the end, since in bfloat16 1 + weight would lose most of the weight
        return (unit * with_offset(weight, offset)).to(x.dtype), inverse.squeeze(-1)
    return unit.to(x.dtype) * weight.to(x.dtype), inverse.squeeze(-1)


def _rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, inverse_n: Tensor, offset: float, stream: Tensor | None
) -> tuple[Tensor, Tensor]:
    if not offset and (kernels := _native(x, weight)) is not None:
        grad_x, grad_weight = kernels.rms_norm_backward(grad, x, weight, inverse_n)
    else:
        inverse, wide_weight = inverse_n.unsqueeze(-1), with_offset(weight, offset) if offset else wide(weight)
        grad_x, per_weight = _normalise_backward(wide(grad), wide(x) * inverse, inverse, wide_weight)
        grad_x, grad_weight = grad_x.to(x.dtype), per_weight.sum(0).to(weight.dtype)
    return grad_x if stream is None else grad_x.add_(stream), grad_weight


# (x [n, d], weight [d], epsilon, offset) -> y = x / rms(x) * (weight + offset) [n, d], 1 / rms(x) [n];
# its gradient is that of `NormedStream`
rms_norm = _define("rms_norm(Tensor x, Tensor weight, float epsilon, float offset) -> (Tensor, Tensor)", _rms_norm)
# (gradient of y, x, weight, 1 / rms(x), offset, gradient of x from elsewhere) -> gradients of x and of weight
rms_norm_backward = _define(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor inverse, float offset, Tensor? stream)"
    " -> (Tensor, Tensor)",
    _rms_norm_backward,
)


class NormedStream(torch.autograd.Function):
    """`rms_norm` of the residual stream, and the stream itself: (y, x). Its backward adds the gradient of the stream
    behind it in the same pass."""

    @staticmethod
    def forward(ctx: Any, x_nd: Tensor, weight: Tensor, epsilon: float, offset: float) -> tuple[Tensor, Tensor]:
        y_nd, inverse_n = rms_norm(x_nd, weight, epsilon, offset)
        ctx.save_for_backward(x_nd, weight, inverse_n)
        ctx.offset = offset
        ctx.set_materialize_grads(False)
        return y_nd, x_nd

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if grads[0] is None:
            return grads[1], None, None, None
        grad_x, grad_weight = rms_norm_backward(grads[0], *ctx.saved_tensors, ctx.offset, grads[1])
        return grad_x, grad_weight if ctx.needs_input_grad[1] else None, None, None


# --- norm of queries and keys, rotary embedding ----------------------------------------------------------


def _pairs(x: Tensor) -> Tensor:
    """View neighbouring elements of the last axis as complex numbers."""
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def _norm_rotate(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    if (kernels := _native(qkv, q_norm)) is not None:
        out, inverse = qkv.clone(), qkv.new_empty(0 if q_norm is None else len(qkv), heads + kv_heads)
        kernels.norm_rotate(out, q_norm, k_norm, cos, sin, (heads, kv_heads, cos.shape[-1] * 2, epsilon), inverse)
        return out, inverse
    out, rotation, rotated = torch.empty_like(qkv), torch.complex(cos, sin), heads + kv_heads
    (query_key, value), (out_query_key, out_value) = (
        x.view(len(x), heads + 2 * kv_heads, -1).split((rotated, kv_heads), dim=1) for x in (qkv, out)
    )
    out_value.copy_(value)
    if q_norm is None or k_norm is None:
        out_query_key.copy_(torch.view_as_real(_pairs(wide(query_key)) * rotation).flatten(-2))
        return out, _float32(qkv, 0)
    unit, inverse = _normalise(query_key, epsilon)
    weight = torch.cat((q_norm.expand(heads, -1), k_norm.expand(kv_heads, -1)))
    out_query_key.copy_(torch.view_as_real(_pairs(unit * wide(weight)) * rotation).flatten(-2))
    return out, inverse.squeeze(-1)


def _norm_rotate_backward(
    grad: Tensor,
    qkv: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    inverse: Tensor,
    heads: int,
    kv_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    out = grad.clone(memory_format=torch.contiguous_format)
    if (kernels := _native(out if qkv is None else qkv, q_norm)) is not None:
        norms = () if qkv is None or q_norm is None or k_norm is None else (qkv, inverse, q_norm, k_norm)
        sizes = (heads, kv_heads, cos.shape[-1] * 2)
        of_q, of_k = kernels.norm_rotate_backward(out, norms, cos, sin, sizes) or (grad[:0], grad[:0])
        return out, of_q, of_k
    rotation = torch.complex(cos, sin)
    rotated_grad = out.view(len(grad), heads + 2 * kv_heads, -1)[:, : heads + kv_heads]
    turned = torch.view_as_real(_pairs(wide(rotated_grad)) * rotation.conj()).flatten(-2)
    if qkv is None or q_norm is None or k_norm is None:
        rotated_grad.copy_(turned)
        return out, _float32(grad, 0), _float32(grad, 0)
    unit = wide(qkv.view(len(grad), heads + 2 * kv_heads, -1)[:, : heads + kv_heads]) * inverse.unsqueeze(-1)
    grads_of_weights: list[Tensor] = []
    for part, weight in ((slice(0, heads), q_norm), (slice(heads, heads + kv_heads), k_norm)):
        part_inverse = inverse[:, part].unsqueeze(-1)
        grad_x, per_weight = _normalise_backward(turned[:, part], unit[:, part], part_inverse, wide(weight))
        rotated_grad[:, part].copy_(grad_x)
        grads_of_weights.append(per_weight.sum((0, 1)).to(weight.dtype))
    return out, grads_of_weights[0], grads_of_weights[1]


def _setup_rotate(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    qkv, q_norm, k_norm, cos, sin, *sizes = inputs
    ctx.sizes = sizes[:2]
    ctx.save_for_backward(None if q_norm is None else qkv, q_norm, k_norm, cos, sin, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _rotate_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    qkv, *saved = ctx.saved_tensors
    grad, *of_weights = norm_rotate_backward(grads[0], qkv, *saved, *ctx.sizes)
    needed = zip(of_weights, ctx.needs_input_grad[1:3], strict=True)
    return grad, *(of_weight if is_needed else None for of_weight, is_needed in needed), *(None,) * 5


# (qkv [n, w], weights [e] or None, cos and sin float32 [n, 1, e / 2], h, k, epsilon) -> qkv with queries and keys
# normed per head and rotated by neighbouring pairs [n, w]; 1 / rms of each query and key [n, h + k], without norm [0]
norm_rotate = _define(
    "norm_rotate(Tensor qkv, Tensor? q_norm, Tensor? k_norm, Tensor cos, Tensor sin, int heads, int kv_heads,"
    " float epsilon) -> (Tensor, Tensor)",
    _norm_rotate,
)
# ... -> gradients of qkv [n, w] and of both weights [e], without norm [0]
norm_rotate_backward = _define(
    "norm_rotate_backward(Tensor grad, Tensor? qkv, Tensor? q_norm, Tensor? k_norm, Tensor cos, Tensor sin,"
    " Tensor inverse, int heads, int kv_heads) -> (Tensor, Tensor, Tensor)",
    _norm_rotate_backward,
)
_with_gradient(norm_rotate, _setup_rotate, _rotate_backward)


# --- the gate --------------------------------------------------------------------------------------------


def _activated(gate: Tensor, gelu: bool) -> Tensor:
    return functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)


def _gated(gate_up: Tensor, gelu: bool) -> Tensor:
    if not gelu and (kernels := _native(gate_up)) is not None:
        return kernels.gated_silu(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return _activated(gate, gelu).mul_(up)


def _gated_backward(grad: Tensor, gate_up: Tensor, gelu: bool) -> Tensor:
    if not gelu and (kernels := _native(gate_up)) is not None:
        return kernels.gated_silu_backward(grad, gate_up)
    (gate, up), out = gate_up.chunk(2, dim=-1), torch.empty_like(gate_up)
    grad_gate, grad_up = out.chunk(2, dim=-1)
    if gelu:
        torch.ops.aten.gelu_backward.grad_input(grad * up, gate, approximate="tanh", grad_input=grad_gate)
    else:
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
    torch.mul(_activated(gate, gelu), grad, out=grad_up)
    return out


def _setup_gate(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.gelu = inputs[1]


# (gate and up side by side [..., 2f], tanh's approximation of gelu instead of silu) -> activation(gate) * up [..., f]
gated = _define("gated(Tensor gate_up, bool gelu) -> Tensor", _gated)
gated_backward = _define("gated_backward(Tensor grad, Tensor gate_up, bool gelu) -> Tensor", _gated_backward)
_with_gradient(gated, _setup_gate, lambda ctx, grad: (gated_backward(grad, ctx.saved_tensors[0], ctx.gelu), None))


# --- log-probabilities -----------------------------------------------------------------------------------


def _chosen_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    scaled_cv = wide(logits) if temperature == 1.0 else wide(logits) / temperature
    logprobs_cv = torch.log_softmax(scaled_cv, dim=-1)
    chosen_c = logprobs_cv.gather(-1, targets[:, None])[:, 0].clone()  # no view: a loss may overwrite it
    probabilities_cv = logprobs_cv.exp()
    # For p = 0, p log p must be 0, not 0 x -inf.
    finite_cv = logprobs_cv.clamp_(min=torch.finfo(logprobs_cv.dtype).min)
    return chosen_c, finite_cv.mul_(probabilities_cv).sum(-1).neg_(), probabilities_cv


def _logits_gradient(
    targets: Tensor,
    probabilities_cv: Tensor,
    entropies_c: Tensor,
    grad_c: Tensor,
    entropy_grad_c: Tensor | None,
    temperature: float,
) -> Tensor:
    """d log p_y / dz = (1_y - p) / T, d H / dz = -p (log p + H) / T."""
    grad_c1 = grad_c[:, None] / temperature
    out_cv = (probabilities_cv * -grad_c1).scatter_add_(-1, targets[:, None], grad_c1)
    if entropy_grad_c is None:
        return out_cv
    slopes_cv = torch.xlogy(probabilities_cv, probabilities_cv).addcmul_(probabilities_cv, entropies_c[:, None])
    return out_cv.addcmul_(slopes_cv, entropy_grad_c[:, None] / temperature, value=-1)


def _chosen_logprobs_backward(logits: Tensor, *inputs: Any) -> None:
    logits.copy_(_logits_gradient(*inputs))


def _setup_logprobs(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    logits, targets, ctx.temperature = inputs
    ctx.dtype, on_cpu = logits.dtype, logits.device.type == "cpu"
    ctx.save_for_backward(targets, output[2], output[1], None if on_cpu else logits)
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _logprobs_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
    grad, entropy_grad = grads[:2]
    if grad is None and entropy_grad is None:
        return None, None, None
    targets, state, entropies, logits = ctx.saved_tensors
    grad = torch.zeros_like(entropies) if grad is None else grad
    if logits is None:
        logits_grad = _logits_gradient(targets, state, entropies, grad, entropy_grad, ctx.temperature)
        return logits_grad.to(ctx.dtype), None, None
    logits = logits.detach()  # whose memory the gradient takes, since nothing needs them any more: both are gigabytes
    chosen_logprobs_backward(logits, targets, state, entropies, grad, entropy_grad, ctx.temperature)
    return logits, None, None


# (logits z [c, v], targets int64 [c], temperature T) -> log-softmax(z / T) at the targets and entropy of softmax(z / T)
# with gradients, [c] each in float32, and what the gradient needs: Triton's log sum exp(z / T) [c], plain torch the
# probabilities [c, v]. Logits of -inf are no choice. On a GPU the gradient overwrites them.
chosen_logprobs = _define(
    "chosen_logprobs(Tensor logits, Tensor targets, float temperature) -> (Tensor, Tensor, Tensor)", _chosen_logprobs
)
chosen_logprobs_backward = _define(
    "chosen_logprobs_backward(Tensor(a!) logits, Tensor targets, Tensor state, Tensor entropies, Tensor grad,"
    " Tensor? entropy_grad, float temperature) -> ()",
    _chosen_logprobs_backward,
)
_with_gradient(chosen_logprobs, _setup_logprobs, _logprobs_backward)


# --- parts of attention ----------------------------------------------------------------------------------


def _merge_attention(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    share_nh1 = torch.sigmoid(part_lse - lse).t().unsqueeze(-1)  # the part's of the softmax
    out.copy_(torch.lerp(wide(out), wide(part), share_nh1))
    lse.copy_(torch.logaddexp(lse, part_lse))


# (out [n, h, e], lse [h, n] of some keys, the same of others) merges the others' into out and lse
merge_attention = _define(
    "merge_attention(Tensor(a!) out, Tensor(b!) lse, Tensor part, Tensor part_lse) -> ()", _merge_attention
)
