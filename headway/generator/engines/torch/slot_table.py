"""Per-slot state on the host, in NumPy: one row for each slot, so that a step's bookkeeping is a few vector
operations however many requests run.

The running requests hold rows 0 .. n-1; the last one is moved into a freed row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from headway.generator.engines.requests import EngineRequest
from headway.generator.engines.sampling import HostSample, KeptRows, RowSampling, counter_uniform
from headway.records.generation import FinishReason
from headway.records.tokens import SAMPLED, TokenIds, TokenRows
from headway.tokens.grammar import GrammarExhausted, GrammarRefused, Matcher, fill_masks

UNLIMITED = 2**31 - 1
HEADROOM_TOKENS = 8  # free KV tokens for each running request that admitting another must leave
_ALL = np.uint32(0xFFFFFFFF)


class Ending(NamedTuple):
    """The ending of a request in a step, and its reason."""

    request: EngineRequest
    reason: FinishReason
    error: str = ""
    refused: bool = False
    again: bool = False  # it doesn't end: its grammar's states were exhausted, and a new matcher must follow it

    @staticmethod
    def by_grammar(request: EngineRequest, error: GrammarRefused) -> Ending:
        """Make the ending of a request whose grammar allows no token, or doesn't accept the last one."""
        shares_states = request.matcher is not None and not request.matcher.exclusive
        recompile = shares_states and isinstance(error, GrammarExhausted)
        return Ending(request, "error", str(error), refused=True, again=recompile)


class SlotTable:
    """Rows of the running requests. s = slots, t = context tokens.

    A row's *pending* token is the last of its sequence: its KV is not computed yet; the next step feeds it and
    samples its successor. So ``position[i]`` is both the pending token's place and the number of KV tokens held.
    """

    def __init__(self, slots: int, context_tokens: int, vocabulary: int) -> None:
        self.id_bytes = 2 if vocabulary <= 1 << 16 else 4  # of an id in a row of kept ones
        self.requests: list[EngineRequest | None] = [None] * slots
        self.tokens = np.zeros((slots, context_tokens), SAMPLED)  # prompt, then response, whose log-probabilities count
        self.sequence, self.logprobs = self.tokens["id"], self.tokens["logprob"]  # views
        # ``prompt``: its length. ``sent``: tokens of the sequence already in deltas, prompt included. ``limit``: the
        # sequence length at which the request ends with "length". ``update``: `EngineRequest.update`, 0 in a free row.
        # ``kept``: `SamplingParameters.kept_sets`. ``source``: the row of the last launched step in which this row's
        # token is sampled; -1: there is none whose token isn't read yet.
        self._counts = counts = np.zeros((9, slots), np.int64)
        self.pending, self.position, self.prompt, self.sent, self.limit, self.top_k, self.update, self.kept = counts[:8]
        self.source = counts[8]
        self.source[:] = -1
        self._flags = np.zeros((3, slots), np.bool_)
        self.greedy, self.truncated, self.matched = self._flags
        self._slots = np.arange(slots)
        self._watched: set[EngineRequest] = set()  # those with stop strings or a grammar
        self.limit[:] = UNLIMITED
        self.seed = np.zeros(slots, np.uint64)
        self.temperature = np.ones(slots, np.float32)  # 1 where greedy
        self.top_p = np.ones(slots, np.float64)
        self.untempered = np.zeros(slots, np.bool_)  # tempered, and log-probabilities as at temperature 1
        self.stop_ids = np.full((slots, 1), -1, np.int64)  # widened when a request brings more

    def occupy(self, slot: int, request: EngineRequest, context_tokens: int) -> None:
        """Put a request into a free row, its last known token pending."""
        token_ids = request.prompt + request.response
        sampling = request.sampling
        request.slot = slot
        self.requests[slot] = request
        self.sequence[slot, : len(token_ids)] = token_ids
        self.pending[slot] = token_ids[-1]
        self.position[slot] = len(token_ids) - 1
        self.prompt[slot] = len(request.prompt)
        self.sent[slot] = len(token_ids)
        self.update[slot] = request.update
        self.limit[slot] = min(len(request.prompt) + sampling.max_tokens, context_tokens)
        self.seed[slot] = sampling.seed & 0xFFFFFFFFFFFFFFFF
        self.greedy[slot] = sampling.temperature == 0
        self.temperature[slot] = sampling.temperature or 1.0
        self.truncated[slot] = request.truncated
        self.matched[slot] = request.matcher is not None
        self.top_p[slot] = sampling.top_p if request.truncated else 1.0
        self.top_k[slot] = (request.truncated and sampling.top_k) or UNLIMITED
        self.kept[slot] = sampling.kept_sets
        self.untempered[slot] = request.untempered
        if request.matcher is not None or request.stop_strings is not None:
            self._watched.add(request)
        stop_count = len(sampling.stop_token_ids)
        if stop_count > self.stop_ids.shape[1]:
            wider_stop_ids = np.full((len(self.requests), stop_count), -1, np.int64)
            wider_stop_ids[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider_stop_ids
        self.stop_ids[slot] = -1
        self.stop_ids[slot, :stop_count] = sampling.stop_token_ids

    def move(self, source: int, target: int) -> None:
        """Move a row into a free one."""
        request = self.requests[source]
        assert request is not None
        assert self.requests[target] is None
        for column in (
            *self._counts,
            *self._flags,
            self.seed,
            self.temperature,
            self.top_p,
            self.stop_ids,
            self.untempered,
        ):
            column[target] = column[source]
        token_count = int(self.position[source]) + 1
        self.tokens[target, :token_count] = self.tokens[source, :token_count]
        request.slot = target
        self.requests[target] = request
        self.release(source)

    def release(self, slot: int) -> None:
        """Free a row; a fixed-shape step still computes on it, and the result is ignored."""
        request = self.requests[slot]
        self.requests[slot] = None
        if request is not None and request.slot == slot:
            request.slot = -1
            self._watched.discard(request)
        self.pending[slot] = 0
        self.source[slot] = -1
        self.position[slot] = 0
        self.update[slot] = 0
        self.limit[slot] = UNLIMITED
        self._flags[:, slot] = False
        self.temperature[slot] = 1.0
        self.untempered[slot] = False
        self.stop_ids[slot] = -1

    def next_position(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the position of each of the first ``count`` rows' next token to decode, and which rows have one: not
        those whose last token is being sampled."""
        sampling, position = self.source[:count] >= 0, self.position[:count]
        active = ~sampling | (position + 2 < self.limit[:count])
        return position + (sampling & active), active

    def launch(self, active_n: np.ndarray) -> np.ndarray:
        """Note that a step of the first n rows was launched, in which the active ones sample; returns their `source` in
        the step before."""
        last_source_n = self.source[: len(active_n)].copy()
        self.source[: len(active_n)] = np.where(active_n, np.arange(len(active_n)), -1)
        return last_source_n

    def response_ids(self, slot: int) -> TokenIds:
        return TokenIds(self.sequence[slot, self.prompt[slot] : self.position[slot] + 1])

    def take_unsent(self, request: EngineRequest) -> tuple[bytes, dict[str, TokenRows]]:
        """Return a delta's data of a request's unsent tokens, and its kept sets, and mark them sent."""
        if (slot := request.slot) < 0:
            return b"", {}
        first_token, end_token = int(self.sent[slot]), int(self.position[slot]) + 1
        self.sent[slot] = end_token
        return self.tokens[slot, first_token:end_token].tobytes(), request.take_kept(end_token, self.id_bytes)

    def row_sampling(self, rows: int, device: torch.device) -> tuple[RowSampling, dict[EngineRequest, GrammarRefused]]:
        """Return the sampling parameters of the first ``rows`` rows' next tokens, on ``device``, and the requests whose
        grammars allow no token: the samples of these are meaningless."""
        uniform = counter_uniform(self.seed[:rows], self.position[:rows] + 1 - self.prompt[:rows])
        uniform_n = torch.from_numpy(uniform).to(device)
        temperature = self.temperature[:rows]
        temperature_n = None if (temperature == 1).all() else torch.from_numpy(temperature).to(device)
        restricted_rows = np.flatnonzero(self._flags[:, :rows].any(0))
        untempered_rows = np.flatnonzero(self.untempered[:rows])
        untempered = torch.from_numpy(untempered_rows).to(device) if len(untempered_rows) else None
        if not len(restricted_rows):
            return RowSampling(uniform_n, temperature_n, None, untempered), {}
        grammar_masks, grammar_errors = self._masks(restricted_rows)
        kept_rows = KeptRows(
            rows=torch.from_numpy(restricted_rows).to(device),
            greedy=torch.from_numpy(self.greedy[restricted_rows]).to(device),
            top_p=torch.from_numpy(self.top_p[restricted_rows]).to(device),
            top_k=torch.from_numpy(self.top_k[restricted_rows]).to(device),
            max_kept=torch.from_numpy(self.kept[restricted_rows]).to(device),
            masks=None if grammar_masks is None else torch.from_numpy(grammar_masks.view(np.int32)).to(device),
        )
        return RowSampling(uniform_n, temperature_n, kept_rows, untempered), grammar_errors

    def _masks(self, which: np.ndarray) -> tuple[np.ndarray | None, dict[EngineRequest, GrammarRefused]]:
        if not (matched_rows := np.flatnonzero(self.matched[which])).size:
            return None, {}
        matchers_with_rows: list[tuple[Matcher, int]] = []
        request_by_row: dict[int, EngineRequest] = {}
        for row, slot in zip(matched_rows.tolist(), which[matched_rows].tolist(), strict=True):
            if (request := self.requests[slot]) is not None and request.matcher is not None:
                matchers_with_rows.append((request.matcher, row))
                request_by_row[row] = request
        masks = np.full((len(which), matchers_with_rows[0][0].words), _ALL)
        error_by_row = fill_masks(matchers_with_rows, masks)
        return masks, {request_by_row[row]: error for row, error in error_by_row.items()}

    def advance(
        self,
        rows: slice | np.ndarray,
        sampled: HostSample,
        refused: dict[EngineRequest, GrammarRefused],
    ) -> list[Ending]:
        """Append its token to each of ``rows``, and return the endings; the token of a request with an error, or to be
        followed ``again``, is dropped. ``sampled``: of `Sampled.host`. ``refused``: of `row_sampling`."""
        (tokens, logprobs, kept_by_slot), ending_by_request = sampled, dict[EngineRequest, Ending]()
        slots = self._slots[rows]
        tokens, logprobs = tokens[: len(slots)], logprobs[: len(slots)]
        self.position[rows] += 1
        positions = self.position[rows]
        self.sequence[slots, positions] = tokens
        self.logprobs[slots, positions] = logprobs
        self.pending[rows] = tokens
        stopped_slots = set(slots[(self.stop_ids[rows] == tokens[:, None]).any(1)].tolist())
        for request, error in refused.items():
            ending_by_request[request] = Ending.by_grammar(request, error)
        for slot in slots[~np.isfinite(logprobs)].tolist():
            if (request := self.requests[slot]) is not None and request not in ending_by_request:
                ending_by_request[request] = Ending(request, "error", "the model's output is not finite")
        token_by_slot = dict(zip(slots.tolist(), tokens.tolist(), strict=True)) if self._watched else {}
        for request in self._watched:
            if request in ending_by_request or (token := token_by_slot.get(request.slot)) is None:
                continue
            try:
                if request.matcher is not None and request.matcher.advance(token):
                    stopped_slots.add(request.slot)
            except GrammarRefused as error:  # of its limits: the token is one of the mask's
                ending_by_request[request] = Ending.by_grammar(request, error)
                continue
            if request.stop_strings is not None and request.stop_strings.push(token):
                stopped_slots.add(request.slot)
        for slot, kept_ids in kept_by_slot.items():
            if (request := self.requests[slot]) is None or request in ending_by_request:
                continue
            if isinstance(kept_ids, int):
                reason = f"kept_sets = {request.sampling.kept_sets}: top_p and top_k keep {kept_ids} ids of a token"
                ending_by_request[request] = Ending(request, "error", reason, refused=True)
            else:
                request.kept.append(kept_ids)
        for request in ending_by_request:
            self.position[request.slot] -= 1
        for slot in sorted(stopped_slots.union(slots[self.position[rows] + 1 >= self.limit[rows]].tolist())):
            if (request := self.requests[slot]) is not None and request not in ending_by_request:
                ending_by_request[request] = Ending(request, "stop" if slot in stopped_slots else "length")
        return list(ending_by_request.values())
