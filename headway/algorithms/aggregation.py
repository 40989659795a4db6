"""Aggregates token losses by a weight for each token and one divisor.

Both are fixed before any mask but the loss mask (design.md, rule 10), so that packing, ranks, staleness masks and
importance masks don't change them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headway.algorithms.samples import IntArray, SampleArrays

Aggregation = Literal["token_mean", "fixed", "seq_mean_token_sum", "seq_mean_token_mean"]


@dataclass(frozen=True, kw_only=True)
class Weighting:
    """Weights and divisor of an update, whose loss is sum(weights_s[sequence of token] x token loss) / divisor."""

    weights_s: NDArray[np.float64]  # [S] weight of every token of a sequence
    total: float  # count behind the divisor (tokens, responses); those of parts add up to a step's

    @property
    def divisor(self) -> float:
        """The divisor: at least 1."""
        return max(1.0, self.total)


def weighting(
    aggregation: Aggregation,
    arrays: SampleArrays,
    minibatch: IntArray,
    *,
    max_response_tokens: int,
    tokens_s: IntArray | None = None,
) -> Weighting:
    """Compute weights and divisor of one optimiser step over the sequences ``minibatch``.

    ``minibatch``: indices of sequences, all of a sample's or none. Of a rank's share of a batch they are the rank's,
    and the ranks' totals add up to that of the batch. ``tokens_s``: [S] tokens with this loss of each sequence's
    rollout, its branches' too (default: the sampled ones that carry loss).

    ``token_mean``: mean over the step's loss tokens (DAPO, 2025, Eq. 8). ``fixed``: divided by a constant that doesn't
    depend on the lengths sampled, samples x max_response_tokens (Dr. GRPO, 2025). ``seq_mean_token_sum``: each
    response's sum, mean over responses. ``seq_mean_token_mean``: each response's mean, mean over responses (GRPO, 2024,
    Eq. 3; GSPO, 2025).

    Responses without a loss token count in no mean over responses; ``fixed`` counts them, as it ignores lengths.
    The sequences of a branched rollout are one response: its tokens are those of all of them, and it counts once.

    Everything is weighted by ``arrays.weights_s``: a sample that occurs n times in the batch (a padded group) has
    weight 1/n each time, so that padding changes nothing.
    """
    shares_s = np.ones(arrays.samples) if arrays.weights_s is None else arrays.weights_s
    if tokens_s is None:
        tokens_s = arrays.loss_tokens_s if arrays.rollout_tokens_s is None else arrays.rollout_tokens_s
    counts_s = shares_s  # weight of a sequence in a mean over responses
    if arrays.branches_s is not None:
        counts_s = np.where(arrays.branches_s == 0, shares_s, 0.0)
    weights_s = shares_s
    if aggregation == "seq_mean_token_mean":
        weights_s = shares_s / np.maximum(tokens_s, 1.0)
    if aggregation == "token_mean":
        total = float((tokens_s * counts_s)[minibatch].sum())
    elif aggregation != "fixed":
        total = float(counts_s[minibatch][tokens_s[minibatch] > 0].sum())
    else:
        total = float(counts_s[minibatch].sum() * max_response_tokens)
    return Weighting(weights_s=weights_s, total=total)
