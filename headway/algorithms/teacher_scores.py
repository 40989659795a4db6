"""A teacher's scores of sampled tokens: how they are checked, and stored in the rows beside a rollout's tokens, so that
a replay needs no teacher.

Shapes: l tokens of a sequence, m of these that have scores, k likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from headway.records.generation import PromptLogprobs
from headway.records.tokens import TEACHER, RowLengths, TokenRows

_EXCESS = 1e-3  # nats above 0, and between two values of one token, by rounding in an engine


def score_fault(scores: PromptLogprobs, ids: NDArray[np.int32], scored: NDArray[np.bool_], top: int) -> str:
    """Return why ``scores`` can't be a teacher's of the ``scored`` tokens, [L], of the sequence ``ids``, [L], with the
    ``top`` likeliest ones each; "" if they can."""
    lengths = {len(scores.logprobs), len(scores.top_ids), len(scores.top_logprobs)}
    if lengths != {len(ids)}:
        return f"scores of {min(lengths)} tokens where {len(ids)} were asked for"
    if (k := scores.top_ids.shape[1]) < top:
        return f"{k} likeliest tokens where {top} were asked for"
    logprobs_m, top_ids_mk, top_logprobs_mk = (array[scored] for array in _arrays(scores))
    top_logprobs_mk = top_logprobs_mk.astype(np.float64)
    for name, values in (("log-probability", logprobs_m), ("likeliest token's log-probability", top_logprobs_mk)):
        invalid = ~np.isfinite(values) | (values > _EXCESS)
        if invalid.any():
            return f"{name} {values[invalid][0]}; valid: finite, at most 0"
    if (top_logprobs_mk[:, 1:] > top_logprobs_mk[:, :-1] + _EXCESS).any():
        return "likeliest tokens out of order"
    sorted_ids_mk = np.sort(top_ids_mk, axis=1)
    if (sorted_ids_mk[:, :1] < 0).any() or (sorted_ids_mk[:, 1:] == sorted_ids_mk[:, :-1]).any():
        return "an id that is missing, or twice among a token's likeliest ones"
    is_same_mk = top_ids_mk == ids[scored][:, None]
    deviation = np.where(is_same_mk, np.abs(top_logprobs_mk - logprobs_m[:, None]), 0.0).max(initial=0.0)
    return f"two log-probabilities of a token, {deviation:.3g} nats apart" if deviation > _EXCESS else ""


def score_rows(scores: PromptLogprobs, scored: NDArray[np.bool_]) -> TokenRows:
    """The rows of a sequence's tokens, empty where a token isn't ``scored``, [L]: the bits of its log-probability, then
    its k ids, then the bits of their log-probabilities."""
    columns = scores.logprobs[:, None], scores.top_ids, scores.top_logprobs
    kinds = "<f4", "<i4", "<f4"
    parts = [np.ascontiguousarray(array[scored], kind).view("<u4") for array, kind in zip(columns, kinds, strict=True)]
    table = np.concatenate(parts, axis=1)
    return TokenRows(RowLengths(np.where(scored, table.shape[1], 0)), TokenRows.of(table, 4).data, 4)


def read_scores(token_rows: Mapping[str, TokenRows], tokens: NDArray[np.int64]) -> PromptLogprobs:
    """The stored scores of these ``tokens``, [M], by their index in the rows. Raises ValueError for a token without
    any, and for tokens with different numbers of likeliest ones."""
    lengths_m, values = token_rows.get(TEACHER, TokenRows.empty(int(tokens.max(initial=-1)) + 1)).take(tokens)
    widths = np.unique(lengths_m).tolist() or [1]
    if len(widths) > 1 or not widths[0] % 2:
        raise ValueError(f"teachers' rows of {', '.join(map(str, widths))} numbers: equal, odd ones are needed")
    table, k = np.ascontiguousarray(values.reshape(-1, widths[0]), "<u4"), widths[0] // 2
    return PromptLogprobs(
        version=0,
        logprobs=np.ascontiguousarray(table[:, 0]).view("<f4"),
        top_ids=np.ascontiguousarray(table[:, 1 : 1 + k]).view("<i4"),
        top_logprobs=np.ascontiguousarray(table[:, 1 + k :]).view("<f4"),
    )


def _arrays(scores: PromptLogprobs) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
    return scores.logprobs, scores.top_ids, scores.top_logprobs
