"""A stand-in for `torch.utils.cpp_extension` in a guest: it reports the CUDA sources of each extension, and runs none.
It imports the standard library and preloaded torch alone."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch.utils

_MODULE = "torch.utils.cpp_extension"


class Extension:
    """A module of functions that can be bound, and not called."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def run(*arguments: Any) -> Any:
            raise RuntimeError(f"{name}: CUDA kernels are compiled here, and not run")

        return run


def install(report: Callable[[dict[str, Any]], None]) -> None:
    """Replace the module by one whose ``load_inline`` reports its sources."""

    def load_inline(
        name: str,
        cpp_sources: str | Sequence[str] = (),
        cuda_sources: str | Sequence[str] | None = None,
        *_: Any,
        extra_cuda_cflags: Sequence[str] | None = None,
        **__: Any,
    ) -> Extension:
        sources = [cuda_sources] if isinstance(cuda_sources, str) else list(cuda_sources or ())
        report({"sources": sources, "flags": list(extra_cuda_cflags or ())})
        return Extension()

    def load(*_: Any, **__: Any) -> Extension:
        raise RuntimeError("cpp_extension.load reads files, which a candidate has none of: use load_inline")

    module = types.ModuleType(_MODULE)
    module.__dict__.update(load_inline=load_inline, load=load, CUDA_HOME="/usr/local/cuda")
    sys.modules[_MODULE] = module
    setattr(torch.utils, "cpp_extension", module)  # noqa: B010  (for `torch.utils.cpp_extension.load_inline`)
