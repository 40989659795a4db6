"""A request inside an engine, and the check that it is valid."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from headway.records.generation import LOWEST_TEMPERATURE, FinishReason, GenerationRequest
from headway.records.tokens import EXPERTS, KEPT, RowBytes, RowLengths, TokenIds, TokenRows, pixels_of
from headway.tokens.grammar import Matcher
from headway.tokens.tokenizer import IncrementalDecoder, Tokenizer


class EngineRequest:
    """A request inside an engine: *waiting* -> *running* (holds a slot) -> finished; preempted, it waits again.

    In the torch engine a running request's tokens are in its slot's row of the ``SlotTable``; ``response`` has them
    only while it waits. Invariant there: slot >= 0 exactly while it runs.
    """

    def __init__(self, request: GenerationRequest, arrival: int) -> None:
        self.request_id = request.request_id
        self.prompt = TokenIds(request.prompt_ids)
        self.sampling = request.sampling
        self.priority = request.priority
        self.interruptible = request.interruptible
        self.arrival = arrival
        self.response = TokenIds(request.partial.ids)
        self.pixels = pixels_of(request.partial.token_rows)  # content hash of its pictures' pixel arrays; "": none
        self.shift = 0  # of positions behind them
        self.slot = -1
        self.adapter = request.adapter
        self.update = -1  # number of the update whose weights it is sampled from; -1: the newest, once it runs
        self.prefix_update = -1  # number of the update whose weights computed the KV of the whole prompt
        # Tokens whose experts its caller has.
        self.rows = request.rows_known + len(request.partial.token_rows.get(EXPERTS, ()))
        # Tokens whose kept sets its caller has, and the sets of the tokens sampled since.
        self.kept_rows = request.rows_known + len(request.partial.token_rows.get(KEPT, ()))
        self.kept: list[NDArray[np.int32]] = []
        self.matcher: Matcher | None = None  # its state in its grammar, once that is compiled
        self.exhausted = 0  # how often that grammar's states were exhausted
        self.reprefilled = False  # the KV of sampled tokens was recomputed since the last delta
        self.stop_strings: IncrementalDecoder | None = None

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: requests are served in ascending order, preempted in descending order."""
        return (self.priority, self.arrival)

    def __lt__(self, other: EngineRequest) -> bool:
        return self.order < other.order

    @property
    def tokens(self) -> int:
        """KV tokens that the request needs to start: prompt and response so far."""
        return len(self.prompt) + len(self.response)

    @property
    def truncated(self) -> bool:
        """Whether top-p or top-k restrict what is sampled."""
        sampling = self.sampling
        return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)

    @property
    def restricted(self) -> bool:
        """Whether top-p, top-k or a grammar restrict what is sampled, or its log-probabilities aren't the sampler's."""
        return self.truncated or bool(self.sampling.grammar) or self.untempered

    @property
    def untempered(self) -> bool:
        """Whether its temperature isn't that of its log-probabilities."""
        return self.sampling.untempered and self.sampling.temperature not in (0, 1)

    def take_kept(self, tokens: int, item_bytes: int) -> dict[str, TokenRows]:
        """Return the rows of kept sets that its caller lacks, of a sequence of ``tokens`` tokens; {} if none."""
        if not self.kept:
            return {}
        set_lengths = np.zeros(tokens - self.kept_rows, RowLengths.dtype)  # 0 for tokens that the request came with
        set_lengths[len(set_lengths) - len(self.kept) :] = [len(ids) for ids in self.kept]
        id_bytes = np.concatenate(self.kept).astype(f"<u{item_bytes}").view(RowBytes.dtype)
        self.kept, self.kept_rows = [], tokens
        return {KEPT: TokenRows(RowLengths.view(set_lengths), RowBytes.view(id_bytes), item_bytes)}

    def already_ended(self, tokenizer: Tokenizer | None, context_tokens: int) -> FinishReason | None:
        """Return the finish reason of a resumed request with nothing left to sample, else None. Sets up its stop
        strings."""
        response, sampling = self.response, self.sampling
        if sampling.stop and tokenizer is not None:
            self.stop_strings = IncrementalDecoder(tokenizer, sampling.stop)
            for token in response:
                if self.stop_strings.push(token):
                    return "stop"
        if response and response[-1] in sampling.stop_token_ids:
            return "stop"
        if len(response) >= sampling.max_tokens or self.tokens >= context_tokens:
            return "length"
        return None


def refusal(request: GenerationRequest, context_tokens: int, vocabulary: int, tokenizer: Tokenizer | None) -> str:
    """Return why no engine can serve this request, or "" if valid."""
    sampling = request.sampling
    prompt_ids, partial_ids = TokenIds(request.prompt_ids), TokenIds(request.partial.ids)
    if not prompt_ids:
        return "the prompt is empty"
    if len(prompt_ids) >= context_tokens:
        return f"prompt of {len(prompt_ids)} tokens fills the context of {context_tokens}"
    for sequence_name, ids in (("prompt", prompt_ids), ("partial", partial_ids)):
        if ids and not (ids.array.min() >= 0 and ids.array.max() < vocabulary):
            return f"{sequence_name} has a token id outside 0..{vocabulary - 1}"
    if sampling.temperature != 0 and not LOWEST_TEMPERATURE <= sampling.temperature < math.inf:
        return f"temperature = {sampling.temperature}: must be 0, or finite and >= {LOWEST_TEMPERATURE}"
    if not 0 < sampling.top_p <= 1:
        return f"top_p = {sampling.top_p}: must be in (0, 1]"
    if sampling.top_k < 0:
        return f"top_k = {sampling.top_k}: must be >= 0"
    if sampling.max_tokens < 1:
        return f"max_tokens = {sampling.max_tokens}: must be >= 1"
    if sampling.kept_sets < 0:
        return f"kept_sets = {sampling.kept_sets}: must be >= 0"
    if (sampling.stop or sampling.grammar) and tokenizer is None:
        return f"{'stop strings' if sampling.stop else 'grammars'} need a tokenizer"
    return ""
