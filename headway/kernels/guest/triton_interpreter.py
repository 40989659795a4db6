"""Patches of Triton's interpreter in a guest: each launch signature is reported once, and operations that the
interpreter computes wrongly raise an error that names them.

A zygote imports it, under TRITON_INTERPRET=1; the names that it replaces are those of Triton 3.9.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import triton.language as tl
import triton.language.extra.libdevice  # noqa: F401
from triton.runtime import autotuner, interpreter
from triton.runtime.errors import InterpreterError
from triton.runtime.jit import _normalize_ty

_WIDE = 1 << 31
_INJECTED = ("interpreter_semantic", "_InterpreterComparison")  # names that rewritten kernels need
_data_size, _run = interpreter._validate_np_data_size, interpreter.InterpretedFunction.run
_prune = autotuner.Autotuner.prune_configs


class LaunchRecorder:
    """Reports each launch signature once: the kernel's name, its arguments as the compiler specialises on them, and the
    launch's options."""

    def __init__(self) -> None:
        self.on_launch: Callable[[dict[str, Any]], None] = lambda launch: None
        self._recorded: set[str] = set()

    def note(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        signature = inspect.signature(function.fn)
        bindable = {name: value for name, value in kwargs.items() if name in signature.parameters}
        try:
            bound_arguments = signature.bind(*args, **bindable)
        except TypeError:
            return  # the interpreter reports it
        bound_arguments.apply_defaults()
        arguments = {
            name: specialised(value, constant="constexpr" in str(_normalize_ty(signature.parameters[name].annotation)))
            for name, value in bound_arguments.arguments.items()
        }
        options = {name: specialised(value, constant=True) for name, value in kwargs.items() if name not in bindable}
        launch = {"kernel": function.fn.__name__, "arguments": arguments, "options": options}
        launch_key = json.dumps(launch)
        if launch_key not in self._recorded:
            self._recorded.add(launch_key)
            self.on_launch(launch)


def specialised(value: Any, *, constant: bool) -> Any:
    """A launch's argument in its JSON form. Tensors and numbers that aren't constants keep only what the compiler
    specialises on: type, alignment, whether it is 1."""
    if isinstance(value, tl.constexpr):
        return specialised(value.value, constant=True)
    if isinstance(value, interpreter.InterpretedFunction):
        return {"kernel": value.fn.__name__}
    if isinstance(value, tl.dtype):
        return {"dtype": value.name}
    if isinstance(value, tuple):
        return {"tuple": [specialised(part, constant=constant) for part in value]}
    if hasattr(value, "data_ptr"):
        return {"tensor": str(value.dtype).removeprefix("torch."), "aligned": value.data_ptr() % 16 == 0}
    if value is None or isinstance(value, (bool, str)) or (constant and isinstance(value, (int, float))):
        return value
    if isinstance(value, float):
        return 0.5
    if isinstance(value, int):
        stand_in = 16 if value % 16 == 0 else 2
        return stand_in if value != 1 and -_WIDE <= value < _WIDE else value
    raise InterpreterError(f"an argument of type {type(value).__name__}: a tensor, a number, text or a tuple of them")


RECORDER = LaunchRecorder()


def _recorded_run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    if not warmup:
        RECORDER.note(self, args, kwargs)
    return _run(self, *args, grid=grid, warmup=warmup, **kwargs)


def _valid_data_size(array: Any, tl_dtype: Any) -> bool:
    if tl_dtype == tl.bfloat16:
        raise InterpreterError("bfloat16: Triton's interpreter computes it wrongly; use tl.float32 or tl.float16")
    return _data_size(array, tl_dtype)


def _first_config(self: Any, kwargs: Any) -> Any:
    return _prune(self, kwargs)[:1]  # one alone isn't timed, for which there is no driver


def _compile_and_exec(self: Any, transformed_ast: Any) -> Any:
    """Define a rewritten kernel without adding the interpreter's imports to the source's names."""
    kernel_globals, definitions = self.fn.__globals__, dict(self.kwargs)
    for name in _INJECTED:
        kernel_globals.setdefault(name, vars(interpreter)[name])
    exec(compile(transformed_ast, filename=self.filename, mode="exec"), kernel_globals, definitions)
    return definitions[self.fn.__name__]


def _missing(name: str, *_: Any, **__: Any) -> Any:
    raise InterpreterError(f"libdevice.{name}: Triton's interpreter has none of libdevice; use tl or tl.math")


interpreter.InterpretedFunction.run = _recorded_run
interpreter.FunctionRewriter._compile_and_exec = _compile_and_exec
interpreter._validate_np_data_size = _valid_data_size  # of every value that it makes
autotuner.Autotuner.prune_configs = _first_config
for _module in [module for name, module in sys.modules.items() if name.endswith(".libdevice")]:
    for _name in [name for name, value in vars(_module).items() if callable(value) and not name.startswith("_")]:
        setattr(_module, _name, partial(_missing, _name))
