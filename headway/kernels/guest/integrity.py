"""Detection of functions of torch, the standard library and this package that a source has replaced. It runs in the
source's own process, so it recognises attempts but proves nothing."""

from __future__ import annotations

import builtins
import gc
import sys
import time
from typing import Any

import torch

_WATCHED = ("headway.kernels.guest.program", "headway.sandbox.guest.wire", "torch.nn.functional", "torch.testing")
_TRITON = ("triton.runtime.interpreter", "headway.kernels.guest.triton_interpreter")
_TRITON_CLASSES = ("InterpretedFunction", "GridExecutor", "FunctionRewriter", "LaunchRecorder", "RECORDER")
_LAZY = ("torch.classes", "torch.ops")


def _namespaces() -> dict[str, dict[str, Any]]:
    modules = [sys.modules[name] for name in (*_WATCHED, *_TRITON) if name in sys.modules]
    spaces = {module.__name__: dict(vars(module)) for module in (*modules, torch, time, builtins, gc)}
    spaces |= {"torch.Tensor": dict(vars(torch.Tensor)), "torch.nn.Module": dict(vars(torch.nn.Module))}
    spaces |= {"torch.cuda.Event": dict(vars(torch.cuda.Event))}
    program = sys.modules.get("headway.kernels.guest.program")
    if program is not None:
        spaces["Program"] = dict(vars(program.Program))
    triton = [vars(sys.modules[name]) for name in _TRITON if name in sys.modules]
    return spaces | {name: dict(vars(space[name])) for space in triton for name in _TRITON_CLASSES if name in space}


def callable_ids() -> dict[str, dict[str, int]]:
    """Identities of all watched callables, by namespace and name."""
    return {
        space: {name: id(value) for name, value in names.items() if callable(value) and f"{space}.{name}" not in _LAZY}
        for space, names in _namespaces().items()
    }


def replaced_names(ids_before: dict[str, dict[str, int]]) -> list[str]:
    """The first 20 names whose callable differs from ``ids_before``."""
    now = _namespaces()
    replaced = [
        f"{space}.{name}"
        for space, names in ids_before.items()
        for name, mark in names.items()
        if id(now[space].get(name)) != mark
    ]
    hidden = {name for base in torch.Tensor.__mro__[1:] for name in vars(base)}
    added = (now["torch.Tensor"].keys() - ids_before["torch.Tensor"].keys()) & hidden
    known = {name for name, value in now["torch.Tensor"].items() if not callable(value)}
    return sorted([*replaced, *(f"torch.Tensor.{name}" for name in added - known)])[:20]
