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
    namespaces = {module.__name__: dict(vars(module)) for module in (*modules, torch, time, builtins, gc)}
    namespaces |= {"torch.Tensor": dict(vars(torch.Tensor)), "torch.nn.Module": dict(vars(torch.nn.Module))}
    namespaces |= {"torch.cuda.Event": dict(vars(torch.cuda.Event))}
    program_module = sys.modules.get("headway.kernels.guest.program")
    if program_module is not None:
        namespaces["Program"] = dict(vars(program_module.Program))
    triton_members = [vars(sys.modules[name]) for name in _TRITON if name in sys.modules]
    return namespaces | {
        name: dict(vars(members[name])) for members in triton_members for name in _TRITON_CLASSES if name in members
    }


def callable_ids() -> dict[str, dict[str, int]]:
    """Identities of all watched callables, by namespace and name."""
    return {
        namespace_name: {
            name: id(member)
            for name, member in members.items()
            if callable(member) and f"{namespace_name}.{name}" not in _LAZY
        }
        for namespace_name, members in _namespaces().items()
    }


def replaced_names(ids_before: dict[str, dict[str, int]]) -> list[str]:
    """The first 20 names whose callable differs from ``ids_before``."""
    namespaces = _namespaces()
    replaced = [
        f"{namespace_name}.{name}"
        for namespace_name, ids in ids_before.items()
        for name, id_before in ids.items()
        if id(namespaces[namespace_name].get(name)) != id_before
    ]
    base_names = {name for base in torch.Tensor.__mro__[1:] for name in vars(base)}
    added_names = (namespaces["torch.Tensor"].keys() - ids_before["torch.Tensor"].keys()) & base_names
    plain_names = {name for name, member in namespaces["torch.Tensor"].items() if not callable(member)}
    return sorted([*replaced, *(f"torch.Tensor.{name}" for name in added_names - plain_names)])[:20]
