"""Estimators of KL(pi_theta || pi_ref) from sampled tokens (Schulman, 2020, "Approximating KL divergence").

Legend: ``_m`` one value per loss token, in nats. r = pi_ref / pi_theta.

    k1  -log r               unbiased value, high variance; as a loss its gradient is 0 in expectation: refused there
    k2  (log r)^2 / 2        biased value; on policy its gradient is that of the KL
    k3  r - 1 - log r        unbiased value, low variance, never < 0; its gradient is that of KL(pi_ref || pi_theta)
    k1_unbiased, k3_unbiased the estimator times pi_theta / pi_behav, gradient through both: on policy or off, value
                             and gradient are those of the KL (DeepSeek-V3.2, 2025)
"""

from __future__ import annotations

from math import exp
from typing import Literal

import torch
from torch import Tensor

from headway.config.consistency import MOST_KL_ERROR
from headway.trainer.losses import MAX_LOG_RATIO, ratio

_MAX_ROUNDED = 16.0  # nats: exp(16) = 8.9e6, the largest r that float32 can still subtract

KlEstimator = Literal["k1", "k2", "k3", "k1_unbiased", "k3_unbiased"]


def adapted_coefficient(coefficient: float, kl: float, *, target: float, samples: int, horizon: float) -> float:
    """The coefficient after a step of ``samples`` with a mean KL of ``kl`` nats per token: ``coefficient (1 + K e)``
    with ``e = clip((kl - target) / target, -0.2, 0.2)`` (Fine-Tuning Language Models from Human Preferences, 2019,
    section 2.2) and ``K = samples / horizon``, as in the paper's code. It is never below 0."""
    clipped_error = min(max((kl - target) / target, -MOST_KL_ERROR), MOST_KL_ERROR)
    return coefficient * max(0.0, 1.0 + clipped_error * samples / horizon)


def kl_estimate(estimator: KlEstimator, logprobs_m: Tensor, reference_m: Tensor, behaviour_m: Tensor) -> Tensor:
    """KL estimates [M]. They and their gradients are finite for any finite log-probabilities, with the gradients' sign
    as in the formulas above: beyond ``MAX_LOG_RATIO`` k3 continues as its tangent, and a clamped weight keeps its
    gradient."""
    log_ratio_m = logprobs_m - reference_m  # -log r
    base_name, _, unbiased_suffix = estimator.partition("_")
    if base_name == "k1":
        value_m = log_ratio_m
    elif base_name == "k2":
        value_m = 0.5 * log_ratio_m.square()
    else:
        # expm1: for close models exp(x) - 1 would be rounding error, and the estimate could be negative.
        value_m = torch.expm1((-log_ratio_m).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) + log_ratio_m
        value_m = value_m + exp(MAX_LOG_RATIO) * torch.relu(-log_ratio_m - MAX_LOG_RATIO)
    if not unbiased_suffix:
        return value_m
    weight_m, by_logprobs_m = ratio(logprobs_m, behaviour_m).detach(), logprobs_m - logprobs_m.detach()
    weighted_m = weight_m * by_logprobs_m.exp() * value_m  # whose gradient has a factor weight_m, clamped or not
    if base_name == "k1":
        return weighted_m
    # w (k3 + 1 - r) = -w log r: for a large r the left side is rounding error.
    exact_m = weighted_m.detach() + weight_m * log_ratio_m.detach() * by_logprobs_m
    return torch.where(-log_ratio_m > _MAX_ROUNDED, exact_m, weighted_m)
