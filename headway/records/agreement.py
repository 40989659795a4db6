"""Records of the agreement check: what trainer and engine make of the same tokens."""

from __future__ import annotations

import msgspec
import numpy as np

PROBE_TOKENS = 32
_GOLDEN = 0x9E3779B97F4A7C15


class PathScores(msgspec.Struct, frozen=True, kw_only=True):
    """The probe's tokens by one way of computing them. L layers, N tokens, P projections."""

    logprobs: np.ndarray  # [N - 1] float32: of each token but the first, at temperature 1
    hidden: np.ndarray | None = None  # [L + 1, N, P] float32: see `models.hidden_states`; None: not to be had


class ProbeScores(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of one sequence of tokens by a trainer or an engine, by every way in which it may compute them."""

    ids: tuple[int, ...]  # the N tokens
    precision: str  # of the arithmetic or the weights, whichever is coarser: a key of `control.agreement.LIMITS`
    mixture: bool = False  # whether routers choose experts: a trainer says so
    paths: dict[str, PathScores]  # trainer: alone, packed; engine: prefill, and decode where it can be forced


def probe_ids(seed: int, vocabulary: int, context_tokens: int) -> tuple[int, ...]:
    """Return random token ids, equal for equal arguments on every machine; the context has room for one more."""
    tokens = max(2, min(PROBE_TOKENS, context_tokens - 1))
    bits = np.random.Philox(key=[_GOLDEN, seed]).random_raw(tokens)
    return tuple((bits % np.uint64(vocabulary)).tolist())
