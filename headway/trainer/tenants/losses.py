"""The losses of the tinker SDK: sums over tokens, by the formulas of trainer/losses.py where it has them.

Legend: suffix ``_m`` is one value per token, or per token and target; all are float32 (float64 in tests), in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from headway.records.tenants.protocols import TenantRefused
from headway.trainer.losses import LossSettings, TokenTerms, dro, gspo, ppo_clip, ratio

Inputs = Mapping[str, Tensor]  # [M] by the SDK's names: weights; or logprobs (of the sampler) and advantages
Settings = Mapping[str, float | str]
_PassLoss = Callable[[Tensor, Inputs, Tensor, Settings], Tensor]

_CLIPS = (0.8, 1.2)  # the bounds of a ratio
_CISPO_CLIPS = (0.0, 4.0)
_BETA = 0.05


def loss_sum(loss: str, logprobs_m: Tensor, inputs: Inputs, sequence_m: Tensor, settings: Settings) -> Tensor:
    """The sum over all tokens of a loss, a scalar with gradient. ``sequence_m``: int64 [M], ascending: the token's
    datum. Raises TenantRefused for an unknown loss."""
    return require_loss(loss)(logprobs_m, inputs, sequence_m, settings)


def require_loss(loss: str) -> _PassLoss:
    """The function of a loss. Raises TenantRefused for an unknown one."""
    if loss not in _LOSSES:
        raise TenantRefused(f"loss_fn = {loss!r}: valid: {', '.join(_LOSSES)}")
    return _LOSSES[loss]


def _cross_entropy(logprobs_m: Tensor, inputs: Inputs, sequence_m: Tensor, settings: Settings) -> Tensor:
    """``-sum w log pi``; weights are any numbers, as the SDK's custom losses need."""
    return -(inputs["weights"] * logprobs_m).sum()


def _importance_sampling(logprobs_m: Tensor, inputs: Inputs, sequence_m: Tensor, settings: Settings) -> Tensor:
    """``-sum u A``, u = pi_theta / pi_sampler with its gradient."""
    return -(ratio(logprobs_m, inputs["logprobs"]) * inputs["advantages"]).sum()


def _ppo(logprobs_m: Tensor, inputs: Inputs, sequence_m: Tensor, settings: Settings) -> Tensor:
    """``-sum min(u A, clip(u, low, high) A)``."""
    return ppo_clip(_terms(logprobs_m, inputs), _clip_settings(settings)).loss_m.sum()


def _cispo(logprobs_m: Tensor, inputs: Inputs, sequence_m: Tensor, settings: Settings) -> Tensor:
    """``-sum clip(u, low, high) A log pi``, the clipped ratio a constant; unlike `cispo` of other runs with a lower
    bound."""
    weights_m = ratio(logprobs_m, inputs["logprobs"]).detach().clamp(*_clips(settings, _CISPO_CLIPS))
    return -(weights_m * inputs["advantages"] * logprobs_m).sum()


def _dro(logprobs_m: Tensor, inputs: Inputs, sequence_m: Tensor, settings: Settings) -> Tensor:
    """``-sum (A log pi - beta / 2 (log u)^2)``."""
    return dro(_terms(logprobs_m, inputs), LossSettings(beta=float(settings.get("beta", _BETA)))).loss_m.sum()


def _gspo(logprobs_m: Tensor, inputs: Inputs, sequence_m: Tensor, settings: Settings) -> Tensor:
    """`_ppo` with the geometric mean of a datum's ratios, over the tokens of ``sequence_ratio_mask``; without that over
    the tokens with an advantage other than 0, because the sampler's log-probabilities of a prompt are 0."""
    keep_m = inputs.get("sequence_ratio_mask", inputs["advantages"]) != 0
    terms = _terms(logprobs_m, inputs, sequence_m=sequence_m, keep_m=keep_m)
    return gspo(terms, _clip_settings(settings)).loss_m.sum()


def _terms(logprobs_m: Tensor, inputs: Inputs, **more: Tensor) -> TokenTerms:
    return TokenTerms(
        logprobs_m=logprobs_m,
        proximal_m=logprobs_m.detach(),
        behaviour_m=inputs["logprobs"],
        advantages_m=inputs["advantages"],
        **more,
    )


def _clips(settings: Settings, default: tuple[float, float]) -> tuple[float, float]:
    low, high = settings.get("clip_low_threshold", default[0]), settings.get("clip_high_threshold", default[1])
    return float(low), float(high)


def _clip_settings(settings: Settings) -> LossSettings:
    low, high = _clips(settings, _CLIPS)
    return LossSettings(clip_low=1.0 - low, clip_high=high - 1.0, behaviour_weight_cap=None)


_LOSSES: dict[str, _PassLoss] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
    "gspo": _gspo,
}
