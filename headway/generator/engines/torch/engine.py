"""The torch engine: continuous batching over slots, weight updates in flight.

One ``step`` samples one token for every running request. Between steps requests come and go and the weights may
change (DESIGN rule 4).
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor

from headway.generator.engines.requests import EngineRequest
from headway.generator.engines.sampling import HostSample
from headway.generator.engines.torch.adapters import AdapterRevisions
from headway.generator.engines.torch.block_pool import BLOCK_TOKENS, blocks_for, whole_blocks
from headway.generator.engines.torch.decode_step import PROMPT_ROWS, Capture, CudaGraphs, DecodeStep, Launch
from headway.generator.engines.torch.kv_cache import PagedCache
from headway.generator.engines.torch.memory import EngineMemory
from headway.generator.engines.torch.model_runner import ModelRunner, Prefill
from headway.generator.engines.torch.slot_engine import SlotEngine, SlotOptions
from headway.generator.engines.torch.slot_table import HEADROOM_TOKENS
from headway.models.decoder import Decoder
from headway.models.loading import OverwrittenValues
from headway.models.lora import Lora
from headway.records.generation import EngineStatistics, GenerationRequest, Probe, ProbeScores
from headway.records.tokens import TokenIds, TokenRows
from headway.tokens.grammar import GrammarRefused

log = logging.getLogger(__name__)


class _Partial(NamedTuple):
    """Computed prefix of a prompt longer than a step's budget; void for other weights."""

    ids: TokenIds
    update: int  # number of the update whose weights computed it


class TorchEngine(SlotEngine[AdapterRevisions]):
    """Generates for many requests at once with a `Decoder`. The engine owns the model: its weights change only by
    ``apply`` and ``update_weights``.

    ``submit`` queues requests; each ``step`` admits waiting ones (lowest priority number first, then oldest),
    computes their prompts beside the running requests' next tokens, and samples. ``take_deltas`` returns the tokens
    since its last call. A request ends with one last delta that has a ``finish_reason``.

    A step computes at most ``prefill_tokens_per_step`` tokens of prompts: a longer prompt takes several steps, in
    which the running requests keep decoding. Its KV so far has a row of its own; the request stays in the queue.

    KV lies in blocks of `BLOCK_TOKENS` tokens, ``kv_capacity_tokens`` in all, rounded up. Requests of equal prompts
    share the prompt's blocks. When the running requests need more than there are, the youngest is preempted: it waits
    with its tokens, and its KV is recomputed later (``reprefilled``).

    Beside the model it serves adapters by name. Each holds its newest revision, and older ones while a request still
    samples from them: in one step, rows may have different adapters, and different revisions of one.

    ``deterministic``: every step is computed on all slots over the whole context and every prompt alone, so a
    row's result does not depend on its neighbours.

    Example: submit([A, B]); step() samples A1, B1; update_weights(..., version=1, mode="keep"); step() samples
    A2, B2 from the old KV with the new weights; take_deltas() gives A1, B1 (version 0) and A2, B2 (version 1).
    """

    def __init__(
        self,
        model: Decoder,
        *,
        native_kernels: bool = True,
        adapters: Mapping[str, Lora] | None = None,
        return_experts: bool = False,
        capture: Capture | None = None,
        **options: Unpack[SlotOptions],
    ) -> None:
        """``model`` is changed in place by updates; ``native_kernels``: use models/cpu/native.py where it supports the
        model; ``adapters``: by name; the engine owns them, at ``version``; ``return_experts``: those of a mixture, as
        rows of the deltas; ``capture``: makes replays of steps that run ahead (default: CUDA graphs on a GPU)."""
        super().__init__(model, **options)
        runner_options = self._deterministic, native_kernels and capture is None, return_experts
        every_slot_tokens = self.slots * whole_blocks(self.context_tokens)
        self.kv_capacity_tokens = whole_blocks(self.kv_capacity_tokens) if self._scarce else every_slot_tokens
        self._runner = runner = ModelRunner(
            model, self.slots, self.context_tokens, *runner_options, self.kv_capacity_tokens
        )
        self._pool = runner.cache.pool
        self._partial: _Partial | None = None  # the prefix whose KV is in the row behind the slots
        self._donors: dict[TokenIds, list[EngineRequest]] = {}  # running requests by prompt
        self._updates = 0  # of model and adapters so far; unlike versions, these numbers never repeat
        self.memory = EngineMemory(self._subscriber, self._tensors, self._forget_derived, runner.weights_changed)
        self.adapters = self._runner.adapters
        for name, adapter in (adapters or {}).items():
            self._updates += 1
            self._runner.register(name, adapter, self.version, self._updates)
        self._restricted = 0  # open requests whose tokens `DecodeStep` doesn't sample
        self._launched: Launch | None = None  # a step whose tokens aren't read yet
        self._decoder: DecodeStep | None = None
        if capture is None and runner.device.type == "cuda":
            capture = CudaGraphs()
        if capture is not None and not (reason := runner.uncapturable()):
            self._decoder = DecodeStep(runner, self.slots, capture)
        elif capture is not None:
            log.info("decoding operator by operator, without CUDA graphs: %s", reason)

    # --- requests -------------------------------------------------------------------------------------------

    def _entry(self, request: GenerationRequest, arrival: int) -> EngineRequest:
        entry = super()._entry(request, arrival)
        if entry.restricted and not self._restricted and self._decoder is not None:
            log.info("decoding operator by operator beside request %s: top-p, top-k or a grammar", entry.request_id)
        self._restricted += entry.restricted
        return entry

    def _ended(self, entry: EngineRequest) -> None:
        super()._ended(entry)
        self._restricted -= entry.restricted

    # --- one step -------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> bool:
        """See `Engine.step`."""
        self._take_compiled(idle=not self._rows and not self._waiting)
        decoder = None if self._restricted else self._decoder
        if decoder is None or (self._scarce and self._overfull()):  # some may have ended, and need no KV any more
            self._settle()
        self._preempt_to_fit()
        self._runner.cache.copy(self._pool.extend(self._next_position()))
        prefills = self._admit()
        if not self._rows and not prefills and self._launched is None:
            return bool(self._compiling)
        started_s = self._now()
        if decoder is not None:
            self._step_ahead(decoder, prefills)
        elif not self._rows:  # just a part of a long prompt
            self._runner.prefill(prefills)
        else:
            self._step_now(prefills)
        self._busy_s += self._now() - started_s
        self._note_idleness()
        return True

    def _step_now(self, prefills: Sequence[Prefill]) -> None:
        """Sample a token for every row, and wait for it."""
        n, table = self._rows, self._table
        n_rows = self.slots if self._deterministic else n
        logits = self._runner.step(prefills, table.pending[:n_rows], table.position[:n_rows], table.update[:n_rows])
        sampling, errors = table.row_sampling(n_rows, self._runner.device)
        self._advance(slice(n), self._runner.sample(logits, sampling).host(), errors)
        self._steps += 1
        self._generated += n

    def _step_ahead(self, decoder: DecodeStep, prefills: Sequence[Prefill]) -> None:
        """Launch a step, and only then read the last one's tokens. A request that has ended is known one step late: its
        token of the launched step is dropped."""
        if self._deterministic or not self._rows or sum(prefill.tokens for prefill in prefills) > PROMPT_ROWS:
            self._runner.prefill(prefills)
            prefills = ()
        position_n, active_n = self._table.next_position(self._rows)
        launched, self._launched = self._launched, None
        if active_n.any():
            self._launched = decoder.launch(self._table, position_n, active_n, prefills)
            self._steps += 1
        elif prefills:
            self._runner.prefill(prefills)
        last_source_n = self._table.launch(active_n)
        if launched is not None:
            self._read(launched, last_source_n)

    def _settle(self) -> None:
        launched, self._launched = self._launched, None
        if launched is not None:
            self._read(launched, self._table.source)
            self._table.source[:] = -1

    def _read(self, launched: Launch, row_s: np.ndarray) -> None:
        """Append the tokens of a launched step; ``row_s``: its row of each slot, or -1."""
        slots = np.flatnonzero(row_s[: self._rows] >= 0)
        ids, logprobs = launched.read()[:, row_s[slots]]
        self._generated += len(slots)
        self._advance(slots, (ids.astype(np.int64), logprobs, {}), {})

    def _advance(
        self, rows: slice | np.ndarray, sampled: HostSample, errors: dict[EngineRequest, GrammarRefused]
    ) -> None:
        for request, reason, error, at_fault, retry in self._table.advance(rows, sampled, errors):
            if retry:
                self._recompile_grammar(request)
            else:
                self._end_running(request, reason, error, refused=at_fault)

    def _admit(self) -> list[Prefill]:
        """Give free slots to waiting requests while KV blocks and this step's prefill budget last.

        Equal prompts are computed once: their rows share the blocks of one Prefill, or those of a donor, a running
        request whose prompt was computed by the same weights.
        """
        if not self._waiting:
            self._drop_partial()
            return []
        budget_tokens, prefills, copies = self._prefill_tokens_per_step, list[Prefill](), list[tuple[int, int]]()
        leader_by_key: dict[tuple[int, TokenIds], EngineRequest] = {}  # by update and tokens
        admitted: list[EngineRequest] = []
        while self._rows < self.slots and self._waiting:
            request = self._waiting[0]
            token_ids = request.prompt + request.response
            context_ids = token_ids[:-1]  # the last token is fed by the step itself
            update = self._update_of(request)
            leader = leader_by_key.get((update, token_ids))
            donors = () if leader is not None or request.response else self._donors.get(request.prompt, ())
            donor = next((donor for donor in donors if donor.prefix_update == update), None)
            begun_tokens = 0 if leader is not None or donor is not None else self._partial_tokens(context_ids, update)
            shared = 0 if leader is None and donor is None else len(context_ids) // BLOCK_TOKENS
            if not self._has_blocks(blocks_for(len(token_ids)) - shared, continues=begun_tokens > 0):
                break
            if leader is None and donor is None and len(context_ids) - begun_tokens > budget_tokens:
                if budget_tokens and not self._deterministic:
                    end = begun_tokens + budget_tokens
                    if not begun_tokens:
                        self._drop_partial()
                    self._pool.allocate(self.slots, len(token_ids))
                    prefills.append(Prefill(context_ids[:end], self.slots, begun_tokens, update))
                    self._partial = _Partial(context_ids[:end], update)
                if prefills or not self._deterministic:
                    break
            heapq.heappop(self._waiting)
            request.update = request.prefix_update = update
            request.reprefilled = request.reprefilled or bool(request.response)
            slot, self._rows = self._rows, self._rows + 1
            self._table.occupy(slot, request, self.context_tokens)
            admitted.append(request)
            if leader is not None:
                self._pool.share(leader.slot, slot, len(token_ids))
                continue
            if donor is not None:  # it may have written behind the prompt in the last block
                copies += self._pool.share(donor.slot, slot, len(context_ids), copy_last=True)
            elif begun_tokens:
                self._pool.move(self.slots, slot)
                self._partial = None
            self._pool.allocate(slot, len(token_ids))
            if donor is None and context_ids:
                prefills.append(Prefill(context_ids, slot, begun_tokens, update))
                budget_tokens -= len(context_ids) - begun_tokens
            leader_by_key[update, token_ids] = request
        for request in admitted:  # after the loop: a donor must have its KV before this step
            self._donors.setdefault(request.prompt, []).append(request)
        self._runner.cache.copy(copies)
        self._prefilled += sum(prefill.tokens for prefill in prefills)
        return prefills

    def _has_blocks(self, needed: int, *, continues: bool) -> bool:
        """Whether a request that needs so many blocks can be admitted. ``continues``: it takes over the blocks of the
        partial prompt, which is dropped otherwise if there are too few."""
        if not self._scarce:
            return True
        needed += blocks_for(self._rows * HEADROOM_TOKENS)
        if continues:
            return self._pool.free + int(np.count_nonzero(self._pool.tables[self.slots])) >= needed
        if self._pool.free < needed:
            self._drop_partial()
        return self._pool.free >= needed

    def _drop_partial(self) -> None:
        if self._partial is not None:
            self._partial = None
            self._pool.release(self.slots)

    def _partial_tokens(self, ids: TokenIds, update: int) -> int:
        """Count of leading tokens of ``ids`` whose KV by these weights is in the row behind the slots."""
        prefix = self._partial
        if prefix is None or prefix.update != update or ids[: len(prefix.ids)] != prefix.ids:
            return 0
        return min(len(prefix.ids), len(ids) - 1)

    # --- endings, preemption --------------------------------------------------------------------------------

    def _release_row(self, request: EngineRequest) -> None:
        """Free a request's row and blocks; the last row is moved into it."""
        slot, last_row = request.slot, self._rows - 1
        self._pool.release(slot)
        self._table.release(slot)
        if slot != last_row:
            self._table.move(last_row, slot)
            self._pool.move(last_row, slot)
        self._rows = last_row
        siblings = self._donors[request.prompt]
        siblings.remove(request)
        if not siblings:
            del self._donors[request.prompt]

    def _overfull(self) -> bool:
        position_n = self._next_position()
        if self._pool.shortage(position_n):
            self._drop_partial()
        return self._pool.shortage(position_n) > 0

    def _next_position(self) -> np.ndarray:
        is_known, n = self._launched is None, self._rows
        return self._table.position[:n] if is_known else self._table.next_position(n)[0]

    # --- weights --------------------------------------------------------------------------------------------

    def _tensors(self) -> Iterator[Tensor]:
        self._settle()
        return self._runner.tensors()

    def _forget_derived(self) -> None:
        self._runner.forget_panels()
        if self._decoder is not None:
            self._decoder.forget()

    def _stage(self, name: str, tensor: Tensor, size: int) -> None:
        self._runner.stage(name, tensor, size)

    def _stage_changes(self, changes: Sequence[OverwrittenValues] | None) -> None:
        self._runner.stage_changes(changes)

    def _weights_changed(self, *, staged: bool = False) -> None:
        self._runner.weights_changed(staged=staged)
        self._drop_partial()
        self._updates += 1
        self._model_update = self._updates

    def _register(self, name: str, tensors: Mapping[str, Tensor], version: int) -> None:
        adapter = self.adapters.revised(name, tensors)
        self._drop_partial()
        self._updates += 1
        self._runner.register(name, adapter, version, self._updates)

    def add_adapter(self, name: str, adapter: Lora) -> None:
        """Register an adapter, or a revision of any shape from which its running requests go on ("keep"), between two
        steps; other requests don't notice. The engine owns it."""
        with self.paused():
            self._settle()
            self._decoder = None  # its graphs know no adapters
            self._updates += 1
            self._runner.register(name, adapter, self.version, self._updates)
            self._emit_ready()
            self._cross_update(name, "keep")
            self.adapters.unload(self._open.values())

    def remove_adapter(self, name: str) -> None:
        """Free an adapter that no open request names; no-op for an unknown one."""
        self.adapters.remove(name)
        self.adapters.unload(self._open.values())

    def _rows_of(self, entry: EngineRequest) -> dict[str, TokenRows]:
        return self._runner.take_rows(entry, self._table.position)

    def _recompute(self, running: Sequence[EngineRequest]) -> int:
        """Recompute the KV of all running requests with the present weights. Returns the count of tokens computed."""
        table = self._table
        shared_by_prompt, single_prefills = self._shared_prompts(running), list[Prefill]()
        for request in running:
            if self._deterministic:  # a row's result must not depend on its siblings
                self._pool.own(request.slot)
            ids = table.sequence[request.slot, : table.position[request.slot]]
            request.prefix_update = self._updates
            request.reprefilled = request.reprefilled or len(ids) > 0
            begun_tokens = len(request.prompt) - 1 if request.prompt in shared_by_prompt else 0
            if len(ids) > begun_tokens:
                single_prefills.append(Prefill(ids, request.slot, begun_tokens, self._updates))
        total_tokens = 0
        for stage_prefills in (list(shared_by_prompt.values()), single_prefills):
            prefill_chunk: list[Prefill] = []
            budget_tokens = self._prefill_tokens_per_step
            for prefill in stage_prefills:
                if prefill_chunk and prefill.tokens > budget_tokens:
                    self._runner.prefill(prefill_chunk)
                    prefill_chunk, budget_tokens = [], self._prefill_tokens_per_step
                prefill_chunk.append(prefill)
                budget_tokens -= prefill.tokens
                total_tokens += prefill.tokens
            self._runner.prefill(prefill_chunk)
            if stage_prefills is not single_prefills:
                for request in running:
                    if (prefill := shared_by_prompt.get(request.prompt)) is not None and prefill.row != request.slot:
                        pairs = self._pool.share(prefill.row, request.slot, len(request.prompt) - 1, copy_last=True)
                        self._runner.cache.copy(pairs)
        self._prefilled += total_tokens
        return total_tokens

    def _shared_prompts(self, running: Sequence[EngineRequest]) -> dict[TokenIds, Prefill]:
        """Prefills of prompts that several of ``running`` share, without the last token, which may still be pending."""
        if self._deterministic:  # a row's result must not depend on its siblings
            return {}
        slots_by_prompt: dict[TokenIds, list[int]] = {}
        for request in running:
            slots_by_prompt.setdefault(request.prompt, []).append(request.slot)
        return {
            prompt: Prefill(prompt[:-1], prompt_slots[0], 0, self._updates)
            for prompt, prompt_slots in slots_by_prompt.items()
            if len(prompt_slots) > 1 and len(prompt) > 1
        }

    def _prompt_logits(self, ids: TokenIds, adapter: str) -> Callable[[int, int], Tensor]:
        cache: PagedCache | None = None

        def compute(start: int, end: int) -> Tensor:
            nonlocal cache
            if start == 0 or cache is None:
                cache = self._runner.new_cache(len(ids))
            revision = self.adapters.newest(adapter)
            prefill = Prefill(ids.array[:end], 0, start, 0 if revision is None else revision.update)
            with self._runner.on_cache(cache):
                return self._runner.prompt_logits(prefill)

        return compute

    def score(self, probe: Probe) -> ProbeScores:
        """See `Engine.score`."""
        return self._runner.score(probe)

    def statistics(self) -> EngineStatistics:
        """See `Engine.statistics`."""
        return self._statistics(self._rows, self._pool.used * BLOCK_TOKENS, self.kv_capacity_tokens)
