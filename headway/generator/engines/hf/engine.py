"""The plain engine: any model that transformers loads, sampled from by its own forward pass and its own cache.

One ``step`` samples one token for every running request. Between steps requests come and go and the weights may
change (DESIGN rule 4). Correct before fast: where Headway has a decoder of its own, the torch engine is the faster one.
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch
from torch import Tensor

from headway.generator.engines.hf.adapters import HfRevisions
from headway.generator.engines.hf.caches import join, take, tensors_of
from headway.generator.engines.hf.runner import HfRunner
from headway.generator.engines.requests import EngineRequest
from headway.generator.engines.sampling import sample_tokens
from headway.generator.engines.torch.memory import EngineMemory
from headway.generator.engines.torch.slot_engine import SlotEngine, SlotOptions
from headway.generator.engines.torch.slot_table import HEADROOM_TOKENS
from headway.models.hf.model import HfModel
from headway.models.hf.pixels import Pixels, PixelStore
from headway.records.errors import BufferCorrupt
from headway.records.generation import POLICY_ADAPTER, EngineStatistics, Probe, ProbeScores
from headway.records.tokens import TokenIds

if TYPE_CHECKING:
    from headway.models.hf.adapter import HfAdapter


@dataclass
class _Batch:
    """Requests that are computed in one forward pass, with one revision of the adapter. ``cache`` has all tokens of
    each but the pending one; None: nothing is computed yet."""

    requests: list[EngineRequest | None]  # by row; None: it ended or was preempted
    cache: Any = None

    @property
    def running(self) -> list[EngineRequest]:
        return [request for request in self.requests if request is not None]


class HfEngine(SlotEngine[HfRevisions]):
    """Generates with an `HfModel`. The engine owns the model: its weights change only by ``apply`` and
    ``update_weights``.

    ``submit`` queues requests; each ``step`` admits waiting ones (lowest priority number first, then oldest), and
    feeds the model what isn't in its cache: of a new request all tokens, of the others the last one. Requests with
    equal tokens are computed once. Then batches are joined as far as the model allows (`HfRunner.batching`).

    A step begins requests of at most ``prefill_tokens_per_step`` tokens, but always one. When the running requests
    would need more than ``kv_capacity_tokens``, the youngest is preempted: it waits with its tokens, and its KV is
    recomputed later. After an update with "recompute" the next step computes all tokens again.

    ``deterministic``: every row is computed alone, so its result does not depend on its neighbours.
    """

    def __init__(
        self,
        model: HfModel,
        *,
        adapters: Mapping[str, HfAdapter] | None = None,
        pixels: PixelStore | None = None,
        **options: Unpack[SlotOptions],
    ) -> None:
        """``model`` is changed in place by updates; ``adapters``: by name, at most one; the engine owns it,
        at ``version``; ``pixels``: the store of pictures' pixel arrays."""
        super().__init__(model, **options)
        self._runner = HfRunner(model, self._deterministic)
        self._pixels, self.sees = pixels, model.takes_pictures and pixels is not None
        self._batches: list[_Batch] = []
        self.adapters = HfRevisions(adapters or {}, self.version)
        self.memory = EngineMemory(self._subscriber, self._tensors)

    @property
    def batching(self) -> str:
        """The rule by which rows are computed together: see `HfRunner`."""
        return self._runner.batching

    # --- requests -------------------------------------------------------------------------------------------

    def _refusal(self, entry: EngineRequest) -> str:
        try:
            self._pictures(entry)
        except BufferCorrupt as error:
            return str(error)
        return super()._refusal(entry)

    def _pictures(self, entry: EngineRequest | Probe) -> Pixels:
        """The pixel arrays of a prompt's pictures. Raises BufferCorrupt."""
        return self._pixels.read(entry.pixels) if entry.pixels and self._pixels is not None else {}

    # --- one step -------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> bool:
        """See `Engine.step`."""
        self._take_compiled(idle=not self._rows and not self._waiting)
        self._preempt_to_fit()
        self._admit()
        n, table = self._rows, self._table
        if n == 0:
            return bool(self._compiling)
        started_s = self._now()
        self._batches, logits = self._compute()
        slots = torch.tensor([request.slot for batch in self._batches for request in batch.running])
        logits_nv = torch.empty_like(logits).index_copy_(0, slots.to(logits.device), logits)
        sampling, errors = table.row_sampling(n, logits_nv.device)
        sampled = sample_tokens(logits_nv, sampling).host()
        for request, reason, error, at_fault, recompile in table.advance(slice(n), sampled, errors):
            if recompile:
                self._recompile_grammar(request)
            else:
                self._end_running(request, reason, error, refused=at_fault)
        self._steps += 1
        self._generated += n
        self._busy_s += self._now() - started_s
        self._note_idleness()
        return True

    def _admit(self) -> None:
        """Give free slots to waiting requests while KV tokens and this step's budget of new tokens last."""
        row_tokens, budget_tokens = (self._table.position[: self._rows] + 1).tolist(), self._prefill_tokens_per_step
        begun_keys: set[tuple[int, Sequence[int], str]] = set()
        admitted: list[EngineRequest | None] = []
        while self._rows < self.slots and self._waiting:
            request = self._waiting[0]
            needed_tokens = self._held_tokens([*row_tokens, request.tokens]) + self._rows * HEADROOM_TOKENS
            if self._scarce and self._rows and needed_tokens > self.kv_capacity_tokens:
                break
            update = self._update_of(request)
            prompt_key = (update, request.prompt + request.response, request.pixels)
            if prompt_key not in begun_keys:
                if begun_keys and request.tokens > budget_tokens:
                    break
                budget_tokens -= request.tokens
                begun_keys.add(prompt_key)
            heapq.heappop(self._waiting)
            request.update = update
            request.reprefilled = request.reprefilled or bool(request.response)
            self._table.occupy(self._rows, request, self.context_tokens)
            self._rows += 1
            row_tokens.append(request.tokens)
            admitted.append(request)
        if admitted:
            self._batches.append(_Batch(admitted))

    def _compute(self) -> tuple[list[_Batch], Tensor]:
        """Feed the model every row's tokens that it hasn't seen. Returns the batches with their new caches, and the
        logits after them [n, v], in the batches' order."""
        table, batches, logits_by_batch = self._table, list[_Batch](), list[Tensor]()
        for batch in self._joined_batches():
            running = batch.running
            slots = [request.slot for request in running]
            pending_ids, position = torch.from_numpy(table.pending[slots, None]), table.position[slots]
            shifted = self._runner.shifted_positions(position, [request.shift for request in running])
            with self.adapters.computing(running[0].update):
                batch_logits, batch.cache = self._runner.feed(pending_ids, batch.cache, position.tolist(), shifted)
            batches.append(batch)
            logits_by_batch.append(batch_logits)
        for ids_uk, requests_by_row in self._uncomputed():
            pictures = self._pictures(requests_by_row[0][0])
            picture_arguments = self._runner.beside(ids_uk, pictures)
            with self.adapters.computing(requests_by_row[0][0].update):
                batch_logits, cache = self._runner.feed(ids_uk, None, [0] * len(ids_uk), picture_arguments)
            self._prefilled += ids_uk[:, :-1].numel()
            row_n = [row for row, requests in enumerate(requests_by_row) for _ in requests]
            requests = [request for requests in requests_by_row for request in requests]
            for request in requests:
                request.shift = self._runner.model.position_shift if pictures else 0
            logits_by_batch.append(batch_logits[row_n])
            if self.batching == "single rows":  # of equal tokens
                batches += [
                    _Batch([req], copy.deepcopy(cache) if number else cache) for number, req in enumerate(requests)
                ]
            else:
                batch_cache = cache if len(ids_uk) == len(row_n) else take(cache, row_n, ids_uk.shape[1])
                batches.append(_Batch(list(requests), batch_cache))
        return batches, self._runner.model.sampled(torch.cat(logits_by_batch))

    def _joined_batches(self) -> Iterator[_Batch]:
        """Yield the batches that have a cache, without ended rows, joined as far as the model allows."""
        batches_by_key: dict[object, list[_Batch]] = {}
        for batch in self._batches:
            rows = [row for row, request in enumerate(batch.requests) if request is not None]
            if batch.cache is None:
                continue
            running, position = batch.running, self._table.position
            if len(rows) < len(batch.requests):
                longest_tokens = max(int(position[request.slot]) for request in running)
                batch = _Batch(list(running), take(batch.cache, rows, longest_tokens))
            key_by_batching = {"padded": 0, "equal lengths": position[running[0].slot], "single rows": id(batch)}
            batches_by_key.setdefault((running[0].update, key_by_batching[self.batching]), []).append(batch)
        for batches in batches_by_key.values():
            cache = batches[0].cache if len(batches) == 1 else join([batch.cache for batch in batches])
            yield _Batch([request for batch in batches for request in batch.requests], cache)

    def _uncomputed(self) -> Iterator[tuple[Tensor, list[list[EngineRequest]]]]:
        """Yield (tokens [u, k], requests of each row) of requests without computed tokens, as many at once as one step
        may begin. Rows with pictures are fed one by one."""
        groups: dict[tuple[int, int, str], dict[bytes, list[EngineRequest]]] = {}  # by update and pictures as well
        for batch in self._batches:
            for request in batch.running if batch.cache is None else ():
                ids = self._table.sequence[request.slot, : self._table.position[request.slot] + 1]
                requests_by_ids = groups.setdefault((request.update, len(ids), request.pixels), {})
                requests_by_ids.setdefault(ids.tobytes(), []).append(request)
        for (_, length, pixels), requests_by_ids in groups.items():
            limit = 1 if pixels or self.batching == "single rows" else max(1, self._prefill_tokens_per_step // length)
            requests_by_row = list(requests_by_ids.values())
            for first in range(0, len(requests_by_row), limit):
                row_chunk = requests_by_row[first : first + limit]
                slots = [requests[0].slot for requests in row_chunk]
                yield torch.from_numpy(self._table.sequence[slots, :length].astype(np.int64)), row_chunk

    # --- endings --------------------------------------------------------------------------------------------

    def _release_row(self, request: EngineRequest) -> None:
        """Free a request's row; the last row is moved into it."""
        slot, last_row = request.slot, self._rows - 1
        self._table.release(slot)
        if slot != last_row:
            self._table.move(last_row, slot)
        self._rows = last_row
        for batch in self._batches:
            if request in batch.requests:
                batch.requests[batch.requests.index(request)] = None
        self._batches = [batch for batch in self._batches if batch.running]  # the others' caches are free

    # --- weights --------------------------------------------------------------------------------------------

    def _register(self, name: str, tensors: Mapping[str, Tensor], version: int) -> None:
        self.adapters.register(name, tensors, version)

    def _recompute(self, running: Sequence[EngineRequest]) -> int:
        self._batches = [batch for batch in self._batches if batch.running[0] not in running]
        if running:
            self._batches.append(_Batch(list(running)))
        for request in running:
            request.reprefilled = request.reprefilled or self._table.position[request.slot] > 0
        return sum(int(self._table.position[request.slot]) for request in running)

    # --- memory, statistics ---------------------------------------------------------------------------------

    def _held_tokens(self, tokens: list[int]) -> int:
        """Count the KV tokens in the caches of rows with these numbers of tokens, padding included."""
        return len(tokens) * max(tokens, default=0) if self.batching == "padded" else sum(tokens)

    def _overfull(self) -> bool:
        return self._held_tokens((self._table.position[: self._rows] + 1).tolist()) > self.kv_capacity_tokens

    def _tensors(self) -> Iterator[Tensor]:
        yield from self._model.parameters()
        yield from self._model.buffers()
        yield from self.adapters.tensors()
        for batch in self._batches:
            yield from tensors_of(batch.cache)

    def _prompt_logits(self, ids: TokenIds, adapter: str) -> Callable[[int, int], Tensor]:
        ids_1l, cache = torch.from_numpy(ids.array.astype(np.int64))[None], None

        def compute(start: int, end: int) -> Tensor:
            nonlocal cache
            revision = self.adapters.newest(adapter)
            with self.adapters.computing(0 if revision is None else revision.update):
                former_cache = cache if start else None
                logits_nv, cache = self._runner.feed_all(ids_1l[:, start:end], former_cache, [start])
            return self._runner.model.sampled(logits_nv)

        return compute

    def score(self, probe: Probe) -> ProbeScores:
        """See `Engine.score`. Raises BufferCorrupt if the stored pixels of the probe's pictures can't be read."""
        newest_revision = self.adapters.newest(POLICY_ADAPTER)
        with self.adapters.computing(0 if newest_revision is None else newest_revision.update):
            return self._runner.score(probe, self._pictures(probe))

    def statistics(self) -> EngineStatistics:
        """See `Engine.statistics`."""
        held_tokens = self._held_tokens(self._table.position[: self._rows].tolist())
        return self._statistics(self._rows, held_tokens, self.kv_capacity_tokens)
