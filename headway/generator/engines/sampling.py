"""Sampling by inverse CDF from counter-based random numbers.

The uniform number of a token depends only on (request seed, position in the response), so equal weights
give equal tokens wherever a request runs, whoever runs beside it and however often it was resumed.

Shapes: n rows (requests), v vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.models.cpu import native

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea & Flood 2014): a bijection of 64 bits with full avalanche."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def counter_bits(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """64 random bits for each row, [n] uint64: a pure function of (seed, position)."""
    return _mix(_mix(seeds + _GOLDEN) + positions.astype(np.uint64) * _GOLDEN)


def counter_uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Uniform numbers in (0, 1), [n] float64: for each row a pure function of (seed, position).

    They are odd multiples of 2^-33, so that a number times a total is never the total itself.
    """
    return ((counter_bits(seeds, positions) >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32


class RowSampling(NamedTuple):
    """Sampling parameters of a batch of rows. The row lists are None where no row needs them."""

    uniform_n: Tensor  # [n] float64
    temperature_n: Tensor | None  # [n] float32, > 0; None: all 1
    greedy_rows: Tensor | None = None  # rows that take the argmax
    truncated_rows: Tensor | None = None  # rows with top_p < 1 or top_k > 0 ...
    top_p: Tensor | None = None  # ... and their values, [rows] float64
    top_k: Tensor | None = None  # [rows] int64, vocabulary size where off

    def only(self, rows: Tensor) -> RowSampling:
        """The parameters of ``rows``, which are this batch's greedy rows or its truncated ones."""
        uniform_n = self.uniform_n[rows]
        temperature_n = None if self.temperature_n is None else self.temperature_n[rows]
        every = torch.arange(len(rows), device=rows.device)
        if rows is self.greedy_rows:
            return RowSampling(uniform_n, temperature_n, every)
        return RowSampling(uniform_n, temperature_n, None, every, self.top_p, self.top_k)


def sample_tokens(logits_nv: Tensor, how: RowSampling) -> Tensor:
    """Sample one token a row. Returns [2, n] float32: token ids (exact below 2^24) and log-probabilities.

    The log-probability is log-softmax(z/T) over the full vocabulary in float32 (DESIGN rule 5), also where
    top-p or top-k restrict what is sampled. A row's result does not depend on the other rows' parameters.
    """
    fast = native.active(logits_nv)
    if fast is None:
        return _sample(logits_nv, how)
    sampled = fast.sample(logits_nv, how.temperature_n, how.uniform_n)
    for rows in (how.greedy_rows, how.truncated_rows):
        if rows is not None:
            sampled[:, rows] = _sample(logits_nv[rows], how.only(rows))
    return sampled


def _sample(logits_nv: Tensor, how: RowSampling) -> Tensor:
    logits_nv = logits_nv.float()
    if how.temperature_n is not None:
        logits_nv = logits_nv / how.temperature_n[:, None]
    logprobs_nv = torch.log_softmax(logits_nv, dim=-1)
    probabilities_nv = logprobs_nv.exp()
    tokens_n1 = _invert(probabilities_nv.cumsum(-1, dtype=torch.float64), how.uniform_n)
    if how.truncated_rows is not None and how.top_p is not None and how.top_k is not None:
        rows = how.truncated_rows
        tokens_n1[rows] = _sample_truncated(probabilities_nv[rows], how.uniform_n[rows], how.top_p, how.top_k)
    if how.greedy_rows is not None:
        tokens_n1[how.greedy_rows] = logits_nv[how.greedy_rows].argmax(-1, keepdim=True)
    return torch.cat([tokens_n1, logprobs_nv.gather(-1, tokens_n1)], dim=1).t()


def _invert(cdf_nv: Tensor, uniform_n: Tensor) -> Tensor:
    """First index whose cumulative mass exceeds uniform x total, so never one of zero mass. Returns [n, 1]."""
    target_n1 = (uniform_n * cdf_nv[:, -1])[:, None]
    tokens_n1 = torch.searchsorted(cdf_nv, target_n1, right=True)
    return tokens_n1.clamp_(max=cdf_nv.shape[-1] - 1)  # only a row of NaN comes out past the end


def _sample_truncated(probabilities_nv: Tensor, uniform_n: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Sample among the top_k most likely, of these the smallest set of mass >= top_p. Returns [n, 1]."""
    sorted_nv, order_nv = probabilities_nv.sort(dim=-1, descending=True, stable=True)
    ranks_v = torch.arange(sorted_nv.shape[-1], device=sorted_nv.device)
    kept_nv = sorted_nv.double() * (ranks_v[None, :] < top_k[:, None])
    cdf_nv = kept_nv.cumsum(-1)
    mass_n1 = cdf_nv[:, -1:]
    kept_nv = kept_nv * ((cdf_nv - kept_nv) < top_p[:, None] * mass_n1)  # the token that crosses top_p stays
    return order_nv.gather(-1, _invert(kept_nv.cumsum(-1), uniform_n))
