"""Log-probabilities of given tokens, computed in chunks between an engine's steps.

Shapes: l tokens of the prompt, n of a chunk, v vocabulary, k likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np
import torch
from torch import Tensor

from headway.records.errors import ConfigurationError
from headway.records.generation import PromptLogprobs
from headway.records.tokens import TokenIds

_LOGITS = 1 << 25  # that a chunk computes at most


class PromptPass:
    """A forward pass over given tokens, with a KV cache of its own.

    Lifecycle: `advance`, once between two steps, until it returns the log-probabilities. When the weights change
    meanwhile it begins again, so that one version computes all of them.
    """

    def __init__(
        self,
        ids: TokenIds,
        top: int,
        vocabulary: int,
        chunk_tokens: int,
        weights: Callable[[], tuple[int, Hashable]],
        logits: Callable[[int, int], Tensor],
    ) -> None:
        """``top``: likeliest tokens in each one's place. ``chunk_tokens``: computed between two steps at most.
        ``weights()``: the version of the newest weights, and what identifies them. ``logits(start, end)``: computes
        these tokens on what the calls before have computed, from 0 anew; the logits [n, v] after each."""
        self._ids, self._top = ids, top
        self._present_weights, self._logits = weights, logits
        self._chunk_tokens = max(1, min(chunk_tokens, _LOGITS // vocabulary))
        self.targets_lt: np.ndarray | None = None  # ids to be scored in each token's place, -1: none
        self._weights: Hashable = None  # with which the computed tokens were computed
        self._computed = 0  # tokens
        self._chunks: list[tuple[np.ndarray, ...]] = []
        self._last_v: Tensor | None = None  # log-probabilities in the place of the next token

    @torch.inference_mode()
    def advance(self) -> PromptLogprobs | None:
        """Compute the next chunk. Returns the log-probabilities after the last one."""
        version, weights = self._present_weights()
        if weights != self._weights:
            self._weights, self._computed, self._last_v = weights, 0, None
            self._chunks = []
        start, end = self._computed, min(len(self._ids), self._computed + self._chunk_tokens)
        logprobs_nv = torch.log_softmax(self._logits(start, end).float(), dim=-1)
        if self._last_v is None:
            self._last_v = torch.full_like(logprobs_nv[0], torch.nan)
        before_nv = torch.cat([self._last_v[None], logprobs_nv[:-1]])
        self._last_v, self._computed = logprobs_nv[-1].clone(), end
        self._chunks.append(self._chosen(before_nv, start, end))
        if end < len(self._ids):
            return None
        logprobs_l, ids_lk, top_lk, *targets_lt = (np.concatenate(parts) for parts in zip(*self._chunks, strict=True))
        return PromptLogprobs(
            version=version,
            logprobs=logprobs_l,
            top_ids=ids_lk,
            top_logprobs=top_lk,
            target_logprobs=targets_lt[0] if targets_lt else None,
        )

    def _chosen(self, logprobs_nv: Tensor, start: int, end: int) -> tuple[np.ndarray, ...]:
        ids_n = torch.from_numpy(self._ids.array[start:end].astype(np.int64)).to(logprobs_nv.device)
        chosen_n = logprobs_nv.gather(1, ids_n[:, None])[:, 0]
        top_logprobs_nk, top_ids_nk = logprobs_nv.topk(self._top, dim=1)
        if start == 0:
            top_ids_nk[0] = -1
        chosen = chosen_n.cpu().numpy(), top_ids_nk.int().cpu().numpy(), top_logprobs_nk.cpu().numpy()
        if self.targets_lt is None:
            return chosen
        targets_nt = torch.from_numpy(self.targets_lt[start:end].astype(np.int64)).to(logprobs_nv.device)
        scores_nt = logprobs_nv.gather(1, targets_nt.clamp(min=0)).masked_fill(targets_nt < 0, torch.nan)
        return (*chosen, scores_nt.cpu().numpy())


def require_prompt(ids: TokenIds, top: int, context_tokens: int, vocabulary: int) -> None:
    """Raise ConfigurationError for a prompt that no engine can compute."""
    reason = ""
    if not 1 <= len(ids) <= context_tokens:
        reason = f"{len(ids)} tokens; valid: 1 to {context_tokens}, the context"
    elif ids.array.min() < 0 or ids.array.max() >= vocabulary:
        reason = f"a token id outside 0..{vocabulary - 1}"
    elif not 0 <= top <= vocabulary:
        reason = f"the {top} likeliest tokens of {vocabulary}; valid: 0 to {vocabulary}"
    if reason:
        raise ConfigurationError(f"prompt: {reason}")
