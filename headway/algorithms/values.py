"""Advantages of a batch's tokens from rewards and a critic's values, and the scale of the returns.

Legend: ``_n`` one value per token of the batch, ``_m`` one per loss token, ``_s`` one per sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.algorithms.returns import FloatArray, decay_by_length, gae_of_tokens
from headway.algorithms.samples import BoolArray, SampleArrays
from headway.config.objective.critic import CriticConfig
from headway.records.tokens import TokenRows

LEAST_DEVIATION = 1e-6  # of returns and advantages that are divided by it, in units of reward


class TokenValues(NamedTuple):
    """Advantages of a batch's loss tokens, and what their values are trained towards, in units of reward."""

    advantages_m: FloatArray
    targets_m: FloatArray  # of the values
    returns_m: FloatArray  # discounted sums of all rewards to come, and of the value behind a cut


def values_of_tokens(
    rewards_m: FloatArray,
    values_m: FloatArray,
    sequence_m: NDArray[np.int64],
    cut_values_s: FloatArray,
    settings: CriticConfig,
) -> TokenValues:
    """Advantages and targets of loss tokens, sequence after sequence. ``sequence_m``: ascending, of 0 to S - 1, of
    which some may have no loss token. ``cut_values_s``: [S] the value behind a sequence's end if it was cut, else 0.

    With a decay "length" it is that of VAPO (`decay_by_length`), and values are trained towards returns (decay 1)."""
    sequences, compact_m = np.unique(sequence_m, return_inverse=True)
    discount, decay = settings.gae
    decays = decay_by_length(np.bincount(compact_m)) if decay == "length" else decay
    terms = rewards_m, values_m, compact_m, discount
    estimate = gae_of_tokens(*terms, decays, cut_values_s[sequences])
    returns_m = gae_of_tokens(*terms, 1.0, cut_values_s[sequences]).targets_t
    targets_m = returns_m if decay == "length" else estimate.targets_t
    return TokenValues(estimate.advantages_t, targets_m, returns_m)


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Count, mean and sum of squared deviations of numbers, or of arrays of one shape by dimension, in float64; those
    of parts can be added up (Chan et al., 1979).

    Example: those of (1, 3) and of (5,) give count 3, mean 3, squares 8."""

    count: float = 0.0
    mean: Any = 0.0
    squares: Any = 0.0

    @classmethod
    def of(cls, numbers: NDArray[Any]) -> Moments:
        """``numbers``: [n, ...]."""
        if not len(numbers):
            return cls()
        mean, variance = numbers.mean(axis=0, dtype=np.float64), numbers.var(axis=0, dtype=np.float64)
        return cls(count=len(numbers), mean=mean, squares=variance * len(numbers))

    @classmethod
    def joined(cls, parts: Sequence[Moments]) -> Moments:
        """Add up the moments of several parts."""
        total = cls()
        for part in parts:
            count = total.count + part.count
            if not count:
                continue
            shift = part.mean - total.mean
            squares = total.squares + part.squares + shift * shift * total.count * part.count / count
            total = cls(count=count, mean=total.mean + shift * part.count / count, squares=squares)
        return total

    @property
    def deviation(self) -> Any:
        """Their population deviation; 1 where there are none, or all are equal."""
        deviation = (self.squares / max(1.0, self.count)) ** 0.5
        return np.where(deviation > LEAST_DEVIATION, deviation, 1.0)[()]


def least_probabilities(arrays: SampleArrays) -> NDArray[np.float32]:
    """[N] the lowest probability at which a loss token before this one in its sequence was sampled; 1: there is none.

    Example: a prompt, then tokens sampled at 0.9 and 0.2, a tool's answer, one at 0.5: 1, .9, .2 (answer), .2."""
    logprobs_n = np.where(arrays.loss_mask_n, arrays.behaviour_logprobs_n, np.float32(0.0))
    least_n = np.zeros(arrays.tokens, np.float32)
    for start, length in zip(arrays.starts_s.tolist(), arrays.lengths_s.tolist(), strict=True):
        least_n[start + 1 : start + length] = np.minimum.accumulate(logprobs_n[start : start + length][:-1])
    return np.exp(least_n)


def with_ends(arrays: SampleArrays) -> tuple[SampleArrays, BoolArray]:
    """``arrays`` with one more token behind each sequence that bootstraps, whose predictor is the sequence's last
    token: its value is that of the state where the sequence was cut. And [N] which tokens are those of ``arrays``."""
    if (cut_s := arrays.bootstraps_s) is None:
        return arrays, np.ones(arrays.tokens, np.bool_)
    ends = (arrays.starts_s + arrays.lengths_s)[cut_s]
    added: dict[str, Any] = {"token_ids_n": 0, "loss_mask_n": True, "behaviour_logprobs_n": 0.0, "advantages_n": 0.0}
    added |= {"versions_n": 0} | ({} if arrays.imitated_n is None else {"imitated_n": False})
    columns = {name: np.insert(getattr(arrays, name), ends, fill) for name, fill in added.items()}
    bounds, rows_by_kind = [0, *ends.tolist(), arrays.tokens], dict[str, TokenRows]()
    for kind, rows in arrays.token_rows.items():
        parts = [rows[first:stop] for first, stop in itertools.pairwise(bounds)]
        rows_by_kind[kind] = TokenRows.joined(row for part in parts for row in (part, TokenRows.empty(1)))[:-1]
    extended = replace(arrays, **columns, lengths_s=arrays.lengths_s + cut_s, token_rows=rows_by_kind)
    return extended, np.insert(np.ones(arrays.tokens, np.bool_), ends, False)
