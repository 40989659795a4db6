"""Which functions of torch, the standard library and this package a source has replaced, as far as can be seen from
within its own process: recognises sources that try, and proves nothing."""

from __future__ import annotations

import builtins
import gc
import sys
import time
from typing import Any

import torch

_LOOKED_AT = ("headway.kernels.guest.program", "headway.sandbox.guest.wire", "torch.nn.functional", "torch.testing")
_TRITON = ("triton.runtime.interpreter", "headway.kernels.guest.triton_interpreter")
_TRITON_CLASSES = ("InterpretedFunction", "GridExecutor", "FunctionRewriter", "LaunchRecorder", "RECORDER")
_LAZY = ("torch.classes", "torch.ops")


def _namespaces() -> dict[str, dict[str, Any]]:
    modules = [sys.modules[name] for name in (*_LOOKED_AT, *_TRITON) if name in sys.modules]
    spaces = {module.__name__: dict(vars(module)) for module in (*modules, torch, time, builtins, gc)}
    spaces |= {"torch.Tensor": dict(vars(torch.Tensor)), "torch.nn.Module": dict(vars(torch.nn.Module))}
    spaces |= {"torch.cuda.Event": dict(vars(torch.cuda.Event))}
    program = sys.modules.get("headway.kernels.guest.program")
    if program is not None:
        spaces["Program"] = dict(vars(program.Program))
    triton = [vars(sys.modules[name]) for name in _TRITON if name in sys.modules]
    return spaces | {name: dict(vars(space[name])) for space in triton for name in _TRITON_CLASSES if name in space}


def marks() -> dict[str, dict[str, int]]:
    """Identities of all callables that are looked at."""
    return {
        space: {name: id(value) for name, value in names.items() if callable(value) and f"{space}.{name}" not in _LAZY}
        for space, names in _namespaces().items()
    }


def changed(before: dict[str, dict[str, int]]) -> list[str]:
    """Names that mean something else than ``before``, the first few."""
    now = _namespaces()
    found = [
        f"{space}.{name}"
        for space, names in before.items()
        for name, mark in names.items()
        if id(now[space].get(name)) != mark
    ]
    hidden = {name for base in torch.Tensor.__mro__[1:] for name in vars(base)}
    added = (now["torch.Tensor"].keys() - before["torch.Tensor"].keys()) & hidden
    known = {name for name, value in now["torch.Tensor"].items() if not callable(value)}
    return sorted([*found, *(f"torch.Tensor.{name}" for name in added - known)])[:20]
