"""Advantages and value targets from rewards by step: generalised advantage estimation (Schulman et al. 2016, arXiv
1506.02438) and V-trace (Espeholt et al. 2018, arXiv 1802.01561), in float64.

Shapes: t steps in their order, with any further dimensions (lanes of a simulator); m loss tokens of a batch, sequence
after sequence; s sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]


class Steps(NamedTuple):
    """Steps of episodes that follow each other. Example: rewards 0, 1, then an episode that is cut behind one step:
    values (.2, .6, .1), next_values (.6, 0, V of its last observation), continues (True, False, False)."""

    rewards_t: FloatArray
    values_t: FloatArray  # V of the state before the step
    next_values_t: FloatArray  # V of the state behind it; 0: the episode ended there, not where it was cut
    continues_t: NDArray[np.bool_]  # whether the next step is of the same episode


class Returns(NamedTuple):
    """The advantages of steps, and the targets of their values."""

    advantages_t: FloatArray
    targets_t: FloatArray


def gae(steps: Steps, discount: float, decay: ArrayLike) -> Returns:
    """A_t = δ_t + γλ A_(t+1), with δ_t = r_t + γ V(s_(t+1)) - V(s_t) and A = 0 behind an episode; the targets are
    A + V. ``discount``: γ. ``decay``: λ, a number or one for each lane."""
    deltas_t = steps.rewards_t + discount * steps.next_values_t - steps.values_t
    advantages_t = _decayed_sums(deltas_t, discount * np.asarray(decay) * steps.continues_t)
    return Returns(advantages_t, advantages_t + steps.values_t)


def v_trace(steps: Steps, ratios_t: FloatArray, discount: float, decay: float = 1.0, limit: float = 1.0) -> Returns:
    """Targets v_t = V_t + Σ (γλ)^k Π c δ, with ratios cut at ``limit``, and advantages r_t + γ (λ v_(t+1) +
    (1 - λ) V_(t+1)) - V_t, which the caller weighs with its own cut ratio. ``ratios_t``: probability of the step's
    action now ÷ when it was taken. Equal to `gae` where all ratios are 1."""
    cut_t = np.minimum(ratios_t, limit)
    deltas_t = cut_t * (steps.rewards_t + discount * steps.next_values_t - steps.values_t)
    corrections_t = _decayed_sums(deltas_t, discount * decay * cut_t * steps.continues_t)
    targets_t = steps.values_t + corrections_t
    behind_t = steps.next_values_t.copy()
    behind_t[:-1] += decay * np.where(steps.continues_t[:-1], corrections_t[1:], 0.0)
    return Returns(steps.rewards_t + discount * behind_t - steps.values_t, targets_t)


def gae_of_tokens(
    rewards_m: FloatArray,
    values_m: FloatArray,
    sequence_m: NDArray[np.int64],
    discount: float,
    decay: ArrayLike,
    cut_values_s: FloatArray | None = None,
) -> Returns:
    """`gae` over each sequence's loss tokens alone: an environment's tokens between them carry no reward, value or
    decay. ``sequence_m``: ascending, 0 to s - 1. ``decay``: λ, a number or one for each sequence. ``cut_values_s``: the
    value behind a sequence's last token if it was cut, else 0."""
    counts_s = np.bincount(sequence_m)
    step_m = np.arange(len(sequence_m)) - (np.cumsum(counts_s) - counts_s)[sequence_m]
    rewards_ts, values_ts = (np.zeros((counts_s.max(initial=0), len(counts_s))) for _ in range(2))
    rewards_ts[step_m, sequence_m], values_ts[step_m, sequence_m] = rewards_m, values_m
    next_values_ts = np.concatenate([values_ts[1:], np.zeros_like(values_ts[:1])])
    is_last_m = step_m == counts_s[sequence_m] - 1
    if cut_values_s is not None:
        next_values_ts[step_m[is_last_m], sequence_m[is_last_m]] = cut_values_s[sequence_m[is_last_m]]
    continues_ts = np.zeros(values_ts.shape, np.bool_)
    continues_ts[step_m, sequence_m] = ~is_last_m
    returns = gae(Steps(rewards_ts, values_ts, next_values_ts, continues_ts), discount, decay)
    return Returns(*(array_ts[step_m, sequence_m] for array_ts in returns))


def decay_by_length(lengths_s: ArrayLike, alpha: float = 0.05) -> FloatArray:
    """λ of each sequence, 1 - 1 / (α · length) and at least 0, so that a share of the outcome that doesn't depend on
    the length reaches each token (VAPO, arXiv 2504.05118)."""
    return np.maximum(0.0, 1.0 - 1.0 / (alpha * np.maximum(1, np.asarray(lengths_s))))


def _decayed_sums(terms_t: FloatArray, decays_t: FloatArray) -> FloatArray:
    """S_t = terms_t + decays_t · S_(t+1)."""
    sums_t = terms_t.copy()
    for step in range(len(sums_t) - 2, -1, -1):
        sums_t[step] += decays_t[step] * sums_t[step + 1]
    return sums_t
