"""Back ends of kernels: the devices that each runs on, and what a machine lacks for it."""

from __future__ import annotations

import importlib.util
import shutil
from typing import Literal, get_args

from headway.records.kernels import KernelBackend

BACKENDS: tuple[KernelBackend, ...] = get_args(KernelBackend)
DeviceKind = Literal["cpu", "gpu"]
_DEVICES: dict[KernelBackend, tuple[DeviceKind, ...]] = {  # the first that a machine has is the default
    "torch": ("gpu", "cpu"),
    "cpp": ("cpu",),
    "triton": ("gpu", "cpu"),  # on a CPU its interpreter
    "cuda": ("gpu", "cpu"),  # on a CPU it is compiled, and not run
}


def device_kinds(backend: KernelBackend) -> tuple[DeviceKind, ...]:
    """The kinds of device that a back end runs on, the preferred one first."""
    return _DEVICES[backend]


def missing_for(backend: KernelBackend, *, gpus: bool) -> str:
    """A text on what this machine lacks for a back end, and how to install it; "": nothing. ``gpus``: it has a GPU."""
    if importlib.util.find_spec("torch") is None:
        return "torch isn't installed: pip install torch"
    if backend == "triton" and importlib.util.find_spec("triton") is None:
        return 'triton isn\'t installed: pip install "headway[triton]"'
    if backend == "cpp" and shutil.which("g++") is None:
        return "there is no g++, which compiles C++ candidates: install it (on Debian: apt install g++)"
    if backend == "cuda" and not any(map(shutil.which, ("nvcc", "hipcc") if gpus else ("nvcc",))):
        return "there is no nvcc on PATH, which compiles CUDA candidates: install NVIDIA's CUDA toolkit"
    return ""
