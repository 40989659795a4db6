"""Sampling by inverse CDF from counter-based random numbers.

The uniform number of a token depends only on (request seed, position in the response), so equal weights
give equal tokens wherever a request runs, whichever requests run beside it and however often it was resumed.

Shapes: n rows (requests), v vocabulary, w words of 32 bits for it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.models.cpu import native

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
HostSample = tuple[NDArray[np.int64], NDArray[np.float32], dict[int, NDArray[np.int32] | int]]  # see `Sampled.host`
_SORTED = 1024  # of a distribution's largest masses, tried first


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea & Flood 2014): a bijection of 64 bits with full avalanche."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def counter_bits(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return 64 random bits for each row, [n] uint64: a pure function of (seed, position)."""
    return _mix(_mix(seeds + _GOLDEN) + positions.astype(np.uint64) * _GOLDEN)


def counter_uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return uniform numbers in (0, 1), [n] float64: for each row a pure function of (seed, position).

    They are odd multiples of 2^-33, so that a number times a total is never the total itself.
    """
    return ((counter_bits(seeds, positions) >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32


class KeptRows(NamedTuple):
    """Parameters of the m rows that aren't sampled from their whole distribution, [m] each."""

    rows: Tensor  # int64, their numbers
    greedy: Tensor  # bool: takes the most likely
    top_p: Tensor  # float64, 1 where off
    top_k: Tensor  # int64, at least the vocabulary's size where off
    max_kept: Tensor  # int64; if > 0, log-probabilities are over the kept ids, which are returned unless they are more
    masks: Tensor | None = None  # [m, w] int32, of grammars: see `tokens.grammar`; -1 where there is none


class RowSampling(NamedTuple):
    """Sampling parameters of a batch of rows."""

    uniform_n: Tensor  # [n] float64
    temperature_n: Tensor | None  # [n] float32, > 0; None: all 1
    kept: KeptRows | None = None
    untempered: Tensor | None = None  # int64, the rows whose log-probabilities are over the plain softmax; None: none


class Sampled(NamedTuple):
    """The tokens sampled for a batch of rows, one token for each row."""

    tokens: Tensor  # [2, n] float32: ids (exact below 2^24) and log-probabilities
    kept: KeptRows | None = None
    sizes: Tensor | None = None  # [m] int64: count of ids kept by top-p and top-k; -1 where these don't restrict it
    ids: Tensor | None = None  # int32: the kept ids of the returned sets, row after row

    def host(self) -> HostSample:
        """Return tokens and log-probabilities on the host, and by row the kept set, or its size if it is too large."""
        tokens, kept_by_row = self.tokens.cpu().numpy(), dict[int, NDArray[np.int32] | int]()
        if self.kept is not None and self.sizes is not None and self.ids is not None:
            rows, limits, sizes = (tensor.cpu().numpy() for tensor in (self.kept.rows, self.kept.max_kept, self.sizes))
            for index in np.flatnonzero((limits > 0) & (sizes > limits)):
                kept_by_row[int(rows[index])] = int(sizes[index])
            returned_rows = np.flatnonzero((limits > 0) & (sizes >= 0) & (sizes <= limits))
            set_ends = sizes[returned_rows].cumsum()
            if len(set_ends):
                ids, set_start = self.ids[: int(set_ends[-1])].cpu().numpy().copy(), 0
                for row, set_end in zip(rows[returned_rows].tolist(), set_ends.tolist(), strict=True):
                    kept_by_row[row], set_start = ids[set_start:set_end], set_end
        return tokens[0].astype(np.int64), tokens[1], kept_by_row


def sample_tokens(logits_nv: Tensor, how: RowSampling) -> Sampled:
    """Sample one token for each row.

    The log-probability is log-softmax(z/T) in float32 (DESIGN rule 5): over the full vocabulary, also where a grammar,
    top-p or top-k restrict what is sampled, unless a row asks for it over the kept ids, or at temperature 1. A row's
    result does not depend on the other rows' parameters.
    """
    sampled = _sample_rows(logits_nv, how)
    if (rows := how.untempered) is not None:
        logprobs_mv = torch.log_softmax(logits_nv[rows].float(), dim=-1)
        sampled.tokens[1, rows] = logprobs_mv.gather(-1, sampled.tokens[0, rows].long()[:, None])[:, 0]
    return sampled


def _sample_rows(logits_nv: Tensor, how: RowSampling) -> Sampled:
    kernels, kept_rows, n = native.active(logits_nv), how.kept, len(logits_nv)
    if kept_rows is not None and len(kept_rows.rows) == n:
        tokens_2n = torch.empty(2, n, device=logits_nv.device)
    elif kernels is not None:
        tokens_2n = kernels.sample(logits_nv, how.temperature_n, how.uniform_n)
    else:
        tokens_2n = _sample(logits_nv, how)
    if kept_rows is None:
        return Sampled(tokens_2n)
    if kernels is not None:
        sizes, ids = kernels.sample_kept(logits_nv, how.temperature_n, how.uniform_n, tokens_2n, kept_rows)
    else:
        sizes, ids = _sample_kept(logits_nv, how, kept_rows, tokens_2n)
    return Sampled(tokens_2n, kept_rows, sizes, ids)


def _sample(logits_nv: Tensor, how: RowSampling) -> Tensor:
    logprobs_nv = torch.log_softmax(_scaled(logits_nv, how.temperature_n), dim=-1)
    tokens_n1 = _invert(logprobs_nv.exp().cumsum(-1, dtype=torch.float64), how.uniform_n)
    return torch.cat([tokens_n1, logprobs_nv.gather(-1, tokens_n1)], dim=1).t()


def _scaled(logits_nv: Tensor, temperature_n: Tensor | None) -> Tensor:
    logits_nv = logits_nv.float()
    return logits_nv if temperature_n is None else logits_nv / temperature_n[:, None]


def _invert(cdf_nv: Tensor, uniform_n: Tensor) -> Tensor:
    """Return the first index [n, 1] whose cumulative mass exceeds uniform x total, so never one of zero mass."""
    target_n1 = (uniform_n * cdf_nv[:, -1])[:, None]
    tokens_n1 = torch.searchsorted(cdf_nv, target_n1, right=True)
    return tokens_n1.clamp_(max=cdf_nv.shape[-1] - 1)  # only a row of NaN comes out past the end


def _sample_kept(logits_nv: Tensor, how: RowSampling, kept: KeptRows, out: Tensor) -> tuple[Tensor, Tensor]:
    """Do what `Kernels.sample_kept` does, in plain torch."""
    rows, v = kept.rows, logits_nv.shape[-1]
    whole_mv = _scaled(logits_nv[rows], None if how.temperature_n is None else how.temperature_n[rows])
    logits_mv = whole_mv
    if kept.masks is not None:
        bit_index = torch.arange(32, dtype=torch.int32, device=rows.device)
        allowed_mv = (kept.masks[:, :, None] >> bit_index & 1).bool().flatten(1)[:, :v]
        logits_mv = whole_mv.masked_fill(~allowed_mv, -torch.inf)
    sizes = torch.full_like(rows, -1)
    truncated_rows = (~kept.greedy & ((kept.top_p < 1) | (kept.top_k < v))).nonzero()[:, 0]
    if len(truncated_rows):
        mass_rv = torch.softmax(logits_mv[truncated_rows], dim=-1)
        kept_rv = _most_likely(mass_rv, kept.top_p[truncated_rows], kept.top_k[truncated_rows])
        logits_mv = logits_mv.index_put((truncated_rows,), logits_mv[truncated_rows].masked_fill(~kept_rv, -torch.inf))
        sizes[truncated_rows] = kept_rv.sum(-1)
        ids = kept_rv[sizes[truncated_rows] <= kept.max_kept[truncated_rows]].nonzero()[:, 1].int()
    else:
        ids = torch.empty(0, dtype=torch.int32, device=rows.device)
    logprobs_mv = torch.log_softmax(logits_mv, dim=-1)
    tokens_m1 = _invert(logprobs_mv.exp().cumsum(-1, dtype=torch.float64), how.uniform_n[rows])
    tokens_m1 = torch.where(kept.greedy[:, None], logits_mv.argmax(-1, keepdim=True), tokens_m1)
    over_mv = torch.where(kept.max_kept[:, None] > 0, logprobs_mv, torch.log_softmax(whole_mv, dim=-1))
    out[:, rows] = torch.cat([tokens_m1, over_mv.gather(-1, tokens_m1)], dim=1).t()
    return sizes, ids


def _most_likely(mass_nv: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Mask [n, v] of the fewest of the top_k most likely ids that have top_p of their mass; of equal ids the first."""
    v = mass_nv.shape[-1]
    for width in (min(v, _SORTED), v):  # few distributions have more than the first, and sorting all takes long
        largest_nw = mass_nv.topk(width).values
        ranks_w = torch.arange(width, device=mass_nv.device)
        among_nw = largest_nw.double() * (ranks_w < top_k[:, None])
        mass_n = torch.where(top_k < v, among_nw.sum(-1), mass_nv.sum(-1, dtype=torch.float64))
        taken_nw = (among_nw > 0) & (among_nw.cumsum(-1) - among_nw < (top_p * mass_n)[:, None])
        count_n1 = taken_nw.sum(-1, keepdim=True)
        if bool(((count_n1[:, 0] < width) & ((top_k < width) | (top_k >= v))).all()):
            break
    least_n1 = largest_nw.gather(-1, (count_n1 - 1).clamp_(min=0))  # a row of NaN has none
    more_nv, equal_nv = mass_nv > least_n1, mass_nv == least_n1
    return more_nv | (equal_nv & (equal_nv.cumsum(-1) <= count_n1 - more_nv.sum(-1, keepdim=True)))
