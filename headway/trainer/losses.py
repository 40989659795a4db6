"""Policy losses: pure functions from per-token terms to a per-token loss.

A loss of the user is named ``module:function`` and has the signature of `Loss`: it takes `TokenTerms` and
`LossSettings` and returns a `TokenLoss`, one value per token. It may combine tokens of one sample (a sample is never
split), but not of several. The trainer sums the returned values over all tokens of the batch, with weights and divisor
that `algorithms/aggregation.py` computes beforehand, so that any packing or number of ranks gives the same gradient.

Legend: suffix ``_m`` is one value per token that carries loss; all tensors are float32 (float64 in tests), in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor

from headway.config.schema import AlgorithmConfig
from headway.runtime.hooks import Hook, load_hook

# exp(20) = 4.9e8: a log-ratio beyond it is noise, and float32 must neither overflow nor give 0 x inf.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, kw_only=True)
class TokenTerms:
    """The inputs of a loss, per token. Only ``logprobs_m`` carries a gradient."""

    logprobs_m: Tensor  # log pi_theta, the weights being trained
    proximal_m: Tensor  # log pi_prox, the weights at the start of the step (or detached logprobs_m)
    behaviour_m: Tensor  # log pi_behav, stored at sampling
    advantages_m: Tensor
    sequence_m: Tensor | None = None  # [M] int64, ascending: the token's sample in this micro-batch; None: one sample
    keep_m: Tensor | None = None  # [M] bool: not masked for staleness or its importance weight; None: all are kept

    def sequence_mean(self, values_m: Tensor) -> Tensor:
        """[M] mean of ``values_m`` over the kept tokens of each token's sample; 0 if no token of it is kept."""
        keep_m = torch.ones_like(values_m) if self.keep_m is None else self.keep_m.to(values_m.dtype)
        if not len(values_m):
            return values_m
        if self.sequence_m is None:
            return ((values_m * keep_m).sum() / keep_m.sum().clamp(min=1.0)).expand_as(values_m)
        zeros_s = values_m.new_zeros(int(self.sequence_m[-1]) + 1)
        total_s = zeros_s.index_add(0, self.sequence_m, values_m * keep_m)
        count_s = zeros_s.index_add(0, self.sequence_m, keep_m)
        return (total_s / count_s.clamp(min=1.0))[self.sequence_m]


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """The keys of ``[algorithm]`` that losses read, and of ``[algorithm.parameters]``."""

    clip_low: float = 0.2  # ratios are clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.28
    dual_clip: float | None = None  # bound c > 1 of the ratio for a negative advantage
    behaviour_weight_cap: float | None = 2.0  # largest importance weight (TIS); None: not truncated
    temperature_positive: float = 1.0  # sapo: steepness of the gate for a positive advantage
    temperature_negative: float = 1.05  # ... for another advantage
    beta: float = 0.05  # dro: weight of the squared log ratio
    divergence: Literal["tv", "kl"] = "tv"  # dppo: a token's divergence: |pi_theta - pi_behav|, or `binary_kl` in nats
    divergence_limit: float = 0.15  # dppo: the largest divergence of a token
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of a loss of the user, unchanged


def loss_settings(algorithm: AlgorithmConfig) -> LossSettings:
    """The settings of the loss that ``algorithm`` names."""
    parameters = algorithm.parameters.taken_by(algorithm.loss, algorithm.advantage)
    common_settings: dict[str, Any] = {
        "clip_low": algorithm.clip_low,
        "clip_high": algorithm.clip_high,
        "behaviour_weight_cap": algorithm.behaviour_weight_cap,
    }
    if algorithm.loss not in LOSSES:
        return LossSettings(**common_settings, parameters=parameters)
    field_names = {field.name for field in fields(LossSettings)}
    return LossSettings(**common_settings, **{name: value for name, value in parameters.items() if name in field_names})


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """The result of a loss, per token."""

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

    With ``behaviour_weight_cap`` the importance weight of the *gradient* is min(u, cap): tokens beyond the cap keep a
    gradient of the size of the cap instead of one that grows with u. Clipping depends on u alone; the cap only scales
    the loss of tokens that aren't clipped.
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


def gspo(terms: TokenTerms, settings: LossSettings) -> TokenLoss:
    """GSPO (2025, Eq. 5): PPO-clip with the sequence's ratio, the geometric mean of its tokens' pi_theta / pi_behav.

    With seq_mean_token_mean this is the paper's objective; masked tokens don't count in the geometric mean.
    """
    log_ratio_m = (terms.logprobs_m - terms.behaviour_m).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return clipped_surrogate(torch.exp(terms.sequence_mean(log_ratio_m)), terms.advantages_m, settings)


def gmpo(terms: TokenTerms, settings: LossSettings) -> TokenLoss:
    """Geometric-Mean Policy Optimization (2025, arXiv:2507.20673): ``-A`` times the geometric mean of the sequence's
    u = pi_theta / pi_behav, each clipped separately: log u to at most ``clip_high`` for A > 0, to at least
    ``-clip_low`` for A < 0.

    With seq_mean_token_mean this is the paper's objective (both 0.4 there); masked tokens don't count in the mean.
    """
    log_ratio_m = (terms.logprobs_m - terms.behaviour_m).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    capped_m, raised_m = log_ratio_m.clamp(max=settings.clip_high), log_ratio_m.clamp(min=-settings.clip_low)
    bounded_m = torch.where(terms.advantages_m > 0, capped_m, raised_m)
    clipped_m = (bounded_m != log_ratio_m) & (terms.advantages_m != 0)
    return TokenLoss(loss_m=-torch.exp(terms.sequence_mean(bounded_m)) * terms.advantages_m, clipped_m=clipped_m)


def sapo(terms: TokenTerms, settings: LossSettings) -> TokenLoss:
    """Soft Adaptive Policy Optimization (Qwen, 2025, arXiv:2511.20347, Eqs. 5 and 6): ``-(4 / t) sigmoid(t (u - 1))
    A``.

    u = pi_theta / pi_behav; t is ``temperature_positive`` for a positive advantage, ``temperature_negative``
    otherwise. On policy the gradient is the policy gradient's; it decays as u moves away from 1, and is never removed.
    """
    t_positive, t_negative = settings.temperature_positive, settings.temperature_negative
    temperature_m = torch.where(terms.advantages_m > 0, t_positive, t_negative).to(terms.logprobs_m.dtype)
    gate_m = torch.sigmoid(temperature_m * (ratio(terms.logprobs_m, terms.behaviour_m) - 1.0)) * (4.0 / temperature_m)
    return TokenLoss(loss_m=-gate_m * terms.advantages_m, clipped_m=torch.zeros_like(gate_m, dtype=torch.bool))


def reinforce(terms: TokenTerms, settings: LossSettings) -> TokenLoss:
    """Policy gradient with truncated importance sampling: ``-min(u, cap) A log pi_theta``, u = pi_theta / pi_behav
    a constant (IMPALA's rho, 2018; TIS, 2025). No token's gradient is removed."""
    return _weighted_gradient(terms, settings.behaviour_weight_cap)


def cispo(terms: TokenTerms, settings: LossSettings) -> TokenLoss:
    """CISPO (MiniMax-M1, 2025): the policy gradient weighted by u clipped to at most 1 + clip_high, a constant, without
    a lower bound as in the paper. No token's gradient is removed."""
    return _weighted_gradient(terms, 1.0 + settings.clip_high)


def _weighted_gradient(terms: TokenTerms, cap: float | None) -> TokenLoss:
    weight_m = ratio(terms.logprobs_m, terms.behaviour_m).detach()
    if cap is not None:
        weight_m = weight_m.clamp(max=cap)
    loss_m = -weight_m * terms.advantages_m * terms.logprobs_m
    return TokenLoss(loss_m=loss_m, clipped_m=torch.zeros_like(loss_m, dtype=torch.bool))


def dro(terms: TokenTerms, settings: LossSettings) -> TokenLoss:
    """Direct Reward Optimisation (2024, arXiv:2405.19107) per token, as in Tinker: ``-A log pi_theta + beta / 2
    (log u)^2``, u = pi_theta / pi_behav. The paper and Kimi k1.5 (2025) square the log ratio of a complete response.
    This loss has no importance weight and no clip; the square keeps all tokens, also those without an advantage, close
    to the policy that sampled them."""
    log_ratio_m = terms.logprobs_m - terms.behaviour_m
    loss_m = 0.5 * settings.beta * log_ratio_m.square() - terms.advantages_m * terms.logprobs_m
    return TokenLoss(loss_m=loss_m, clipped_m=torch.zeros_like(loss_m, dtype=torch.bool))


def binary_kl(behaviour_m: Tensor, logprobs_m: Tensor) -> Tensor:
    """KL in nats from pi_behav to pi_theta of "this token or any other", [M] from log-probabilities [M]: with p and q
    their probabilities, ``p log(p / q) + (1 - p) log((1 - p) / (1 - q))``. Finite: 1 - p and 1 - q are at least 1e-12.
    """
    p_m = behaviour_m.exp()
    # expm1: near certainty 1 - exp(x) would be rounding error.
    others_p_m, others_q_m = (-torch.expm1(x_m).clamp(max=-1e-12) for x_m in (behaviour_m, logprobs_m))
    return p_m * (behaviour_m - logprobs_m) + others_p_m * (others_p_m / others_q_m).log()


def dppo(terms: TokenTerms, settings: LossSettings) -> TokenLoss:
    """DPPO (2026, arXiv:2602.04879): `reinforce` (verl's truncates u at 20) without tokens whose divergence exceeds
    ``divergence_limit`` and would grow: u > 1 with a positive advantage, u < 1 with a negative one. ``divergence``:
    "tv", the paper's Binary-TV |pi_theta - pi_behav| (its limit: 0.15), or "kl", its Binary-KL (`binary_kl`; its limit:
    0.05). Unlike a bound on the ratio this allows rare tokens to grow and restrains likely ones."""
    logprobs_m = terms.logprobs_m.detach()
    ratio_m = ratio(logprobs_m, terms.behaviour_m)
    if settings.divergence == "kl":
        divergence_m = binary_kl(terms.behaviour_m, logprobs_m)
    else:
        divergence_m = (logprobs_m.exp() - terms.behaviour_m.exp()).abs()
    diverging_m = ((ratio_m > 1) & (terms.advantages_m > 0)) | ((ratio_m < 1) & (terms.advantages_m < 0))
    removed_m = diverging_m & (divergence_m > settings.divergence_limit)
    reinforce_loss = _weighted_gradient(terms, settings.behaviour_weight_cap)
    return TokenLoss(loss_m=torch.where(removed_m, 0.0, reinforce_loss.loss_m), clipped_m=removed_m)


LOSSES: dict[str, Loss] = {
    "ppo_clip": ppo_clip,
    "decoupled_ppo": decoupled_ppo,
    "gspo": gspo,
    "gmpo": gmpo,
    "sapo": sapo,
    "reinforce": reinforce,
    "cispo": cispo,
    "dppo": dppo,
    "dro": dro,
}


def entropy_terms(algorithm: AlgorithmConfig, logprobs_m: Tensor, entropies_m: Tensor) -> tuple[Tensor, Tensor | None]:
    """The log-probabilities [M] whose gradient the loss gets, and the entropy bonus [M] to be subtracted from it, if
    there is one. Below ``algorithm.entropy_threshold`` nats a token has no gradient (Beyond the 80/20 Rule, 2025,
    arXiv:2506.01939, with a bound in place of its quantile of a batch), but for its bonus and its KL penalty."""
    threshold, coefficient = algorithm.entropy_threshold, algorithm.entropy_coefficient
    if threshold is not None:
        logprobs_m = torch.where(entropies_m.detach() >= threshold, logprobs_m, logprobs_m.detach())
    return logprobs_m, coefficient * entropies_m if coefficient > 0 else None


def resolve(name: str) -> Hook:
    """Load the loss named ``name``, or the user's ``module:function``. Raises ConfigurationError."""
    return load_hook("algorithm.loss", name, LOSSES, ("terms", "settings"))


def token_loss(loss: Hook, terms: TokenTerms, settings: LossSettings) -> TokenLoss:
    """Apply ``loss`` to ``terms`` and check its result: one value per token, shape [M].

    Raises HookFailed for any other shape; the gradient of a mean, for example, would depend on the packing."""
    returned: object = loss(terms, settings)
    if not isinstance(returned, TokenLoss):
        raise loss.failed(f"returned a {type(returned).__name__}: a TokenLoss is needed")
    expected_shape = terms.logprobs_m.shape
    if not returned.loss_m.shape == returned.clipped_m.shape == expected_shape:
        raise loss.failed(
            f"returned loss_m of shape {list(returned.loss_m.shape)} and clipped_m of shape "
            f"{list(returned.clipped_m.shape)} for {list(expected_shape)} tokens: one value per token is needed"
        )
    return returned
