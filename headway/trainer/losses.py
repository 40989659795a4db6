"""Policy losses: pure functions from per-token terms to a per-token loss.

A user's own loss is named ``module:function`` and has the signature of `Loss`: it takes `TokenTerms` and
`LossSettings` and returns a `TokenLoss`. It must be elementwise: the trainer sums what it returns over all tokens
of the batch and divides by a denominator fixed beforehand (`denominator`), so that any packing or number of ranks
gives the same gradient.

Legend: suffix ``_m`` is one value per token that carries loss; all tensors are float32 (float64 in tests), in nats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headway.runtime.imports import import_function

# exp(20) = 4.9e8: a log-ratio beyond it is noise, and float32 must neither overflow nor give 0 x inf.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, kw_only=True)
class TokenTerms:
    """What a loss may use. Only ``logprobs_m`` carries a gradient."""

    logprobs_m: Tensor  # log pi_theta, the weights being trained
    proximal_m: Tensor  # log pi_prox, the weights at the start of the step (or detached logprobs_m)
    behaviour_m: Tensor  # log pi_behav, stored at sampling
    advantages_m: Tensor


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """Keys of ``[algorithm]`` that losses read."""

    clip_low: float = 0.2  # ratios are clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.28
    dual_clip: float | None = None  # bound c > 1 of the ratio where the advantage is negative
    behaviour_weight_cap: float | None = 2.0  # largest importance weight (TIS); None: not truncated


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """What a loss returns."""

    loss_m: Tensor  # to be minimised, summed over tokens
    clipped_m: Tensor  # bool: clipping removed this token's gradient


Loss = Callable[[TokenTerms, LossSettings], TokenLoss]


def ratio(numerator_m: Tensor, denominator_m: Tensor) -> Tensor:
    """``exp(numerator - denominator)``, finite for any finite log-probabilities."""
    return torch.exp(torch.clamp(numerator_m - denominator_m, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def clipped_surrogate(ratio_m: Tensor, advantages_m: Tensor, settings: LossSettings) -> TokenLoss:
    """``-min(u A, clip(u, 1 - low, 1 + high) A)`` (PPO, 2017, Eq. 7; asymmetric: DAPO, 2025, Eq. 10).

    With ``dual_clip`` c the loss of a negative advantage is at most ``-c A`` (Dual-clip PPO, 2020, Eq. 5).
    """
    free_m = -ratio_m * advantages_m
    bounded_m = -ratio_m.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high) * advantages_m
    loss_m = torch.maximum(free_m, bounded_m)
    clipped_m = bounded_m > free_m
    if settings.dual_clip is not None:
        ceiling_m = torch.where(advantages_m < 0, -settings.dual_clip * advantages_m, torch.inf)
        clipped_m = clipped_m | (loss_m > ceiling_m)
        loss_m = torch.minimum(loss_m, ceiling_m)
    return TokenLoss(loss_m=loss_m, clipped_m=clipped_m)


def ppo_clip(terms: TokenTerms, settings: LossSettings) -> TokenLoss:
    """PPO-clip against the behaviour policy, u = pi_theta / pi_behav (AReaL, 2025, calls it naive PPO).

    With ``behaviour_weight_cap`` the importance weight of the *gradient* is min(u, cap): tokens beyond the cap
    keep a gradient of the size of the cap instead of one that grows with u. Which tokens are clipped is decided by
    u itself: the cap only scales what clipping leaves.
    """
    ratio_m = ratio(terms.logprobs_m, terms.behaviour_m)
    surrogate = clipped_surrogate(ratio_m, terms.advantages_m, settings)
    if settings.behaviour_weight_cap is None:
        return surrogate
    truncation_m = (settings.behaviour_weight_cap / ratio_m).clamp(max=1.0).detach()
    return TokenLoss(loss_m=truncation_m * surrogate.loss_m, clipped_m=surrogate.clipped_m)


def decoupled_ppo(terms: TokenTerms, settings: LossSettings) -> TokenLoss:
    """Decoupled PPO (AReaL, 2025, Eq. 5): ``w`` times the clipped surrogate of u = pi_theta / pi_prox.

    w = pi_prox / pi_behav, a constant, truncated at ``behaviour_weight_cap`` (truncated importance sampling).
    """
    surrogate = clipped_surrogate(ratio(terms.logprobs_m, terms.proximal_m), terms.advantages_m, settings)
    weight_m = ratio(terms.proximal_m, terms.behaviour_m).detach()
    if settings.behaviour_weight_cap is not None:
        weight_m = weight_m.clamp(max=settings.behaviour_weight_cap)
    return TokenLoss(loss_m=weight_m * surrogate.loss_m, clipped_m=surrogate.clipped_m)


LOSSES: dict[str, Loss] = {"ppo_clip": ppo_clip, "decoupled_ppo": decoupled_ppo}


def resolve(name: str) -> Loss:
    """The loss named ``name``, or the user's own ``module:function``. Raises ConfigurationError."""
    known = LOSSES.get(name)
    return known if known is not None else import_function(name, "algorithm.loss", LOSSES)


def require_elementwise(name: str, result: object, tokens: torch.Size) -> None:
    """Hold what the loss ``name`` returned to its contract: one value per token, shape ``tokens`` = [M].

    Raises ValueError: of a mean, say, the gradient would depend on how the tokens were packed."""
    if not isinstance(result, TokenLoss):
        raise ValueError(f"algorithm.loss = {name!r} returned a {type(result).__name__}: a TokenLoss is needed")
    if not result.loss_m.shape == result.clipped_m.shape == tokens:
        raise ValueError(
            f"algorithm.loss = {name!r} returned loss_m of shape {list(result.loss_m.shape)} and clipped_m of shape "
            f"{list(result.clipped_m.shape)} for {list(tokens)} tokens: one value per token is needed"
        )


def denominator(
    aggregation: Literal["token_mean", "fixed"],
    *,
    loss_tokens: int,
    samples: int,
    max_response_tokens: int,
    fixed_tokens: int | None = None,
    share: float = 1.0,
) -> float:
    """What the summed token losses of one optimiser step are divided by; at least 1.

    ``token_mean``: its loss-mask tokens, counted before any other mask (DESIGN rule 10). ``fixed``: a constant
    that doesn't depend on the lengths sampled (Dr. GRPO, 2025): ``fixed_tokens`` for the whole batch, of which
    this optimiser step has ``share``; by default samples x max_response_tokens.
    """
    if aggregation == "token_mean":
        return float(max(1, loss_tokens))
    if fixed_tokens is not None:
        return max(1.0, fixed_tokens * share)
    return float(max(1, samples * max_response_tokens))
