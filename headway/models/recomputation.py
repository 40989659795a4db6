"""Activations that the backward computes again instead of keeping them (``trainer.gradient_checkpointing``)."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headway.models.cpu import native

P, T = ParamSpec("P"), TypeVar("T")


class _Recipe:
    """How to compute a tensor again: a function and its inputs, in the precision and with the kernels of the first
    time. The backward of a GPU runs in a thread of its own, in which neither is set."""

    def __init__(self, output: Tensor, function: Callable[..., Tensor], inputs: tuple[Any, ...]) -> None:
        self._output = weakref.ref(output)  # what is at its address later is another tensor
        self._function = function
        self._inputs = tuple(value.detach() if isinstance(value, Tensor) else value for value in inputs)
        device_type = output.device.type
        self._autocast = None
        if device_type != "meta":
            is_enabled = torch.is_autocast_enabled(device_type)
            self._autocast = device_type, torch.get_autocast_dtype(device_type), is_enabled
        self._kernels = native.chosen()

    def makes(self, tensor: Tensor) -> bool:
        """Whether ``tensor``, at the address of the output, is the output."""
        output = self._output()
        layouts = ((x.shape, x.stride(), x.dtype) for x in (tensor, output) if x is not None)
        return output is not None and len(set(layouts)) == 1

    def __call__(self) -> Tensor:
        precision = torch.autocast(*self._autocast) if self._autocast else contextlib.nullcontext()
        with torch.no_grad(), precision, native.using(self._kernels):
            return self._function(*self._inputs)


class _Recorder(threading.local):
    recipes: dict[int, _Recipe] | None = None  # by the address of the output


_recorder = _Recorder()


def note_recomputable(output: Tensor, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Return ``output``, which is ``function(*inputs)``. Inside `recomputing`, an operator that would keep it for its
    gradient keeps the function and the inputs."""
    if _recorder.recipes is not None and torch.is_grad_enabled():
        _recorder.recipes[output.data_ptr()] = _Recipe(output, function, inputs)
    return output


def recomputable(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Decorate a function, cheap beside a product, that gives the same bits for the same inputs: `note_recomputable`
    is called for each output."""

    @wraps(function)
    def noting(*inputs: P.args, **named: P.kwargs) -> Tensor:
        return note_recomputable(function(*inputs, **named), function, *inputs, *named.values())

    return noting


@contextlib.contextmanager
def recomputing() -> Iterator[None]:
    """In the block, keep no outputs of `recomputable` functions for gradients: they are computed again. The gradient
    has the same bits."""
    recipes: dict[int, _Recipe] = {}

    def pack(tensor: Tensor) -> Tensor | _Recipe:
        recipe = recipes.get(tensor.data_ptr())
        return recipe if recipe is not None and recipe.makes(tensor) else tensor

    previous_recipes, _recorder.recipes = _recorder.recipes, recipes
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept() if isinstance(kept, _Recipe) else kept):
            yield
    finally:
        _recorder.recipes = previous_recipes


def computed_again(function: Callable[..., T], *inputs: Any) -> T:
    """``function(*inputs)``, of which only the inputs are kept: the backward computes it again, with these kernels."""
    kernels = native.chosen()

    def compute(*inputs: Any) -> T:
        with native.using(kernels):
            return function(*inputs)

    return checkpoint(compute, *inputs, use_reentrant=False, preserve_rng_state=False)  # pyright: ignore[reportReturnType]
