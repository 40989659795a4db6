"""Per-slot state on the host, in NumPy: one row for each slot, so that a step's bookkeeping is a few vector
operations however many requests run.

The running requests hold rows 0 .. n-1; a freed row is refilled or closed by moving the last one into it.
"""

from __future__ import annotations

import numpy as np
import torch

from headway.generator.engines.requests import EngineRequest
from headway.generator.engines.sampling import RowSampling, counter_uniform
from headway.records.tokens import SAMPLED, TokenIds

UNLIMITED = 2**31 - 1
HEADROOM_TOKENS = 8  # free KV tokens for each running request that admitting another must leave


class SlotTable:
    """Rows of the running requests. s = slots, t = context tokens.

    A row's *pending* token is the last of its sequence: its KV is not computed yet; the next step feeds it and
    samples its successor. So ``position[i]`` is both the pending token's place and the number of KV tokens held.
    """

    def __init__(self, slots: int, context_tokens: int) -> None:
        self.requests: list[EngineRequest | None] = [None] * slots
        self.tokens = np.zeros((slots, context_tokens), SAMPLED)  # prompt, then response, whose log-probabilities count
        self.sequence, self.logprobs = self.tokens["id"], self.tokens["logprob"]  # views
        # ``prompt``: its length. ``sent``: tokens of the sequence already in deltas, prompt included. ``limit``: the
        # sequence length at which the request ends with "length". ``update``: `EngineRequest.update`, 0 in a free row.
        self._counts = np.zeros((7, slots), np.int64)
        self.pending, self.position, self.prompt, self.sent, self.limit, self.top_k, self.update = self._counts
        self._flags = np.zeros((2, slots), np.bool_)
        self.greedy, self.truncated = self._flags
        self.limit[:] = UNLIMITED
        self.seed = np.zeros(slots, np.uint64)
        self.temperature = np.ones(slots, np.float32)  # 1 where greedy
        self.top_p = np.ones(slots, np.float64)
        self.stop_ids = np.full((slots, 1), -1, np.int64)  # widened when a request brings more

    def occupy(self, slot: int, request: EngineRequest, context_tokens: int) -> None:
        """Put a request into a free row, its last known token pending."""
        ids = request.prompt + request.response
        how = request.sampling
        request.slot = slot
        self.requests[slot] = request
        self.sequence[slot, : len(ids)] = ids
        self.pending[slot] = ids[-1]
        self.position[slot] = len(ids) - 1
        self.prompt[slot] = len(request.prompt)
        self.sent[slot] = len(ids)
        self.update[slot] = request.update
        self.limit[slot] = min(len(request.prompt) + how.max_tokens, context_tokens)
        self.seed[slot] = how.seed & 0xFFFFFFFFFFFFFFFF
        self.greedy[slot] = how.temperature == 0
        self.temperature[slot] = how.temperature or 1.0
        self.truncated[slot] = how.temperature > 0 and (how.top_p < 1 or how.top_k > 0)
        self.top_p[slot] = how.top_p
        self.top_k[slot] = how.top_k or UNLIMITED
        width = len(how.stop_token_ids)
        if width > self.stop_ids.shape[1]:
            wider = np.full((len(self.requests), width), -1, np.int64)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[slot] = -1
        self.stop_ids[slot, :width] = how.stop_token_ids

    def move(self, source: int, target: int) -> None:
        """Move a row into a free one."""
        request = self.requests[source]
        assert request is not None
        assert self.requests[target] is None
        for column in (*self._counts, *self._flags, self.seed, self.temperature, self.top_p, self.stop_ids):
            column[target] = column[source]
        length = int(self.position[source]) + 1
        self.tokens[target, :length] = self.tokens[source, :length]
        request.slot = target
        self.requests[target] = request
        self.release(source)

    def release(self, slot: int) -> None:
        """Free a row; a fixed-shape step still computes on it, and the result is ignored."""
        request = self.requests[slot]
        self.requests[slot] = None
        if request is not None and request.slot == slot:
            request.slot = -1
        self.pending[slot] = 0
        self.position[slot] = 0
        self.update[slot] = 0
        self.limit[slot] = UNLIMITED
        self._flags[:, slot] = False
        self.temperature[slot] = 1.0
        self.stop_ids[slot] = -1

    def append(self, count: int, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Append one sampled token to each of the first ``count`` rows."""
        rows = np.arange(count)
        self.position[:count] += 1
        place = self.position[:count]
        self.sequence[rows, place] = tokens
        self.logprobs[rows, place] = logprobs
        self.pending[:count] = tokens

    def response_ids(self, slot: int) -> TokenIds:
        return TokenIds(self.sequence[slot, self.prompt[slot] : self.position[slot] + 1])

    def take_unsent(self, slot: int) -> bytes:
        """Return a delta's data of the row's unsent tokens, and mark them sent."""
        first, end = int(self.sent[slot]), int(self.position[slot]) + 1
        self.sent[slot] = end
        return self.tokens[slot, first:end].tobytes()

    def row_sampling(self, rows: int, device: torch.device) -> RowSampling:
        """Sampling parameters of the first ``rows`` rows' next tokens, on ``device``."""
        uniform = counter_uniform(self.seed[:rows], self.position[:rows] + 1 - self.prompt[:rows])
        uniform_n = torch.from_numpy(uniform).to(device)
        temperature = self.temperature[:rows]
        temperature_n = None if (temperature == 1).all() else torch.from_numpy(temperature).to(device)
        greedy = np.flatnonzero(self.greedy[:rows])
        truncated = np.flatnonzero(self.truncated[:rows])
        greedy_rows = torch.from_numpy(greedy).to(device) if len(greedy) else None
        if not len(truncated):
            return RowSampling(uniform_n, temperature_n, greedy_rows)
        return RowSampling(
            uniform_n,
            temperature_n,
            greedy_rows,
            torch.from_numpy(truncated).to(device),
            torch.from_numpy(self.top_p[truncated]).to(device),
            torch.from_numpy(self.top_k[truncated]).to(device),
        )
