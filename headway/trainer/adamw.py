"""AdamW without torch's compiler: ``torch.optim.AdamW`` imports it when it is built, in seconds of every start."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from headway.records.training import OptimiserSettings


class AdamW:
    """AdamW (Loshchilov & Hutter, 2019): the numbers of ``torch.optim.AdamW(fused=True)``, bit for bit."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self.state: dict[Tensor, dict[str, Tensor]] = {}  # by parameter, from its first step: step, exp_avg, exp_avg_sq

    def step(self, settings: OptimiserSettings) -> None:
        """Take one step. Parameters without a gradient stay as they are."""
        moved = [parameter for parameter in self._parameters if parameter.grad is not None]
        states = [self._state_of(parameter) for parameter in moved]
        with torch.no_grad():
            adamw(
                moved,
                [parameter.grad for parameter in moved if parameter.grad is not None],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                amsgrad=False,
                beta1=settings.beta1,
                beta2=settings.beta2,
                lr=settings.learning_rate,
                weight_decay=settings.weight_decay,
                eps=settings.epsilon,
                maximize=False,
            )

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        if parameter not in self.state:
            self.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }
        return self.state[parameter]
