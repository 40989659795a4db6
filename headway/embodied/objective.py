"""From fragments to advantages and targets, and PPO's loss over their transitions with its derivatives.

The loss is NumPy's: of a minibatch of 256 numbers each call of torch would cost more than its work.

Shapes: t steps of a fragment, b lanes, n transitions of a step, m those of a minibatch. Log-probabilities are in nats;
rewards, values and targets in deviations of the discounted returns if rewards are normalised.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from headway.algorithms.returns import FloatArray, Returns, Steps, gae, v_trace
from headway.config.simulation import EmbodiedAlgorithmConfig
from headway.embodied.records import Array, Fragment

_LEAST_DEVIATION = 1e-8  # is added to that of advantages
_MAX_LOG_RATIO = 20.0  # e^20 = 4.9e8; beyond it a ratio is noise, and has no gradient


def steps_of(
    fragment: Fragment, rewards_tb: FloatArray, values_tb: FloatArray, last_values_b: FloatArray, finals_n: FloatArray
) -> Steps:
    """The steps of a fragment's lanes. ``last_values_b``: of the observations behind its last step; ``finals_n``: of
    its ``final_observations_n``, which stand behind truncations; behind a termination nothing does."""
    next_values_tb = np.concatenate([values_tb[1:], last_values_b[None]])
    next_values_tb[tuple(fragment.final_at.T)] = finals_n
    next_values_tb[fragment.terminated_tb] = 0.0
    continues_tb = fragment.counted_tb & ~(fragment.terminated_tb | fragment.truncated_tb)
    continues_tb[:-1] &= fragment.counted_tb[1:]
    return Steps(rewards_tb, values_tb, next_values_tb, continues_tb)


def returns_of(steps: Steps, ratios_tb: FloatArray, algorithm: EmbodiedAlgorithmConfig) -> Returns:
    """Advantages and value targets [t, b] by the algorithm's correction: V-trace's, else those of generalised advantage
    estimation. ``ratios_tb``: π_prox / π_behaviour of each action."""
    if algorithm.correction == "vtrace":
        return v_trace(steps, ratios_tb, algorithm.discount, algorithm.decay)
    return gae(steps, algorithm.discount, algorithm.decay)


class LossTerms(NamedTuple):
    """The constants of transitions in a step's loss."""

    proximal_n: Array  # log-probabilities under the policy of the step's start, or without correction that which acted
    weights_n: Array  # π_prox / π_behaviour, cut at ``behaviour_weight_cap``
    advantages_n: Array
    targets_n: Array
    start_values_n: Array  # at the step's start, or as they were stored

    def rows(self, idx_m: Array | slice) -> LossTerms:
        """Return those of the indices ``idx_m``."""
        return LossTerms(*(numbers_n[idx_m] for numbers_n in self))


def joined(arrays_tb: Iterable[Array]) -> Array:
    """Concatenate arrays [t, b, ...] to [n, ...], step by step."""
    return np.concatenate([array_tb.reshape(-1, *array_tb.shape[2:]) for array_tb in arrays_tb])


def loss_terms(
    fragments: Sequence[Fragment],
    rewards: Sequence[FloatArray],
    evaluated: tuple[Array, Array] | None,
    end_values: Array,
    algorithm: EmbodiedAlgorithmConfig,
) -> LossTerms:
    """The terms [n] of all steps of fragments, in float32, those that aren't counted included. ``rewards``: [t, b] of
    each. ``evaluated``: log-probabilities and values [n] under the present policy, None without correction.
    ``end_values``: of the observations behind each fragment's last step and of its final ones, fragment by fragment."""
    behaviour_n = joined(fragment.logprobs_tb for fragment in fragments)
    proximal_n, values_n = evaluated or (behaviour_n, joined(fragment.values_tb for fragment in fragments))
    ratios_n = np.exp((proximal_n - behaviour_n).astype(np.float64).clip(max=_MAX_LOG_RATIO))
    all_returns, first, first_end = list[Returns](), 0, 0
    for fragment, rewards_tb in zip(fragments, rewards, strict=True):
        lanes, stop = rewards_tb.shape[1], first + rewards_tb.size
        stop_end = first_end + lanes + len(fragment.final_at)
        last_values_b, finals_n = np.split(end_values[first_end:stop_end], [lanes])
        values_tb = values_n[first:stop].reshape(rewards_tb.shape).astype(np.float64)
        steps = steps_of(fragment, rewards_tb, values_tb, last_values_b, finals_n)
        all_returns.append(returns_of(steps, ratios_n[first:stop].reshape(rewards_tb.shape), algorithm))
        first, first_end = stop, stop_end
    advantages_n, targets_n = (joined(arrays_tb) for arrays_tb in zip(*all_returns, strict=True))
    terms = proximal_n, ratios_n.clip(max=algorithm.behaviour_weight_cap), advantages_n, targets_n, values_n
    return LossTerms(*(numbers_n.astype(np.float32) for numbers_n in terms))


class MinibatchLoss(NamedTuple):
    """The parts of a minibatch's loss, and its derivatives by log-probabilities and values."""

    policy_loss: float
    value_loss: float  # mean squared error, or the clipped one
    log_ratios_m: Array  # log π - log π_prox
    clipped_m: Array  # bool: clipping removed the gradient
    by_logprobs_m: Array
    by_values_m: Array  # of the value loss times its coefficient


def minibatch_loss(
    logprobs_m: Array, values_m: Array, terms: LossTerms, algorithm: EmbodiedAlgorithmConfig
) -> MinibatchLoss:
    """PPO's clipped surrogate of π / π_prox (2017, Eq. 7) times the weights, with advantages normalised over the
    minibatch, as `decoupled_ppo` of the trainer, with its derivative; and the squared error of values, with
    ``value_clip`` twice the trainer's `clipped_value_loss`."""
    count, advantages_m = len(values_m), terms.advantages_n
    if count > 1:
        advantages_m = (advantages_m - advantages_m.mean()) / (advantages_m.std(ddof=1) + _LEAST_DEVIATION)
    weighted_m = terms.weights_n * advantages_m
    log_ratios_m = logprobs_m - terms.proximal_n
    ratios_m = np.exp(log_ratios_m.clip(-_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    free_m = -ratios_m * weighted_m
    bounded_m = -ratios_m.clip(1.0 - algorithm.clip, 1.0 + algorithm.clip) * weighted_m
    clipped_m = bounded_m > free_m
    is_open_m = ~clipped_m & ~(np.abs(log_ratios_m) > _MAX_LOG_RATIO)  # also of nan, which the norm then has
    slopes_m = errors_m = values_m - terms.targets_n
    squares_m = errors_m * errors_m
    if algorithm.value_clip is not None:
        bounds_m = terms.start_values_n - algorithm.value_clip, terms.start_values_n + algorithm.value_clip
        near_squares_m = (values_m.clip(*bounds_m) - terms.targets_n) ** 2
        slopes_m = np.where(near_squares_m <= squares_m, errors_m, 0.0)
        squares_m = np.maximum(squares_m, near_squares_m)
    return MinibatchLoss(
        float(np.maximum(free_m, bounded_m).mean()),
        float(squares_m.mean()),
        log_ratios_m,
        clipped_m,
        np.where(is_open_m, free_m, 0.0) / count,  # the derivative of -u A by log u is -u A
        slopes_m * (2.0 * algorithm.value_coefficient / count),
    )


def ratio_changes(log_ratios_m: Array) -> tuple[float, float]:
    """Means of k3 = u - 1 - log u, in nats, and of |u - 1|, of ratios u."""
    changes_m = np.expm1(log_ratios_m.clip(-_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    return float((changes_m - log_ratios_m).mean()), float(np.abs(changes_m).mean())
