"""Candidates as models write them, honest, one for each back end with kernels of its own: text, never run."""

from __future__ import annotations

CPP = '''\
import torch
import torch.nn as nn
import ctypes
from typing import Optional, Tuple
SRC = r"""
#include <cmath>
extern "C" void softmax(const float* x, float* out, int n) { }
"""
_lib = None

def _get():
    global _lib
    if _lib is None:
        _lib = load_cpp(SRC)
        _lib.softmax.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
        _lib.softmax.restype = None
    return _lib

class ModelNew(nn.Module):
    """Optimised softmax."""
    def __init__(self, dim: int = 1, scale: float = 2.0):
        super(ModelNew, self).__init__()
        self.dim = dim
        self.scale = float(scale) * 2
        self.weight = nn.Parameter(torch.randn(dim, dim) * 0.5)
        self.bias: Optional[torch.Tensor] = None
        nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        orig = x.shape
        if not x.is_contiguous():
            x = x.contiguous()
        if x.dtype != torch.float32:
            raise ValueError(f"expected float32, got {x.dtype}")
        shape = list(x.shape)
        shape[self.dim] = 1
        outer = 1
        for s in shape[: self.dim]:
            outer *= s
        n = x.numel() // max(outer, 1)
        b, *rest = x.size()
        h = x.size(0) * 2 if x.dim() > 1 else -1
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
        with torch.no_grad():
            _get().softmax(ctypes.c_void_p(x.data_ptr()), out.data_ptr(), ctypes.c_int(n * h))
        outs = [torch.empty_like(x) for _ in range(3)]
        for i, o in enumerate(outs):
            _get().softmax(o.data_ptr(), o[i].data_ptr(), i * 4)
        return out.reshape(orig)

def helper(n: int, block: int = 256) -> int:
    return (n + block - 1) // block
'''

TRITON = """\
import torch
import torch.nn as nn
import triton
import triton.language as tl

@triton.autotune(configs=[triton.Config({"BLOCK": 128}, num_warps=4)], key=["n_cols"])
@triton.jit
def softmax_kernel(out_ptr, in_ptr, stride, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    x = tl.load(in_ptr + row * stride + offs, mask=offs < n_cols, other=-float("inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + row * stride + offs, e / tl.sum(e, 0), mask=offs < n_cols)

def triton_softmax(x: torch.Tensor, num: int):
    assert x.is_cuda, "x must be on CUDA"
    x = x.contiguous()
    n_rows, n_cols = x.shape
    BLOCK = triton.next_power_of_2(n_cols)
    num_warps = 4
    if BLOCK >= 2048 * num:
        num_warps = 8
    y = torch.empty_like(x)
    def grid(meta):
        return (triton.cdiv(n_rows * n_cols, meta["BLOCK"] * 2),)
    softmax_kernel[grid](y, x, x.stride(0), n_cols, BLOCK=BLOCK, num_warps=num_warps)
    softmax_kernel[(n_rows, )](y, x, x.stride(0) * 1, n_cols)
    softmax_kernel[lambda meta: (n_rows // meta["BLOCK"],)](y, x, 3, n_cols)
    return y

class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
    def forward(self, x):
        w = self.conv.weight
        co, ci, kh, kw = w.shape
        oh = (x.shape[2] - kh) // self.conv.stride[0] + 1
        return triton_softmax(x.view(-1, oh), co * ci)
"""

CUDA = '''\
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline
source = """
#include <torch/extension.h>
__global__ void k(const float* a, float* o, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) o[i] = a[i] * 2;
}
torch::Tensor run(torch::Tensor a) {
    TORCH_CHECK(a.is_contiguous());
    auto o = torch::empty_like(a);
    k<<<(a.numel() + 255) / 256, 256>>>(a.data_ptr<float>(), o.data_ptr<float>(), a.numel());
    return o;
}
"""
cpp = "torch::Tensor run(torch::Tensor a);"
mod = load_inline(name="m", cpp_sources=cpp, cuda_sources=source, functions=["run"], extra_cflags=["-O3"])
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.mod = mod
    def forward(self, a):
        return self.mod.run(a.contiguous().cuda())
'''
