"""The arithmetic peak a device reaches in practice: the denominator of MFU."""

from __future__ import annotations

import time

import torch

LIMIT_S = 0.3


def measure_peak_flops(
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    limit_s: float | None = None,
    size: int | None = None,
) -> float:
    """Best FLOP/s of a square matrix product on ``device`` at ``dtype`` with the present thread count.

    Takes about ``limit_s`` seconds (default: `LIMIT_S`). ``size``: rows and columns; default 1024 on a CPU, 8192 on a
    GPU. The best of several runs is taken, the one disturbed least by other work.
    """
    where = torch.device(device)
    size = size or (1024 if where.type == "cpu" else 8192)
    a = torch.randn(size, size, device=where).to(dtype)
    b = torch.randn(size, size, device=where).to(dtype)
    out = torch.empty(size, size, device=where, dtype=dtype)

    def once() -> float:
        started = time.perf_counter()
        torch.mm(a, b, out=out)
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        return time.perf_counter() - started

    end = time.perf_counter() + (limit_s or LIMIT_S)
    once()  # the first run pays for page faults and kernel selection
    best = once()
    while time.perf_counter() + best < end:
        best = min(best, once())
    return 2 * size**3 / best
