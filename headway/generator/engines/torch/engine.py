"""The torch engine: continuous batching over slots, weight updates in flight.

One ``step`` samples one token for every running request. Between steps requests come and go and the weights may
change (DESIGN rule 4).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from headway.generator.engines.requests import EngineRequest
from headway.generator.engines.torch.adapters import AdapterRevisions
from headway.generator.engines.torch.memory import EngineMemory
from headway.generator.engines.torch.model_runner import ModelRunner, Prefill
from headway.generator.engines.torch.slot_engine import SlotEngine, SlotOptions
from headway.generator.engines.torch.slot_table import HEADROOM_TOKENS
from headway.models.decoder import Decoder
from headway.models.lora import Lora
from headway.records.generation import EngineStatistics, Probe, ProbeScores
from headway.records.tokens import TokenIds, TokenRows


class _Partial(NamedTuple):
    """Computed prefix of a prompt longer than a step's budget; void for other weights, or once its slot is used."""

    ids: TokenIds
    update: int  # number of the update whose weights computed it


class TorchEngine(SlotEngine[AdapterRevisions]):
    """Generates for many requests at once with a `Decoder`. The engine owns the model: its weights change only by
    ``apply`` and ``update_weights``.

    ``submit`` queues requests; each ``step`` admits waiting ones (lowest priority number first, then oldest),
    computes their prompts beside the running requests' next tokens, and samples. ``take_deltas`` returns the tokens
    since its last call. A request ends with one last delta that has a ``finish_reason``.

    A step computes at most ``prefill_tokens_per_step`` tokens of prompts: a longer prompt takes several steps, in
    which the running requests keep decoding. Its KV so far lies in the last slot; the request stays in the queue.

    KV tokens are admitted by count: when the running requests would need more than ``kv_capacity_tokens``, the
    youngest is preempted: it waits with its tokens, and its KV is recomputed later (``reprefilled``).

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
        **options: Unpack[SlotOptions],
    ) -> None:
        """``model`` is changed in place by updates; ``native_kernels``: use models/cpu/native.py where it supports the
        model; ``adapters``: by name; the engine owns them, at ``version``; ``return_experts``: those of a mixture, as
        rows of the deltas."""
        super().__init__(model, **options)
        runner_options = self._deterministic, native_kernels, return_experts
        self._runner = runner = ModelRunner(model, self.slots, self.context_tokens, *runner_options)
        self._holes: list[int] = []  # rows freed since the last step; refilled or closed by the next
        self._partial: _Partial | None = None  # the KV of a prompt's beginning, in the last slot
        self._donors: dict[TokenIds, list[EngineRequest]] = {}  # running requests by prompt
        self._updates = 0  # of model and adapters so far; unlike versions, these numbers never repeat
        self.memory = EngineMemory(self._subscriber, runner.tensors, runner.forget_panels, runner.weights_changed)
        self.adapters = self._runner.adapters
        for name, adapter in (adapters or {}).items():
            self._updates += 1
            self._runner.register(name, adapter, self.version, self._updates)

    # --- one step -------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> bool:
        """See `Engine.step`."""
        self._take_compiled(idle=not self._rows and not self._waiting)
        self._preempt_to_fit()
        prefills = self._admit()
        self._close_holes()
        n, table = self._rows, self._table
        if n == 0 and not prefills:
            return bool(self._compiling)
        started_s = self._now()
        if n == 0:  # just a part of a long prompt
            self._runner.prefill(prefills)
            self._busy_s += self._now() - started_s
            return True
        n_rows = self.slots if self._deterministic else n
        logits = self._runner.step(prefills, table.pending[:n_rows], table.position[:n_rows], table.update[:n_rows])
        sampling, errors = table.row_sampling(n_rows, self._runner.device)
        for request, reason, error, at_fault, retry in table.advance(n, self._runner.sample(logits, sampling), errors):
            slot = request.slot
            if retry:
                self._recompile_grammar(request)
                continue
            self._end_running(request, reason, error, refused=at_fault)
            if reason == "error":
                self._runner.cache.clear(slot)
        self._steps += 1
        self._generated += n
        self._busy_s += self._now() - started_s
        self._note_idleness()
        return True

    def _admit(self) -> list[Prefill]:
        """Give free slots to waiting requests while KV tokens and this step's prefill budget last.

        Equal prompts are computed once: by one Prefill with several slots, or by copying the prompt's KV from a
        running request that computed it since the last update.
        """
        # Lowest holes first: then a row that `_close_holes` moves is never one whose prefill is still to come.
        self._holes.sort(reverse=True)
        used_tokens, budget_tokens = self._kv_used(), self._prefill_tokens_per_step
        prefill_by_key: dict[tuple[int, TokenIds], Prefill] = {}  # by update and tokens
        pairs_by_tokens: dict[int, list[tuple[int, int]]] = {}  # tokens -> (source slot, target slot)
        slots_by_tokens: dict[int, list[int]] = {}  # tokens -> slots that get them from the last one
        admitted: list[EngineRequest] = []
        while (self._holes or self._rows < self.slots) and self._waiting:
            request = self._waiting[0]
            running_count = self._rows - len(self._holes)
            if self._scarce and running_count:
                needed_tokens = used_tokens + request.tokens + running_count * HEADROOM_TOKENS
                if needed_tokens > self.kv_capacity_tokens:
                    break
            context_ids = (request.prompt + request.response)[:-1]  # the last token is fed by the step itself
            update = self._update_of(request)
            prefill = prefill_by_key.get((update, context_ids))
            donor = None if prefill is not None or request.response else self._donor(request.prompt, update)
            if prefill is None and donor is None and context_ids:
                begun_tokens = self._partial_tokens(context_ids, update)
                if len(context_ids) - begun_tokens > budget_tokens and (prefill_by_key or not self._deterministic):
                    last_slot_free = self._rows < self.slots or self.slots - 1 in self._holes
                    if budget_tokens and not self._deterministic and last_slot_free:
                        end = begun_tokens + budget_tokens
                        # A request admitted in this step may have exactly this prefix: its slot needs it too.
                        first_part = Prefill(context_ids[:end], [], begun_tokens, update)
                        prefill_by_key.setdefault((update, context_ids[:end]), first_part).slots.append(self.slots - 1)
                        self._partial = _Partial(context_ids[:end], update)
                    break
                budget_tokens -= len(context_ids) - begun_tokens
                prefill = prefill_by_key[update, context_ids] = Prefill(context_ids, [], begun_tokens, update)
            heapq.heappop(self._waiting)
            request.update = request.prefix_update = update
            slot = self._assign_slot(request)
            used_tokens += request.tokens
            admitted.append(request)
            if prefill is not None:
                prefill.slots.append(slot)
                if prefill.start:
                    slots_by_tokens.setdefault(prefill.start, []).append(slot)
            elif donor is not None and context_ids:
                pairs_by_tokens.setdefault(len(context_ids), []).append((donor.slot, slot))
        for request in admitted:  # after the loop: a donor must have its KV before this step
            self._donors.setdefault(request.prompt, []).append(request)
        for tokens, slots in slots_by_tokens.items():  # first: the others may overwrite that slot
            self._runner.cache.copy([self.slots - 1] * len(slots), slots, tokens)
        for tokens, slot_pairs in pairs_by_tokens.items():
            self._runner.cache.copy([pair[0] for pair in slot_pairs], [pair[1] for pair in slot_pairs], tokens)
        self._prefilled += sum(prefill.tokens for prefill in prefill_by_key.values())
        return list(prefill_by_key.values())

    def _partial_tokens(self, ids: TokenIds, update: int) -> int:
        """Count of leading tokens of ``ids`` whose KV by these weights is in the last slot."""
        prefix = self._partial
        if prefix is None or prefix.update != update or ids[: len(prefix.ids)] != prefix.ids:
            return 0
        return min(len(prefix.ids), len(ids) - 1)

    def _assign_slot(self, request: EngineRequest) -> int:
        if self._holes:
            slot = self._holes.pop()
        else:
            slot = self._rows
            self._rows += 1
        if slot == self.slots - 1:
            self._partial = None
        request.reprefilled = request.reprefilled or bool(request.response)
        self._table.occupy(slot, request, self.context_tokens)
        return slot

    def _donor(self, prompt: TokenIds, update: int) -> EngineRequest | None:
        """Find a running request whose KV of this prompt was computed by these weights, and so may be copied."""
        for donor in self._donors.get(prompt, ()):
            if donor.prefix_update == update:
                return donor
        return None

    # --- endings, preemption --------------------------------------------------------------------------------

    def _release_row(self, request: EngineRequest) -> None:
        slot = request.slot
        self._table.release(slot)
        self._holes.append(slot)
        siblings = self._donors[request.prompt]
        siblings.remove(request)
        if not siblings:
            del self._donors[request.prompt]

    def _close_holes(self) -> None:
        """Move the last rows into the holes, so that the running requests are rows 0 .. n-1 again."""
        origin_by_target: dict[int, int] = {}  # target -> the row its KV lies in
        for hole in sorted(self._holes, reverse=True):
            last_row = self._rows - 1
            if hole != last_row:
                self._table.move(last_row, hole)
                origin_by_target[hole] = origin_by_target.pop(last_row, last_row)
            self._rows -= 1
        self._holes.clear()
        if origin_by_target:
            tokens = int(self._table.position[list(origin_by_target)].max())
            self._runner.cache.copy(list(origin_by_target.values()), list(origin_by_target), tokens)

    def _kv_used(self) -> int:
        """KV tokens of the running requests after the next step (free rows have position 0)."""
        return int(self._table.position[: self._rows].sum()) + self._rows - len(self._holes)

    # --- weights --------------------------------------------------------------------------------------------

    def _stage(self, name: str, tensor: Tensor, size: int) -> None:
        self._runner.stage(name, tensor, size)

    def _weights_changed(self, *, staged: bool = False) -> None:
        self._runner.weights_changed(staged=staged)
        self._close_holes()
        self._updates += 1
        self._model_update = self._updates

    def _register(self, name: str, tensors: Mapping[str, Tensor], version: int) -> None:
        adapter = self.adapters.revised(name, tensors)
        self._close_holes()
        self._updates += 1
        self._runner.register(name, adapter, version, self._updates)

    def _rows_of(self, entry: EngineRequest) -> dict[str, TokenRows]:
        return self._runner.take_rows(entry, self._table.position)

    def _recompute(self, running: Sequence[EngineRequest]) -> int:
        """Recompute the KV of all running requests with the present weights. Returns the count of tokens computed."""
        table = self._table
        shared_by_prompt, single_prefills = self._shared_prompts(running), []
        for request in running:
            ids = table.sequence[request.slot, : table.position[request.slot]]
            request.prefix_update = self._updates
            request.reprefilled = request.reprefilled or len(ids) > 0
            begun_tokens = len(request.prompt) - 1 if request.prompt in shared_by_prompt else 0
            if len(ids) > begun_tokens:
                single_prefills.append(Prefill(ids, [request.slot], begun_tokens, self._updates))
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
            prompt: Prefill(prompt[:-1], prompt_slots, 0, self._updates)
            for prompt, prompt_slots in slots_by_prompt.items()
            if len(prompt_slots) > 1 and len(prompt) > 1
        }

    def score(self, probe: Probe) -> ProbeScores:
        """See `Engine.score`."""
        return self._runner.score(probe)

    def statistics(self) -> EngineStatistics:
        """See `Engine.statistics`."""
        kv_used_tokens = int(self._table.position[: self._rows].sum())
        return self._statistics(self._rows - len(self._holes), kv_used_tokens, self.kv_capacity_tokens)
