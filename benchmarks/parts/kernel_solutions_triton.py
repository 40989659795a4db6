"""Honest solutions of built-in kernel problems in Triton, as models write them for a GPU;
the interpreter runs them too.

Each is a problem's kernels, its constructor's parameters and body, and its forward's parameters and body.
"""

from __future__ import annotations

import textwrap

HEAD = """import torch
import triton
import triton.language as tl
from torch import nn


"""
ROWS = "n_rows, n_columns = x.shape\nBLOCK = triton.next_power_of_2(n_columns)\n"
TRITON: dict[str, tuple[str, str, str, str, str]] = {
    "leaky_relu": (
        """
        @triton.jit
        def leaky_relu_kernel(x_ptr, out_ptr, count, slope, BLOCK: tl.constexpr):
            offsets = tl.program_id(axis=0) * BLOCK + tl.arange(0, BLOCK)
            mask = offsets < count
            x = tl.load(x_ptr + offsets, mask=mask)
            tl.store(out_ptr + offsets, tl.where(x > 0, x, slope * x), mask=mask)
        """,
        "slope",
        "self.slope = slope",
        "x",
        """
        x = x.contiguous()
        out = torch.empty_like(x)
        grid = lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)
        leaky_relu_kernel[grid](x, out, x.numel(), self.slope, BLOCK=4096, num_warps=8)
        return out
        """,
    ),
    "silu_gate": (
        """
        @triton.jit
        def silu(x):
            return x * tl.sigmoid(x)


        @triton.jit
        def gate_kernel(gate_ptr, x_ptr, out_ptr, count, BLOCK: tl.constexpr):
            offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            mask = offsets < count
            gate = tl.load(gate_ptr + offsets, mask=mask, other=0.0)
            tl.store(out_ptr + offsets, silu(gate) * tl.load(x_ptr + offsets, mask=mask, other=0.0), mask=mask)
        """,
        "",
        "",
        "gate, x",
        """
        gate, x = gate.contiguous(), x.contiguous()
        out = torch.empty_like(x)
        gate_kernel[(triton.cdiv(x.numel(), 2048),)](gate, x, out, x.numel(), BLOCK=2048)
        return out
        """,
    ),
    "softmax": (
        """
        @triton.jit
        def softmax_kernel(out_ptr, x_ptr, stride, n_columns, BLOCK: tl.constexpr):
            row = tl.program_id(0)
            offsets = tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * stride + offsets, mask=offsets < n_columns, other=-float("inf"))
            e = tl.exp(x - tl.max(x, axis=0))
            tl.store(out_ptr + row * n_columns + offsets, e / tl.sum(e, axis=0), mask=offsets < n_columns)
        """,
        "",
        "",
        "x",
        ROWS
        + """
        out = torch.empty(n_rows, n_columns, dtype=x.dtype, device=x.device)
        softmax_kernel[(n_rows,)](out, x, x.stride(0), n_columns, BLOCK=BLOCK, num_warps=8 if BLOCK >= 2048 else 4)
        return out
        """,
    ),
    "logsumexp": (
        """
        LOG_2 = tl.constexpr(0.6931471805599453)


        @triton.jit
        def logsumexp_kernel(x_ptr, out_ptr, n_columns, BLOCK: tl.constexpr):
            row = tl.program_id(0)
            offsets = tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * n_columns + offsets, mask=offsets < n_columns, other=float("-inf"))
            largest = tl.max(x, 0)
            total = tl.sum(tl.exp(x - largest), 0)
            tl.store(out_ptr + row, largest + tl.log2(total) * LOG_2)
        """,
        "",
        "",
        "x",
        ROWS
        + """
        out = torch.empty(n_rows, dtype=x.dtype, device=x.device)
        logsumexp_kernel[(n_rows,)](x.contiguous(), out, n_columns, BLOCK=BLOCK)
        return out
        """,
    ),
    "layer_norm": (
        """
        @triton.jit
        def layer_norm_kernel(x_ptr, weight_ptr, bias_ptr, out_ptr, n_columns, eps, BLOCK: tl.constexpr):
            row = tl.program_id(0)
            offsets = tl.arange(0, BLOCK)
            mask = offsets < n_columns
            x = tl.load(x_ptr + row * n_columns + offsets, mask=mask, other=0.0)
            mean = tl.sum(x, axis=0) / n_columns
            centred = tl.where(mask, x - mean, 0.0)
            scale = 1 / tl.sqrt(tl.sum(centred * centred, axis=0) / n_columns + eps)
            y = centred * scale * tl.load(weight_ptr + offsets, mask=mask) + tl.load(bias_ptr + offsets, mask=mask)
            tl.store(out_ptr + row * n_columns + offsets, y, mask=mask)
        """,
        "",
        "",
        "x, weight, bias",
        ROWS
        + """
        out = torch.empty_like(x)
        layer_norm_kernel[(n_rows,)](x, weight, bias, out, n_columns, 1e-5, BLOCK=BLOCK)
        return out
        """,
    ),
    "rms_norm": (
        """
        @triton.heuristics({"BLOCK": lambda given: triton.next_power_of_2(given["n_columns"])})
        @triton.jit
        def rms_norm_kernel(x_ptr, weight_ptr, out_ptr, n_columns, eps, BLOCK: tl.constexpr):
            row = tl.program_id(0)
            offsets = tl.arange(0, BLOCK)
            mask = offsets < n_columns
            x = tl.load(x_ptr + row * n_columns + offsets, mask=mask, other=0.0)
            scale = tl.math.rsqrt(tl.sum(x * x, 0) / n_columns + eps)
            weight = tl.load(weight_ptr + offsets, mask=mask)
            tl.store(out_ptr + row * n_columns + offsets, x * scale * weight, mask=mask)
        """,
        "epsilon",
        "self.epsilon = epsilon",
        "x, weight",
        """
        out = torch.empty_like(x)
        rms_norm_kernel[(x.shape[0],)](x, weight, out, x.shape[1], self.epsilon)
        return out
        """,
    ),
    "cumulative_sum": (
        """
        @triton.jit
        def cumulative_sum_kernel(x_ptr, out_ptr, n_columns, BLOCK: tl.constexpr):
            row = tl.program_id(0)
            offsets = tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * n_columns + offsets, mask=offsets < n_columns, other=0.0)
            tl.store(out_ptr + row * n_columns + offsets, tl.cumsum(x, axis=0), mask=offsets < n_columns)
        """,
        "",
        "",
        "x",
        ROWS
        + """
        out = torch.empty_like(x)
        cumulative_sum_kernel[(n_rows,)](x, out, n_columns, BLOCK=BLOCK)
        return out
        """,
    ),
    "matmul": (
        """
        @triton.autotune(
            configs=[
                triton.Config({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}, num_stages=3, num_warps=4),
                triton.Config({"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 32}, num_stages=4, num_warps=8),
            ],
            key=["M", "N", "K"],
        )
        @triton.jit
        def matmul_kernel(
            a_ptr, b_ptr, out_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
            BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
        ):
            rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
            columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
            total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for start in range(0, tl.cdiv(K, BLOCK_K)):
                inner = start * BLOCK_K + tl.arange(0, BLOCK_K)
                a_mask = (rows[:, None] < M) & (inner[None, :] < K)
                b_mask = (inner[:, None] < K) & (columns[None, :] < N)
                a = tl.load(a_ptr + rows[:, None] * stride_am + inner[None, :] * stride_ak, mask=a_mask, other=0.0)
                b = tl.load(b_ptr + inner[:, None] * stride_bk + columns[None, :] * stride_bn, mask=b_mask, other=0.0)
                total = tl.dot(a, b, total, input_precision="ieee")
            out_mask = (rows[:, None] < M) & (columns[None, :] < N)
            tl.store(out_ptr + rows[:, None] * N + columns[None, :], total, mask=out_mask)
        """,
        "",
        "",
        "a, b",
        """
        M, K = a.shape
        N = b.shape[1]
        out = torch.empty((M, N), device=a.device, dtype=a.dtype)
        grid = lambda meta: (triton.cdiv(M, meta["BLOCK_M"]), triton.cdiv(N, meta["BLOCK_N"]))
        matmul_kernel[grid](a, b, out, M, N, K, a.stride(0), a.stride(1), b.stride(0), b.stride(1))
        return out
        """,
    ),
    "linear_gelu": (
        """
        @triton.jit
        def linear_gelu_kernel(x_ptr, w_ptr, b_ptr, out_ptr, M, N, K, BLOCK: tl.constexpr, INNER: tl.constexpr):
            rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
            for start in range(0, K, INNER):
                inner = start + tl.arange(0, INNER)
                x_mask = (rows[:, None] < M) & (inner[None, :] < K)
                w_mask = (inner[:, None] < K) & (columns[None, :] < N)
                x = tl.load(x_ptr + rows[:, None] * K + inner[None, :], mask=x_mask, other=0.0)
                w = tl.load(w_ptr + columns[None, :] * K + inner[:, None], mask=w_mask, other=0.0)
                total += tl.dot(x, w, input_precision="ieee")
            total += tl.load(b_ptr + columns, mask=columns < N, other=0.0)[None, :]
            total = 0.5 * total * (1 + tl.erf(total * 0.7071067811865476))
            mask = (rows[:, None] < M) & (columns[None, :] < N)
            tl.store(out_ptr + rows[:, None] * N + columns[None, :], total, mask=mask)
        """,
        "inputs, outputs",
        "self.linear = nn.Linear(inputs, outputs)",
        "x",
        """
        M, K = x.shape
        N = self.linear.weight.shape[0]
        out = torch.empty(M, N, device=x.device, dtype=x.dtype)
        grid = (triton.cdiv(M, 64), triton.cdiv(N, 64))
        linear_gelu_kernel[grid](x, self.linear.weight, self.linear.bias, out, M, N, K, BLOCK=64, INNER=32)
        return out
        """,
    ),
}


def triton_source(problem: str) -> str:
    """The solution of a problem in Triton."""
    kernels, parameters, made, arguments, _ = (textwrap.dedent(part).strip() for part in TRITON[problem])
    body = "\n".join(line.strip() for line in TRITON[problem][4].splitlines())  # none of them is nested
    lines = ["class ModelNew(nn.Module):"]
    if parameters:
        lines += [f"    def __init__(self, {parameters}):", "        super().__init__()", f"        {made}", ""]
    lines.append(f"    def forward(self, {arguments}):")
    return f"{HEAD}{kernels}\n\n\n" + "\n".join(lines) + "\n" + textwrap.indent(body.strip(), " " * 8) + "\n"
