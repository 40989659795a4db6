"""Float32 masters of weights that a model computes with in bfloat16, the sums of their gradients, and averages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from headway.trainer.sharding import is_divided, own_rows_of


class MasterWeights:
    """The float32 values of the parameters of a model or an adapter, which optimiser and checkpoints use.

    In float32 they are the parameters themselves. Otherwise each parameter is its master, rounded; a backward adds its
    gradient to the master's in float32 and frees it. A trained weight so takes 4 + 2 bytes, and its gradient 4. Of
    parameters that ranks divide they are this rank's rows, whichever dtype FSDP2 gathers them in.

    Invariant: outside of `exposed`, after `round`, a parameter is its master in the parameter's dtype.
    Example: gradients 1, 2^-9 and 2^-9 of three micro-batches add up to 1 + 2^-8, and would be 1 in bfloat16.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], dtype: torch.dtype, exact: Mapping[str, Tensor] | None = None
    ) -> None:
        """``parameters``: by name; they become ``dtype``. ``exact``: their float32 values, if they have been rounded
        already; these tensors become the masters."""
        self._parameters = dict(parameters)
        self.tensors: dict[str, Tensor] = dict(self._parameters)
        divided = any(map(is_divided, self._parameters.values()))
        self._rounds = dtype != torch.float32 and not divided
        if not self._rounds and not divided:
            return
        for name, parameter in self._parameters.items():
            self.tensors[name] = master = own_rows_of(parameter if exact is None else exact[name])
            if self._rounds and exact is None:
                parameter.data = master.to(dtype)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_MasterGradient(master))
        self.round()

    def trained(self) -> dict[str, Tensor]:
        """The masters of parameters that are trained, by name; the others stay as they were loaded."""
        return {name: self.tensors[name] for name, parameter in self._parameters.items() if parameter.requires_grad}

    def sum_in_float32(self, rows: int) -> None:
        """Sum the gradients of matrices with this number of rows in float32 within a backward too: those of embedding
        and head, to which each chunk of logits adds."""
        for parameter in self._parameters.values() if self._rounds else ():
            if parameter.requires_grad and parameter.shape[0] == rows and parameter.ndim == 2:
                parameter.grad_dtype = torch.float32

    def clear_gradients(self) -> None:
        """Discard all gradients, also those of a backward that failed."""
        for tensor in (*self.tensors.values(), *self._parameters.values()):
            tensor.grad = None

    @torch.no_grad()
    def round(self) -> None:
        """Make the parameters their masters' values, after these have changed."""
        if self._rounds:
            parameters: list[Tensor] = [*self._parameters.values()]
            torch._foreach_copy_(parameters, [*self.tensors.values()])  # pyright: ignore[reportPrivateImportUsage]

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """Make the parameters float32 masters inside the ``with`` block, to read or overwrite them."""
        if not self._rounds:
            yield
            return
        rounded = {name: parameter.data for name, parameter in self._parameters.items()}
        for name, parameter in self._parameters.items():
            parameter.data = self.tensors[name]
        try:
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.data = rounded[name]
            self.round()


class MovingAverage:
    """An exponential moving average of trained weights, in float32, and the frozen model that computes with it.

    Example: with ``decay`` 0.9, weights 0 at first and 1 after every update, the averages are 0, 0.1, 0.19.
    """

    def __init__(self, model: nn.Module, weights: Mapping[str, Tensor], dtype: torch.dtype, decay: float) -> None:
        """``model``: has the parameters ``weights``, by name, which are this rank's rows where ranks divide them, and
        begins at their values. It computes in ``dtype``."""
        parameters, self._weights, self._decay = dict(model.named_parameters()), weights, decay
        rounds = any(parameter.dtype != torch.float32 for parameter in parameters.values())
        exact = {name: weights[name].detach().clone() for name in parameters} if rounds else None
        self._masters = MasterWeights(parameters, dtype, exact)
        self.tensors = {name: own_rows_of(tensor) for name, tensor in self._masters.tensors.items()}

    def update(self, decay: float | None = None) -> None:
        """Move the averages towards the present weights by 1 - ``decay`` (default: that of all updates)."""
        weight = 1.0 - (self._decay if decay is None else decay)
        with torch.no_grad():
            for name, average in self.tensors.items():
                average.lerp_(own_rows_of(self._weights[name]), weight)
        self._masters.round()


class _MasterGradient:
    """Hook of a parameter that moves its gradient to the ``master``."""

    def __init__(self, master: Tensor) -> None:
        self._master = master

    def __call__(self, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if self._master.grad is None:
            self._master.grad = own_rows_of(gradient).float()
        else:
            self._master.grad.add_(own_rows_of(gradient))
