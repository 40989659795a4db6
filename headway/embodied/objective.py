"""From fragments to advantages and targets, and PPO's loss over their transitions.

Shapes: t steps of a fragment, b lanes, n transitions of a step, m those of a minibatch. Log-probabilities are in nats;
rewards, values and targets in deviations of the discounted returns if rewards are normalised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headway.algorithms.returns import FloatArray, Returns, Steps, gae, v_trace
from headway.config.simulation import EmbodiedAlgorithmConfig
from headway.embodied.records import Fragment
from headway.trainer.critic.value_loss import clipped_value_loss
from headway.trainer.losses import MAX_LOG_RATIO, LossSettings, TokenTerms, decoupled_ppo

_LEAST_DEVIATION = 1e-8  # is added to that of advantages


def steps_of(
    fragment: Fragment, rewards_tb: FloatArray, values_tb: FloatArray, last_values_b: FloatArray, finals_n: FloatArray
) -> Steps:
    """The steps of a fragment's lanes. ``last_values_b``: of the observations behind its last step; ``finals_n``: of
    its ``final_observations_n``, which stand behind truncations; behind a termination nothing does."""
    next_values_tb = np.concatenate([values_tb[1:], last_values_b[None]])
    next_values_tb[tuple(fragment.final_at.T)] = finals_n
    next_values_tb[fragment.terminated_tb] = 0.0
    ended_tb, counted_tb = fragment.terminated_tb | fragment.truncated_tb, fragment.counted_tb
    continues_tb = ~ended_tb & counted_tb
    continues_tb[:-1] &= counted_tb[1:]
    return Steps(rewards_tb, values_tb, next_values_tb, continues_tb)


def returns_of(steps: Steps, ratios_tb: FloatArray, algorithm: EmbodiedAlgorithmConfig) -> Returns:
    """Advantages and value targets [t, b] by the algorithm's correction: V-trace's, else those of generalised advantage
    estimation. ``ratios_tb``: π_prox / π_behaviour of each action."""
    if algorithm.correction == "vtrace":
        return v_trace(steps, ratios_tb, algorithm.discount, algorithm.decay)
    return gae(steps, algorithm.discount, algorithm.decay)


@dataclass(frozen=True, eq=False)
class Transitions:
    """The counted transitions of a step's fragments, block after block, then step by step; constants of its loss."""

    inputs_n: Tensor  # observations as `ActorCritic.forward` takes them
    actions_n: Tensor
    terms_5n: Tensor  # behaviour and proximal log-probabilities, advantages, targets, values at the step's start

    def rows(self, idx_m: Tensor) -> Transitions:
        """Return the rows of the indices ``idx_m``."""
        return Transitions(self.inputs_n[idx_m], self.actions_n[idx_m], self.terms_5n[:, idx_m])


class MinibatchLoss(NamedTuple):
    """The loss of a minibatch, and its parts; only ``loss`` carries a gradient."""

    loss: Tensor
    policy_loss: Tensor
    value_loss: Tensor  # mean squared error, or the clipped one
    entropy: Tensor
    log_ratios_m: Tensor  # log π - log π_prox
    clipped_m: Tensor  # bool: clipping removed the gradient


def minibatch_loss(
    logprobs_m: Tensor, values_m: Tensor, entropy: Tensor, rows: Transitions, algorithm: EmbodiedAlgorithmConfig
) -> MinibatchLoss:
    """PPO's clipped surrogate of π / π_prox, weighted by π_prox / π_behaviour cut at ``behaviour_weight_cap``, with
    advantages normalised over the minibatch; plus the value loss, minus the entropy bonus. Without correction π_prox is
    the policy that acted, and all weights are 1."""
    behaviour_m, proximal_m, advantages_m, targets_m, start_m = rows.terms_5n
    if len(advantages_m) > 1:
        deviation, mean = torch.std_mean(advantages_m)
        advantages_m = (advantages_m - mean) / (deviation + _LEAST_DEVIATION)
    terms = TokenTerms(logprobs_m=logprobs_m, proximal_m=proximal_m, behaviour_m=behaviour_m, advantages_m=advantages_m)
    clip, cap = algorithm.clip, algorithm.behaviour_weight_cap
    policy = decoupled_ppo(terms, LossSettings(clip_low=clip, clip_high=clip, behaviour_weight_cap=cap))
    policy_loss = policy.loss_m.mean()
    if algorithm.value_clip is None:
        value_loss = (values_m - targets_m).square().mean()
    else:
        value_loss = 2.0 * clipped_value_loss(values_m, start_m, targets_m, algorithm.value_clip).mean()
    loss = policy_loss + algorithm.value_coefficient * value_loss
    if algorithm.entropy_coefficient:
        loss = loss - algorithm.entropy_coefficient * entropy
    parts = policy_loss, value_loss, entropy, logprobs_m
    policy_loss, value_loss, entropy, logprobs_m = (part.detach() for part in parts)
    return MinibatchLoss(loss, policy_loss, value_loss, entropy, logprobs_m - proximal_m, policy.clipped_m)


def ratio_changes(log_ratios_m: Tensor) -> tuple[Tensor, Tensor]:
    """Means of k3 = u - 1 - log u, in nats, and of |u - 1|, of ratios u."""
    changes_m = torch.expm1(log_ratios_m.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    return (changes_m - log_ratios_m).mean(), changes_m.abs().mean()
