"""Activations that the backward computes again instead of keeping them (``trainer.gradient_checkpointing``)."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headway.models.cpu import native

T = TypeVar("T")


class _Recorder(threading.local):
    # By the address of an output: a reference to it, since later another tensor may be there, and how to compute it.
    recipes: dict[int, tuple[weakref.ref[Tensor], Callable[[], Tensor]]] | None = None


_recorder = _Recorder()


def note_recomputable(output: Tensor, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Return ``output``, which is ``function(*inputs)``, cheap beside a product and always of the same bits. Inside
    `recomputing`, an operator that would keep it for its gradient keeps the function and the inputs."""
    if _recorder.recipes is None or not torch.is_grad_enabled():
        return output
    kept_inputs = [value.detach() if isinstance(value, Tensor) else value for value in inputs]
    kernels = native.chosen()

    def compute() -> Tensor:  # the backward of a GPU runs in a thread of its own, in which nothing of this is set
        with torch.no_grad(), native.using(kernels):
            return function(*kept_inputs)

    _recorder.recipes[output.data_ptr()] = weakref.ref(output), compute
    return output


@contextlib.contextmanager
def recomputing() -> Iterator[None]:
    """In the block, keep no outputs of `note_recomputable` for gradients, which are computed again to the same bits."""
    previous_recipes, _recorder.recipes = _recorder.recipes, (recipes := {})

    def pack(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        reference, compute = recipes.get(tensor.data_ptr(), (None, None))
        output = None if reference is None else reference()
        layouts = {(x.shape, x.stride(), x.dtype) for x in (tensor, output) if x is not None}
        return tensor if compute is None or output is None or len(layouts) > 1 else compute

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept if isinstance(kept, Tensor) else kept()):
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
