"""Measurement of the arithmetic peak that a device reaches in practice, the denominator of MFU."""

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
    """Measure the best FLOP/s of a square matrix product on ``device`` at ``dtype`` with the present thread count.

    It takes about ``limit_s`` seconds (default: `LIMIT_S`). ``size``: rows and columns; default 1024 on a CPU, 8192 on
    a GPU. The best of several runs is the one disturbed least by other work.
    """
    torch_device = torch.device(device)
    size = size or (1024 if torch_device.type == "cpu" else 8192)
    a = torch.randn(size, size, device=torch_device).to(dtype)
    b = torch.randn(size, size, device=torch_device).to(dtype)
    product = torch.empty(size, size, device=torch_device, dtype=dtype)

    def time_product() -> float:
        started_s = time.perf_counter()
        torch.mm(a, b, out=product)
        if torch_device.type == "cuda":
            torch.cuda.synchronize(torch_device)
        return time.perf_counter() - started_s

    deadline_s = time.perf_counter() + (limit_s or LIMIT_S)
    time_product()  # the first run pays for page faults and kernel selection
    best_s = time_product()
    while time.perf_counter() + best_s < deadline_s:
        best_s = min(best_s, time_product())
    return 2 * size**3 / best_s
