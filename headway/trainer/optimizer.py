"""The optimiser AdamW, and the learning rate of each step as a pure function of the version, so that a resumed run
needs no scheduler state."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from headway.config.schema import SftConfig, TrainerConfig
from headway.records.training import OptimiserSettings

OptimiserState = dict[Tensor, dict[str, Tensor]]  # by parameter: step, exp_avg, exp_avg_sq


class AdamW:
    """AdamW (Loshchilov & Hutter, 2019), bit for bit equal to ``torch.optim.AdamW(fused=True)``. It avoids torch's
    compiler, which ``torch.optim.AdamW`` imports when it is constructed, at the cost of seconds at every start."""

    def __init__(self, parameters: Iterable[Tensor], *, in_host_memory: bool = False) -> None:
        """``in_host_memory``: the state is there, and on the parameter's device for its update alone."""
        self._parameters, self._in_host_memory = list(parameters), in_host_memory
        self.state: OptimiserState = {}  # of each parameter from its first step on

    def step(self, settings: OptimiserSettings) -> None:
        """Take one step. Parameters without a gradient stay as they are."""
        parameters = [parameter for parameter in self._parameters if parameter.grad is not None]
        for updated in [[parameter] for parameter in parameters] if self._in_host_memory else [parameters]:
            self._update(updated, settings)

    def _update(self, parameters: list[Tensor], settings: OptimiserSettings) -> None:
        kept_states = [self._state_of(parameter) for parameter in parameters]
        device_states = zip(parameters, kept_states, strict=True)
        states = [{name: state[name].to(p.device) for name in state} for p, state in device_states]
        with torch.no_grad():
            adamw(
                parameters,
                [parameter.grad for parameter in parameters if parameter.grad is not None],
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
            for kept, state in zip(kept_states, states, strict=True):
                for name in kept if self._in_host_memory else ():
                    kept[name].copy_(state[name])

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        if parameter not in self.state:
            self.state[parameter] = self.zero_state(parameter)
        return self.state[parameter]

    def zero_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """A parameter's state before its first step. AdamW's fused kernel needs the counter beside the parameter."""
        device = torch.device("cpu") if self._in_host_memory else parameter.device
        pinned = device != parameter.device
        return {
            "step": torch.zeros((), dtype=torch.float32, device=device),
            "exp_avg": torch.zeros_like(parameter, device=device, pin_memory=pinned),
            "exp_avg_sq": torch.zeros_like(parameter, device=device, pin_memory=pinned),
        }


def learning_rate(step: int, settings: TrainerConfig | SftConfig, total_steps: int) -> float:
    """The learning rate of the step that follows ``step`` completed ones.

    Warm-up is linear and reaches its peak at the last of ``warmup_steps``; a linear or cosine decay reaches 0 at
    ``total_steps`` and stays there.
    """
    peak_rate, warmup_steps = settings.learning_rate, settings.warmup_steps
    if step < warmup_steps:
        return peak_rate * (step + 1) / warmup_steps
    if settings.schedule == "constant":
        return peak_rate
    decay_share = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    if settings.schedule == "linear":
        return peak_rate * (1.0 - decay_share)
    return peak_rate * 0.5 * (1.0 + math.cos(math.pi * decay_share))
