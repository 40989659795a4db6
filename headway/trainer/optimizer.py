"""The optimisers AdamW and Muon, and the learning rate of each step as a pure function of the version, so that a
resumed run needs no scheduler state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from headway.config.consistency import MUON_OF_TRANSFORMERS
from headway.config.schema import SftConfig, TrainerConfig
from headway.config.simulation import EmbodiedTrainerConfig
from headway.models.decoder import Decoder
from headway.models.layout import matrix_rows
from headway.records.errors import ConfigurationError
from headway.records.training import OptimiserSettings

OptimiserState = dict[Tensor, dict[str, Tensor]]  # by parameter: step, exp_avg, exp_avg_sq; under Muon momentum
ScheduledConfig = TrainerConfig | SftConfig | EmbodiedTrainerConfig  # sections with a learning rate's schedule
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients of x, x^3 and x^5 (Jordan et al., 2024)
NEWTON_SCHULZ_STEPS = 5


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
        step = torch.zeros((), dtype=torch.float32, device=device)
        return {"step": step} | {name: _zeros(parameter, device) for name in ("exp_avg", "exp_avg_sq")}


class Muon:
    """Muon (Jordan et al., 2024) for named matrices, and `AdamW` for all other parameters.

    A matrix [r, c] moves against its orthogonalised momentum with Nesterov's step ahead, by the learning rate times
    ``0.2 sqrt(max(r, c))``, whose root mean square is AdamW's (Muon is Scalable for LLM Training, 2025,
    arXiv:2502.16982, Eq. 4): both take the same learning rate and weight decay. The momentum's decay is ``beta1``.
    Matrices that a parameter keeps one below the other, and each expert's, are orthogonalised separately.
    """

    def __init__(
        self, parameters: Iterable[Tensor], rows: Mapping[Tensor, Sequence[int]], *, in_host_memory: bool = False
    ) -> None:
        """``rows``: of each matrix in a parameter [..., sum of rows, c]; the others of ``parameters`` are AdamW's.
        ``in_host_memory``: as of `AdamW`."""
        self._rows, self._in_host_memory = rows, in_host_memory
        self._adamw = AdamW([p for p in parameters if p not in rows], in_host_memory=in_host_memory)
        self._momentum: OptimiserState = {}

    @property
    def state(self) -> OptimiserState:
        """The state of each parameter from its first step on."""
        return self._momentum | self._adamw.state

    @state.setter
    def state(self, state: OptimiserState) -> None:
        self._momentum = {parameter: kept for parameter, kept in state.items() if parameter in self._rows}
        self._adamw.state = {parameter: kept for parameter, kept in state.items() if parameter not in self._rows}

    @torch.no_grad()
    def step(self, settings: OptimiserSettings) -> None:
        """Take one step. Parameters without a gradient stay as they are."""
        self._adamw.step(settings)
        for parameter, rows in self._rows.items():
            if (grad := parameter.grad) is None:
                continue
            if parameter not in self._momentum:
                self._momentum[parameter] = self.zero_state(parameter)
            kept = self._momentum[parameter]["momentum"]
            momentum = kept.to(parameter.device).lerp_(grad, 1.0 - settings.beta1)
            if self._in_host_memory:
                kept.copy_(momentum)
            ahead = grad.lerp(momentum, settings.beta1)
            parameter.mul_(1.0 - settings.learning_rate * settings.weight_decay)
            for matrix, direction in zip(parameter.split(rows, -2), ahead.split(rows, -2), strict=True):
                rate = settings.learning_rate * 0.2 * math.sqrt(max(matrix.shape[-2:]))
                matrix.sub_(orthogonalised(direction), alpha=rate)

    def zero_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """A parameter's state before its first step."""
        if parameter not in self._rows:
            return self._adamw.zero_state(parameter)
        device = torch.device("cpu") if self._in_host_memory else parameter.device
        return {"momentum": _zeros(parameter, device)}


def open_optimiser(settings: TrainerConfig, model: nn.Module, trained: Mapping[str, Tensor]) -> AdamW | Muon:
    """The optimiser of ``settings`` for the weights ``trained`` of ``model``, by name. Raises ConfigurationError for an
    architecture whose matrices Muon doesn't know."""
    in_host_memory = settings.host_memory != "none"
    if settings.optimizer == "adamw":
        return AdamW(trained.values(), in_host_memory=in_host_memory)
    if not isinstance(model, Decoder):
        raise ConfigurationError(f"trainer.optimizer = {MUON_OF_TRANSFORMERS}")
    rows = {trained[name]: rows for name, rows in matrix_rows(model).items()}
    return Muon(trained.values(), rows, in_host_memory=in_host_memory)


def _zeros(parameter: Tensor, device: torch.device) -> Tensor:
    return torch.zeros_like(parameter, device=device, pin_memory=device != parameter.device)


def orthogonalised(matrices: Tensor) -> Tensor:
    """Matrices [..., r, c] with singular values near 1, between 0.7 and 1.2, by Newton-Schulz iterations; zeros stay
    zeros."""
    x = matrices / torch.linalg.matrix_norm(matrices, keepdim=True).clamp(min=1e-7)
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    first, third, fifth = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = first * x + (third * gram + fifth * (gram @ gram)) @ x
    return x.mT if is_tall else x


def learning_rate(
    step: int, settings: ScheduledConfig, total_steps: int, first_step: int = 0, *, lowest: float = 0.0
) -> float:
    """The learning rate of the step that follows ``step`` completed ones.

    Warm-up is linear and reaches its peak at the last of ``warmup_steps``, before the first of which the rate is 0; a
    linear or cosine decay begins at ``first_step``, or after the warm-up if that is later, reaches ``lowest`` at
    ``total_steps`` and stays there.
    """
    peak_rate, steps = settings.learning_rate, settings.warmup_steps
    rise_step, warmup_steps = steps if isinstance(steps, tuple) else (0, steps)
    if step < warmup_steps:
        return peak_rate * max(0, step + 1 - rise_step) / max(1, warmup_steps - rise_step)
    if settings.schedule == "constant":
        return peak_rate
    first_step = max(first_step, warmup_steps)
    decay_share = min(1.0, max(0, step - first_step) / max(1, total_steps - first_step))
    if settings.schedule == "linear":
        return lowest + (peak_rate - lowest) * (1.0 - decay_share)
    return lowest + (peak_rate - lowest) * 0.5 * (1.0 + math.cos(math.pi * decay_share))
