"""Importance masks, which leave out tokens whose current policy is too far from the one that sampled them.

All masks are functions of constants, the log importance weight log(pi_prox / pi_behav) of each loss token with
pi_prox the weights at the start of the step, so they are computed once per batch and carry no gradient. A masked
token's loss is 0, its KL penalty included; denominators keep counting it (DESIGN rule 10).

Legend: ``_m`` one value per loss token of the batch; ``sequence_m`` the token's sample, 0 .. samples - 1.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

Bounds = tuple[float, float]
SequenceWeight = Literal["mean", "sum", "max"]


def token_mask(log_weight_m: FloatArray, bounds: Bounds) -> BoolArray:
    """Keep tokens whose weight lies within ``bounds`` (IcePop, Ring-1T, 2025). Shape [M] -> [M]."""
    return _within(log_weight_m, bounds)


def sequence_mask(
    log_weight_m: FloatArray, sequence_m: IntArray, bounds: Bounds, by: SequenceWeight = "mean"
) -> BoolArray:
    """Keep samples whose weight lies within ``bounds``. Shape [M] -> [M].

    The weight of a sample, of its loss tokens' log weights: ``mean``, the exponential of their mean, the geometric mean
    weight (DeepSeek-V3.2, 2025, masks by it too, but only samples with a negative advantage and only for a weight that
    is too low); ``sum``, the exponential of their sum, the whole response's pi_prox / pi_behav; ``max``, the
    exponential of the one farthest from 0: one token outside masks its sample.
    """
    if by == "max":
        outside_s = np.bincount(sequence_m, weights=~_within(log_weight_m, bounds))
        return outside_s[sequence_m] == 0
    total_s = np.bincount(sequence_m, weights=log_weight_m).astype(np.float64)
    if by == "mean":
        total_s = total_s / np.maximum(np.bincount(sequence_m), 1)
    return _within(total_s, bounds)[sequence_m]


def second_moment_mask(log_weight_m: FloatArray, advantages_m: FloatArray, limit: float) -> BoolArray:
    """Mask the fewest tokens, farthest first, until the mean squared log weight is at most ``limit``.

    The mean is over the kept tokens (M2PO, 2025, uses 0.04). Shape [M] -> [M].

    Only tokens that the gradient drives further away count and can be masked: weight > 1 with a positive advantage,
    weight < 1 with a negative one. PPO's clip never affects the others either.
    """
    driven_m = np.flatnonzero(((log_weight_m > 0) & (advantages_m > 0)) | ((log_weight_m < 0) & (advantages_m < 0)))
    driven_squares = log_weight_m[driven_m] ** 2
    order = np.argsort(driven_squares, kind="stable")
    means = np.cumsum(driven_squares[order]) / np.arange(1, len(order) + 1)
    # Ascending squares have ascending means: everything after the last mean within the limit is masked.
    kept_count = int(np.searchsorted(means, limit, side="right"))
    keep_m = np.ones(len(log_weight_m), np.bool_)
    keep_m[driven_m[order[kept_count:]]] = False
    return keep_m


def _within(log_weight: FloatArray, bounds: Bounds) -> BoolArray:
    low, high = bounds
    return (log_weight >= np.log(low)) & (log_weight <= np.log(high)) if low > 0 else log_weight <= np.log(high)
