"""The Triton bodies of `operators.py`, with its operators' names and arguments. They compute in float32 whatever the
dtype of their tensors, use no atomics, and give the same bits at every call.

Why these, and not those of Liger-Kernel 0.8.5: importing any of its operators imports transformers and torch's
compiler, 2,300 modules that take 11 s at every start of a trainer. Besides,

- ``rms_norm``: Liger's rounds grad * weight to bfloat16 before it sums, wants stream and product in one dtype, and adds
  no gradient of the residual stream;
- ``norm_rotate``: Liger's rope rotates halves, not neighbouring pairs, copies query and key first, and has no norm;
- ``gated``: Liger's silu computes the same; its gelu wants gate and up in two tensors, which are two copies;
- ``chosen_logprobs``: Liger's cross-entropy has no entropy, and its log-softmax of chosen tokens no gradient.
"""
# Triton's language has no types: a kernel's parameters are annotated where they are constants.
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportArgumentType=false, reportIndexIssue=false
# pyright: reportOptionalMemberAccess=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.models.gpu.operators import _float32

_HEADS = 8  # heads of a program of `norm_rotate`
_COLUMNS = 1024  # of a program of `gated` and of the gradient of logits
_VOCABULARY = 4096  # logits that are loaded at a time


def _warps(values: int) -> int:
    """Warps of a program that holds this many values: 8 to 32 for each thread."""
    return min(16, max(4, values // 512))


def _programs(device: torch.device, rows: int) -> int:
    """Programs that share the rows of a gradient: some for each multiprocessor, whose sums of rows are added at the
    end."""
    if device.type != "cuda":
        return min(rows, 3)
    return min(rows, 4 * torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def _rms_norm_kernel(x, weight, y, inverse, d, epsilon, offset, HAS_OFFSET: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < d
    values = tl.load(x + row * d + column, mask=inside, other=0.0).to(tl.float32)
    weights = tl.load(weight + column, mask=inside, other=0.0)
    scale = tl.rsqrt(tl.sum(values * values, 0) / d + epsilon)
    if HAS_OFFSET:
        out = values * scale * (weights.to(tl.float32) + offset)
    else:
        dtype = y.dtype.element_ty
        out = (values * scale).to(dtype) * weights.to(dtype)
    tl.store(y + row * d + column, out, mask=inside)
    tl.store(inverse + row, scale)


@triton.jit
def _rms_norm_backward_kernel(
    grad, x, weight, inverse, stream, grad_x, partial, rows, d, offset, HAS_STREAM: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < d
    weights = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + offset
    total = tl.zeros((BLOCK,), tl.float32)
    stride = tl.full([], d, tl.int64)
    for row in range(program, rows, tl.num_programs(0)):
        element = row * stride + column
        scale = tl.load(inverse + row)
        upstream = tl.load(grad + element, mask=inside, other=0.0).to(tl.float32)
        unit = tl.load(x + element, mask=inside, other=0.0).to(tl.float32) * scale
        total += upstream * unit
        scaled = upstream * weights
        out = (scaled - unit * (tl.sum(scaled * unit, 0) / d)) * scale
        if HAS_STREAM:
            out += tl.load(stream + element, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x + element, out, mask=inside)
    tl.store(partial + program * d + column, total, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, offset: float) -> tuple[Tensor, Tensor]:
    x, d = x.contiguous(), x.shape[-1]
    y, inverse, block = torch.empty_like(x), _float32(x, x.shape[0]), triton.next_power_of_2(d)
    constants = {"HAS_OFFSET": offset != 0, "BLOCK": block, "num_warps": _warps(block)}
    if len(x):
        _rms_norm_kernel[(len(x),)](x, weight, y, inverse, d, epsilon, offset, **constants)
    return y, inverse


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor, offset: float, stream):
    grad, x = grad.contiguous(), x.contiguous()
    (n, d), programs = x.shape, _programs(x.device, len(x))
    grad_x, partial, block = torch.empty_like(x), _float32(x, programs, d), triton.next_power_of_2(d)
    added = grad if stream is None else stream.contiguous()
    constants = {"HAS_STREAM": stream is not None, "BLOCK": block, "num_warps": _warps(block)}
    if n:
        _rms_norm_backward_kernel[(programs,)](
            grad, x, weight, inverse, added, grad_x, partial, n, d, offset, **constants
        )
    return grad_x, partial.sum(0).to(weight.dtype)


@triton.jit
def _norm_rotate_kernel(
    qkv, q_norm, k_norm, cos, sin, out, inverse, width, row_stride, epsilon,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, NORMED: tl.constexpr,
    BLOCK: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, 2 * HALF)[None, :]
    inside = (head < HEADS + 2 * KV_HEADS) & (column < DIM)
    element = row * width + head * DIM + column
    loaded = tl.load(qkv + element, mask=inside, other=0.0)
    values = loaded.to(tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.sum(values * values, 1) / DIM + epsilon)[:, None]
        tl.store(inverse + row * (HEADS + KV_HEADS) + head, scale, mask=head < HEADS + KV_HEADS)
        values = values * scale * _head_weights(q_norm, k_norm, head, column, HEADS, DIM)
    pair = tl.arange(0, HALF)[None, :]
    turn_cos = tl.load(cos + row * row_stride + pair, mask=pair < DIM // 2, other=0.0)
    turn_sin = tl.load(sin + row * row_stride + pair, mask=pair < DIM // 2, other=0.0)
    even, odd = tl.split(tl.reshape(values, (BLOCK, HALF, 2)))
    turned = tl.join(even * turn_cos - odd * turn_sin, even * turn_sin + odd * turn_cos)
    turned = tl.reshape(turned, (BLOCK, 2 * HALF)).to(out.dtype.element_ty)
    tl.store(out + element, tl.where(head < HEADS + KV_HEADS, turned, loaded), mask=inside)  # values pass through


@triton.jit
def _head_weights(q_norm, k_norm, head, column, HEADS: tl.constexpr, DIM: tl.constexpr):
    of_q = tl.load(q_norm + column, mask=column < DIM, other=0.0).to(tl.float32)
    of_k = tl.load(k_norm + column, mask=column < DIM, other=0.0).to(tl.float32)
    return tl.where(head < HEADS, of_q, of_k)


@triton.jit
def _norm_rotate_backward_kernel(
    grad, qkv, q_norm, k_norm, cos, sin, inverse, out, partial, rows, width, grad_stride, row_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, NORMED: tl.constexpr,
    BLOCK: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, 2 * HALF)[None, :]
    inside = (head < HEADS + 2 * KV_HEADS) & (column < DIM)
    pair = tl.arange(0, HALF)[None, :]
    of_q = tl.zeros((2 * HALF,), tl.float32)
    of_k = tl.zeros((2 * HALF,), tl.float32)
    first = tl.full([], 0, tl.int64)
    for row_index in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = first + row_index
        element = row * width + head * DIM + column
        loaded = tl.load(grad + row * grad_stride + head * DIM + column, mask=inside, other=0.0)
        turn_cos = tl.load(cos + row * row_stride + pair, mask=pair < DIM // 2, other=0.0)
        turn_sin = tl.load(sin + row * row_stride + pair, mask=pair < DIM // 2, other=0.0)
        even, odd = tl.split(tl.reshape(loaded.to(tl.float32), (BLOCK, HALF, 2)))
        turned = tl.join(even * turn_cos + odd * turn_sin, odd * turn_cos - even * turn_sin)
        turned = tl.reshape(turned, (BLOCK, 2 * HALF))
        if NORMED:
            rotated = head < HEADS + KV_HEADS
            scale = tl.load(inverse + row * (HEADS + KV_HEADS) + head, mask=rotated, other=0.0)
            unit = tl.load(qkv + element, mask=inside, other=0.0).to(tl.float32) * scale
            of_weight = turned * unit
            of_q += tl.sum(tl.where(head < HEADS, of_weight, 0.0), 0)
            of_k += tl.sum(tl.where((head >= HEADS) & rotated, of_weight, 0.0), 0)
            scaled = turned * _head_weights(q_norm, k_norm, head, column, HEADS, DIM)
            turned = (scaled - unit * (tl.sum(scaled * unit, 1) / DIM)[:, None]) * scale
        turned = turned.to(out.dtype.element_ty)
        tl.store(out + element, tl.where(head < HEADS + KV_HEADS, turned, loaded), mask=inside)
    if NORMED:
        column_1 = tl.arange(0, 2 * HALF)
        program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        tl.store(partial + 2 * program * DIM + column_1, of_q, mask=column_1 < DIM)
        tl.store(partial + (2 * program + 1) * DIM + column_1, of_k, mask=column_1 < DIM)


def _head_constants(width: int, heads: int, kv_heads: int, normed: bool) -> tuple[dict[str, Any], int]:
    """The constants of the two kernels above, and how many programs share a row's heads."""
    dim = width // (heads + 2 * kv_heads)
    half = triton.next_power_of_2(dim) // 2
    constants = {"HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "NORMED": normed, "BLOCK": _HEADS, "HALF": half}
    return constants | {"num_warps": _warps(2 * half * _HEADS)}, triton.cdiv(heads + 2 * kv_heads, _HEADS)


def norm_rotate(qkv: Tensor, q_norm, k_norm, cos, sin, heads: int, kv_heads: int, epsilon: float):
    qkv, (n, width) = qkv.contiguous(), qkv.shape
    constants, blocks = _head_constants(width, heads, kv_heads, q_norm is not None)
    out, inverse = torch.empty_like(qkv), _float32(qkv, *((0,) if q_norm is None else (n, heads + kv_heads)))
    tensors = (qkv, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm, cos, sin, out, inverse)
    if n:
        _norm_rotate_kernel[(n, blocks)](*tensors, width, cos.stride(0), epsilon, **constants)
    return out, inverse


def norm_rotate_backward(grad: Tensor, qkv, q_norm, k_norm, cos, sin, inverse, heads: int, kv_heads: int):
    n, width = grad.shape
    grad = grad if grad.stride(1) == 1 else grad.contiguous()
    normed = qkv is not None and q_norm is not None and k_norm is not None
    constants, blocks = _head_constants(width, heads, kv_heads, normed)
    out = torch.empty_like(grad, memory_format=torch.contiguous_format)
    programs = max(1, _programs(grad.device, n)) if normed else max(1, n)
    partial = _float32(grad, programs * blocks, 2, constants["DIM"] if normed else 0)
    tensors = (qkv.contiguous(), q_norm, k_norm) if normed else (grad, grad, grad)
    if n:
        _norm_rotate_backward_kernel[(programs, blocks)](
            grad, *tensors, cos, sin, inverse, out, partial, n, width, grad.stride(0), cos.stride(0), **constants
        )
    of_q, of_k = partial.sum(0)
    return out, of_q if q_norm is None else of_q.to(q_norm.dtype), of_k if k_norm is None else of_k.to(k_norm.dtype)


@triton.jit
def _activation(gate, GELU: tl.constexpr):
    """The activation and its derivative."""
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)  # sqrt(2 / pi)
        tanh = 2 * tl.sigmoid(2 * inner) - 1
        slope = 0.7978845608028654 * (1 + 3 * 0.044715 * gate * gate)
        return 0.5 * gate * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * gate * (1 - tanh * tanh) * slope
    else:
        sigmoid = tl.sigmoid(gate)
        return gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))


@triton.jit
def _gated_kernel(gate_up, out, f, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < f
    gate = tl.load(gate_up + 2 * row * f + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (2 * row + 1) * f + column, mask=inside, other=0.0)
    activated, _ = _activation(gate, GELU)
    tl.store(out + row * f + column, activated.to(up.dtype) * up, mask=inside)


@triton.jit
def _gated_backward_kernel(grad, gate_up, out, f, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < f
    element = 2 * row * f + column
    upstream = tl.load(grad + row * f + column, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_up + element, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + element + f, mask=inside, other=0.0).to(tl.float32)
    activated, slope = _activation(gate, GELU)
    tl.store(out + element, upstream * up * slope, mask=inside)
    tl.store(out + element + f, upstream * activated, mask=inside)


def gated(gate_up: Tensor, gelu: bool) -> Tensor:
    gate_up, f = gate_up.contiguous(), gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], f)
    if out.numel():
        _gated_kernel[(out.numel() // f, triton.cdiv(f, _COLUMNS))](gate_up, out, f, GELU=gelu, BLOCK=_COLUMNS)
    return out


def gated_backward(grad: Tensor, gate_up: Tensor, gelu: bool) -> Tensor:
    grad, gate_up, f = grad.contiguous(), gate_up.contiguous(), gate_up.shape[-1] // 2
    out = torch.empty_like(gate_up)
    if out.numel():
        grid = (grad.numel() // f, triton.cdiv(f, _COLUMNS))
        _gated_backward_kernel[grid](grad, gate_up, out, f, GELU=gelu, BLOCK=_COLUMNS)
    return out


@triton.jit
def _chosen_logprobs_kernel(logits, targets, logprobs, entropies, sums, v, temperature, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest = -1e30  # finite: the difference to logits of -inf, which are no choice, is defined
    total = 0.0  # of exp(z - largest) ...
    weighted = 0.0  # ... times z - largest
    for first in tl.range(0, v, BLOCK, num_stages=3):
        column = first + tl.arange(0, BLOCK)
        scaled = tl.load(logits + row * v + column, mask=column < v, other=-float("inf")).to(tl.float32) / temperature
        new_largest = tl.maximum(largest, tl.max(scaled, 0))
        shrunk = tl.exp(largest - new_largest)
        distance = scaled - new_largest
        share = tl.exp(distance)
        weighted = shrunk * (weighted + total * (largest - new_largest))
        weighted += tl.sum(tl.where(distance > -float("inf"), distance * share, 0.0), 0)
        total = total * shrunk + tl.sum(share, 0)
        largest = new_largest
    lse = largest + tl.log(total)
    chosen = tl.load(logits + row * v + tl.load(targets + row)).to(tl.float32) / temperature
    tl.store(logprobs + row, chosen - lse)
    tl.store(entropies + row, tl.log(total) - weighted / total)
    tl.store(sums + row, lse)


@triton.jit
def _chosen_logprobs_backward_kernel(
    logits, targets, sums, entropies, grad, entropy_grad, v, temperature,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scaled = tl.load(logits + row * v + column, mask=column < v, other=0.0).to(tl.float32) / temperature
    is_target = column == tl.load(targets + row)
    logprob = scaled - tl.load(sums + row)
    share = tl.exp(logprob)
    slope = (tl.where(is_target, 1.0, 0.0) - share) * (tl.load(grad + row) / temperature)
    if ENTROPY:
        surprise = tl.where(share > 0, logprob, 0.0) + tl.load(entropies + row)
        slope -= share * surprise * (tl.load(entropy_grad + row) / temperature)
    tl.store(logits + row * v + column, slope, mask=column < v)


def chosen_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    logits, (c, v) = logits.contiguous(), logits.shape
    logprobs, entropies, sums = (_float32(logits, c) for _ in range(3))
    if c:
        constants = {"BLOCK": _VOCABULARY, "num_warps": 8}
        _chosen_logprobs_kernel[(c,)](logits, targets, logprobs, entropies, sums, v, temperature, **constants)
    return logprobs, entropies, sums


def chosen_logprobs_backward(logits: Tensor, targets: Tensor, lse: Tensor, entropies, grad, entropy_grad, temperature):
    c, v = logits.shape
    grid, constants = (c, triton.cdiv(v, _COLUMNS)), {"ENTROPY": entropy_grad is not None, "BLOCK": _COLUMNS}
    grad = grad.contiguous()
    tensors = (lse, entropies, grad, grad if entropy_grad is None else entropy_grad.contiguous())
    if c:
        _chosen_logprobs_backward_kernel[grid](logits, targets, *tensors, v, temperature, **constants)


@triton.jit
def _merge_attention_kernel(
    out, lse, part, part_lse, e, heads, out_stride, lse_stride, rows,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    of_these = tl.load(lse + head * lse_stride + row, mask=head < heads, other=0.0)
    of_part = tl.load(part_lse + head * rows + row, mask=head < heads, other=0.0)
    share = tl.sigmoid(of_part - of_these)[:, None]  # the part's of the softmax
    column = tl.arange(0, BLOCK)[None, :]
    inside = (head[:, None] < heads) & (column < e)
    element = head[:, None] * e + column
    these = tl.load(out + row * out_stride + element, mask=inside, other=0.0).to(tl.float32)
    others = tl.load(part + row * heads * e + element, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + element, these + share * (others - these), mask=inside)
    largest = tl.maximum(of_these, of_part)
    merged = largest + tl.log(tl.exp(of_these - largest) + tl.exp(of_part - largest))
    tl.store(lse + head * lse_stride + row, merged, mask=head < heads)


def merge_attention(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    n, heads, e = out.shape
    sizes, block = (e, heads, out.stride(0), lse.stride(0), n), triton.next_power_of_2(e)
    constants = {"HEADS": triton.next_power_of_2(heads), "BLOCK": block}
    constants["num_warps"] = _warps(constants["HEADS"] * block)
    _merge_attention_kernel[(n,)](out, lse, part.contiguous(), part_lse.contiguous(), *sizes, **constants)
