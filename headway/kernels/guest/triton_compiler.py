"""Compilation of kernels for absent devices, in a sandbox that runs no other part of a candidate's source.

``/work/kernels.py`` holds the kernels, ``/work/launches.json`` the launches and targets; ``/work/outcome.json``
receives the first failure, or {}. It imports the standard library, torch and triton alone.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

import torch


def main() -> None:
    """The entry point in the sandbox."""
    with open("/work/launches.json", encoding="utf-8") as file:
        request = json.load(file)
    # The zygote imported triton for its interpreter, which interprets triton's own functions too: import it again.
    for name in [name for name in sys.modules if name.split(".")[0] == "triton" and not name.startswith("triton._C")]:
        del sys.modules[name]
    os.environ.pop("TRITON_INTERPRET", None)
    importlib.import_module("triton.compiler")
    outcome = first_failure(request["launches"], request["targets"])
    with open("/work/outcome.json", "w", encoding="utf-8") as file:
        json.dump(outcome, file)


def first_failure(launches: list[dict[str, Any]], targets: list[dict[str, Any]]) -> dict[str, Any]:
    """The first launch that doesn't compile for a target, or exceeds the target's shared memory; {}: none."""
    try:
        sys.path.insert(0, "/work")
        module = importlib.import_module("kernels")
    except Exception as error:  # the module's constants and decorators come from the source, too
        return {"error": cause(error)}
    compiled_keys: set[str] = set()
    for target in targets:
        for launch in launches:
            position_text = f"{target['name']}, {launch['kernel']}"
            try:
                shared_bytes = compile_launch(module, launch, target, compiled_keys)
            except Exception as error:  # the boundary to the compiler: any exception is attributed to the source
                return {"error": f"{position_text}: {cause(error)}", "log": str(error)[:4000]}
            if shared_bytes > (limit_bytes := target["shared_bytes"]):
                error_text = f"{position_text}: {shared_bytes} bytes of shared memory; at most {limit_bytes}"
                return {"error": error_text, "fault": "shared_memory_exceeded"}
    return {}


def compile_launch(module: Any, launch: dict[str, Any], target: dict[str, Any], done: set[str]) -> int:
    """Compile one launch as Triton's launcher does, for this target; returns its shared memory in bytes."""
    compiler, jit = sys.modules["triton.compiler"], sys.modules["triton.runtime.jit"]
    gpu = sys.modules["triton.backends.compiler"].GPUTarget(*target["gpu"])
    kernel = getattr(module, launch["kernel"], None)
    if kernel is None:
        raise NameError("it isn't defined under @triton.jit at the module's top, with plain values as defaults")
    backend = compiler.make_backend(gpu)
    binder = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
    options = {name: argument(module, value) for name, value in launch["options"].items()} | {"debug": False}
    arguments = {name: argument(module, value) for name, value in launch["arguments"].items()}
    bound, specialization, _ = binder(**arguments, **options)
    parsed_options, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, None)
    key = str((launch["kernel"], target["name"], signature, constants, attributes, options))
    if key in done:
        return 0
    done.add(key)
    source = compiler.ASTSource(kernel, signature, constants, attributes)
    return compiler.compile(source, target=gpu, options=parsed_options.__dict__).metadata.shared


def argument(module: Any, value: Any) -> Any:
    """A launch's argument, from the recorder's description of it."""
    match value:
        case {"tensor": dtype, "aligned": aligned}:
            tensor = sys.modules["triton.runtime.jit"].MockTensor(getattr(torch, dtype))
            if not aligned:
                tensor.data_ptr = lambda: 4
            return tensor
        case {"dtype": name}:
            return sys.modules["triton.language"].dtype(name)
        case {"kernel": name}:
            return getattr(module, name)
        case {"tuple": parts}:
            return tuple(argument(module, part) for part in parts)
    return value


def cause(error: BaseException) -> str:
    """A one-line summary of an error: its class and the last line of its message, or of its cause's message."""
    while error.__cause__ is not None and str(error).rstrip().endswith("^"):
        error = error.__cause__
    last_line = str(error).strip().rpartition("\n")[2].strip()
    return f"{type(error).__name__}: {last_line}"
