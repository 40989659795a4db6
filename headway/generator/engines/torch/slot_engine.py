"""Base of the engines that compute in this process: running requests in slots, weight updates between two steps."""

from __future__ import annotations

import heapq
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Required, TypedDict, TypeVar

import msgspec
import torch
from torch import Tensor

from headway.generator.engines.engine import Engine
from headway.generator.engines.grammars import CompilingGrammars
from headway.generator.engines.prompt_pass import PromptPass
from headway.generator.engines.requests import EngineRequest
from headway.generator.engines.revisions import Revisions
from headway.generator.engines.torch.slot_table import SlotTable
from headway.models.loading import OverwrittenValues, adopt_weights, copy_weights, overwritten_values
from headway.models.packed_model import PackedModel
from headway.records.errors import ConfigurationError
from headway.records.generation import (
    POLICY_ADAPTER,
    AppliedWeights,
    FinishReason,
    GenerationRequest,
    PublishedWeights,
    TokenDelta,
    UpdateMode,
)
from headway.records.tokens import TokenIds, TokenRows
from headway.tokens.tokenizer import Tokenizer
from headway.weights.device_memory import CudaMemory
from headway.weights.shared_memory import Subscriber

Adapters = TypeVar("Adapters", bound=Revisions[Any])


_CHECKS_IN_TURN = 16  # updates in which all parameters that are copies are compared once


def _same_bits(weight: Tensor, verified: Tensor) -> bool:
    """Whether a weight is the verified one, cast to its dtype, bit for bit."""
    cast = verified.to(weight.device, weight.dtype)
    return torch.equal(weight.flatten().view(torch.uint8), cast.flatten().view(torch.uint8))


class SlotOptions(TypedDict, total=False):
    """Options of every `SlotEngine`."""

    slots: Required[int]
    max_context_tokens: Required[int]
    kv_capacity_tokens: int | None
    version: int  # of the weights, and of the adapters
    tokenizer: Tokenizer | None
    deterministic: bool
    prefill_tokens_per_step: int
    now: Callable[[], float]  # monotonic seconds, for the statistics


class SlotEngine(Engine[EngineRequest], Generic[Adapters]):
    """An engine whose running requests are rows of a `SlotTable`, and which owns its model and the revisions of its
    ``adapters``: they change only by ``apply``, ``update_weights`` and ``update_adapter``."""

    adapters: Adapters
    prefetches = True

    def __init__(
        self,
        model: PackedModel,
        *,
        slots: int,
        max_context_tokens: int,
        kv_capacity_tokens: int | None = None,
        version: int = 0,
        tokenizer: Tokenizer | None = None,
        deterministic: bool = False,
        prefill_tokens_per_step: int = 8192,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """See `SlotOptions`; ``model`` is changed in place by updates."""
        self._deterministic, self._prefill_tokens_per_step = deterministic, prefill_tokens_per_step
        self.kv_capacity_tokens = slots * max_context_tokens if kv_capacity_tokens is None else kv_capacity_tokens
        super().__init__(
            slots=slots,
            # One request must always fit alone, else preemption could never make room for it.
            context_tokens=min(max_context_tokens, self.kv_capacity_tokens),
            vocabulary=model.config.vocabulary_size,
            tokenizer=tokenizer,
            version=version,
            now=now,
        )
        if tokenizer is not None:
            self._compiling = CompilingGrammars(tokenizer, self._vocabulary, now)
        self._scarce = self.kv_capacity_tokens < slots * self.context_tokens
        self._model = model
        self._table = SlotTable(slots, self.context_tokens, self._vocabulary)
        self._rows = 0  # the running requests are among rows 0 .. _rows-1
        self._model_version, self._model_update = version, 0  # of the model without an adapter
        self._model_changes = 0  # of its weights so far
        self._subscriber = Subscriber(CudaMemory.of(next(model.parameters()).device))
        self._prefetched: tuple[PublishedWeights, dict[str, Tensor], float] | None = None  # with the seconds it took
        self._changes: list[OverwrittenValues] | None = None  # from the live weights to what is prefetched, if known
        self._live = ""  # checksum of the fetched version whose values the parameters have; "": unknown
        self._damage = ""  # of the live weights, that a `prefetch` has found and no `apply` has reported
        self._checks = 0  # of live weights so far

    @abstractmethod
    def _release_row(self, request: EngineRequest) -> None:
        """Free a running request's row."""

    @abstractmethod
    def _overfull(self) -> bool:
        """Whether the running requests' KV after the next step doesn't fit."""

    @abstractmethod
    def _register(self, name: str, tensors: Mapping[str, Tensor], version: int) -> None:
        """Make a copy of ``tensors`` the adapter's newest revision. Raises ConfigurationError, with nothing changed."""

    @abstractmethod
    def _recompute(self, running: Sequence[EngineRequest]) -> int:
        """Compute all tokens of these requests again with the present weights, at the latest in the next step.
        Returns the count of tokens."""

    def _stage(self, name: str, tensor: Tensor, size: int) -> None:
        """Prepare, beside the steps, for ``tensor`` as the next value of a weight: its first ``size`` bytes are there,
        and aren't verified yet."""

    def _stage_changes(self, changes: Sequence[OverwrittenValues] | None) -> None:
        """Prepare, beside the steps, for these as all values that the next update overwrites; None: for all others."""

    def _weights_changed(self, *, staged: bool = False) -> None:
        """Note that the model's weights have changed; ``staged``: to what `_stage` and `_stage_changes` were called
        with."""

    def _settle(self) -> None:
        """Wait for a step that is being computed, and take its tokens."""

    def _rows_of(self, entry: EngineRequest) -> dict[str, TokenRows]:
        """Return the rows of experts that the request's caller lacks."""
        return {}

    # --- requests -------------------------------------------------------------------------------------------

    def abort(self, request_ids: Sequence[str]) -> None:
        """See `Engine.abort`."""
        self._settle()
        for request_id in request_ids:
            request = self._open.get(request_id)
            if request is not None and request.slot >= 0:
                self._end_running(request, "abort")
            elif request is not None:
                self._end_waiting(request)
        self._note_idleness()

    def _end_running(
        self, request: EngineRequest, reason: FinishReason, error: str = "", *, refused: bool = False
    ) -> None:
        self._end(request, reason, error, refused=refused)
        self._release_row(request)

    def _preempt(self, request: EngineRequest) -> None:
        """Take the row of a running request, which keeps its tokens."""
        self._emit(request)
        request.response = self._table.response_ids(request.slot)
        self._release_row(request)

    def _preempt_to_fit(self) -> None:
        """Preempt the youngest requests until the next step's KV tokens fit."""
        row_count = self._rows if self._scarce else 0
        running = [request for request in self._table.requests[:row_count] if request is not None]
        for request in sorted(running, reverse=True)[:-1]:
            if not self._overfull():
                return
            self._preempt(request)
            heapq.heappush(self._waiting, request)
            self._preemptions += 1

    def _recompile_grammar(self, request: EngineRequest) -> None:
        """Let a running request wait until a new matcher has consumed its tokens."""
        assert self._compiling is not None
        self._preempt(request)
        request.matcher, request.exhausted = None, request.exhausted + 1
        self._compiling.start(request)

    def _entry(self, request: GenerationRequest, arrival: int) -> EngineRequest:
        engine_request = EngineRequest(request, arrival)
        if request.partial.versions:  # it resumes on the revision that it stopped on, if that is still there
            revision = self.adapters.held(engine_request.adapter, request.partial.versions[-1].version)
            engine_request.update = -1 if revision is None else revision.update
        return engine_request

    def _refusal(self, entry: EngineRequest) -> str:
        return self.adapters.unknown(entry.adapter)

    def _ended(self, entry: EngineRequest) -> None:
        super()._ended(entry)
        self.adapters.unload(self._open.values())

    def _prompt_pass(self, ids: TokenIds, top: int, adapter: str) -> PromptPass:
        if reason := self.adapters.unknown(adapter):
            raise ConfigurationError(reason)
        chosen, chunk_tokens = adapter or POLICY_ADAPTER, self._prefill_tokens_per_step
        weights, logits = partial(self._newest_weights, chosen), self._prompt_logits(ids, chosen)
        return PromptPass(ids, top, self._vocabulary, chunk_tokens, weights, logits)

    @abstractmethod
    def _prompt_logits(self, ids: TokenIds, adapter: str) -> Callable[[int, int], Tensor]:
        """Return what computes the logits of a prompt, on a KV cache of its own: see `PromptPass`."""

    def _newest_weights(self, adapter: str) -> tuple[int, tuple[int, int, int]]:
        """The version of an adapter's newest revision, or of the model without one, and what identifies them."""
        revision = self.adapters.newest(adapter)
        version = self._model_version if revision is None else revision.version
        return version, (self._model_changes, version, 0 if revision is None else revision.update)

    def _update_of(self, request: EngineRequest) -> int:
        """Return the number of the update with whose weights the request is computed from now on."""
        if request.update >= 0:
            return request.update
        newest_revision = self.adapters.newest(request.adapter)
        return self._model_update if newest_revision is None else newest_revision.update

    def _emit_ready(self) -> None:
        """Make a delta for every running request with unsent tokens or recomputed KV."""
        table = self._table
        has_unsent = table.position[: self._rows] + 1 > table.sent[: self._rows]
        for slot in range(self._rows):
            request = table.requests[slot]
            if request is not None and (has_unsent[slot] or request.reprefilled):
                self._emit(request)

    def _emit(
        self, entry: EngineRequest, finish_reason: FinishReason | None = None, error: str = "", refused: bool = False
    ) -> None:
        token_bytes, kept_rows = self._table.take_unsent(entry)
        revision = self.adapters.of(entry.update)
        version = self._model_version if revision is None else revision.version
        self._deltas.append(
            TokenDelta(
                request_id=entry.request_id,
                data=token_bytes,
                version=version if token_bytes else -1,
                finish_reason=finish_reason,
                error=error,
                reprefilled=entry.reprefilled,
                refused=refused,
                token_rows=self._rows_of(entry) | kept_rows,
            )
        )
        entry.reprefilled = False

    # --- weights --------------------------------------------------------------------------------------------

    def prefetch(self, published: PublishedWeights) -> None:
        """See `Engine.prefetch`."""
        started_s = self._now()
        self._damage = self._damage or self._damage_of_live(published)
        tensors = self._subscriber.fetch(published, *([] if published.adapter else [self._stage]))
        self._damage = self._damage or self._damage_of_changing()
        if self._damage:  # what is published must not build on it
            self._live = ""
        changes = None if published.adapter else self._subscriber.changes_from(self._live)
        self._changes = None if changes is None else overwritten_values(self._model, tensors, changes)
        self._stage_changes(self._changes)
        self._prefetched = published, tensors, self._now() - started_s

    def apply(self, published: PublishedWeights, mode: UpdateMode) -> AppliedWeights:
        """See `Engine.apply`; `update_weights` explains the modes."""
        old_paused_s = self._paused_s
        if self._prefetched is None or self._prefetched[0] != published:
            with self.paused():
                self.prefetch(published)
        assert self._prefetched is not None
        (_, tensors, fetch_s), self._prefetched = self._prefetched, None
        if published.adapter:
            report = self.update_adapter(published.adapter, tensors, published.version, mode)
        else:  # a GPU's weights stay where they are
            report = self.update_weights(tensors, published.version, mode, adopt=not published.handle)
            self._live = published.checksum
            self._void_damaged()
            report, self._damage = msgspec.structs.replace(report, damage=self._damage), ""
        times = {"fetch_s": fetch_s, "check_s": self._subscriber.spent.hash_s, "pause_s": self._paused_s - old_paused_s}
        return msgspec.structs.replace(report, **times)

    def _damage_of_live(self, following: PublishedWeights) -> str:
        """The tensor of the live weights that isn't any more what was verified, "" if none is found: all bytes are
        hashed, or if the parameters have another dtype or device, some of them are compared in turn; all of them where
        the ``following`` version overwrites more than one delta's values, which `_damage_of_changing` compares."""
        if self._live and (damage := self._subscriber.damage()):
            return damage
        fetched = self._subscriber.tensors_of(self._live)
        parameters = [(name, weight) for name, weight in self._model.named_parameters() if name in fetched]
        self._checks += 1
        in_turn = _CHECKS_IN_TURN if self._subscriber.deltas_to(following) == 1 else 1
        for name, weight in parameters[self._checks % in_turn :: in_turn]:
            if not _same_bits(weight, fetched[name]):
                return f"{name} of version {self._model_version}"
        return ""

    def _damage_of_changing(self) -> str:
        """As `_damage_of_live`, of the values alone that the last fetch's delta overwrites if the parameters are
        copies: later checks couldn't find those."""
        parameters = dict(self._model.named_parameters())
        for name, positions, _, bases in self._subscriber.changes_from(self._live, steps=1) or ():
            weight = parameters[name]
            if not _same_bits(weight.flatten()[positions.to(weight.device)], bases):
                return f"{name} of version {self._model_version}"
        return ""

    def _void_damaged(self) -> None:
        """End the running requests if they have sampled from damaged weights, so that they are repeated."""
        for request in self._table.requests[: self._rows] if self._damage else ():
            if request is not None:
                self._end_running(request, "error", f"the engine's weights were damaged: {self._damage}")
                voided = {"void": True, "data": b"", "version": -1, "token_rows": {}}
                self._deltas[-1] = msgspec.structs.replace(self._deltas[-1], **voided)

    def update_weights(
        self, tensors: Mapping[str, Tensor], version: int, mode: UpdateMode, *, adopt: bool = False
    ) -> AppliedWeights:
        """Replace the model's weights between two steps (DESIGN rule 4). ``adopt``: the tensors are the subscriber's
        last fetch, and become the parameters without a copy where they fit.

        ``keep``: running requests continue on what is cached of them; ``recompute``: that is recomputed first;
        ``abort``: they end with reason "abort" (waiting and not interruptible requests stay).
        Raises ConfigurationError, with nothing changed, when the tensors are not this model's, for ``finish``, and
        where there are adapters: they belong to the weights that are here.
        """
        if mode == "finish" or self.adapters:
            fault = "adapters are registered beside them" if self.adapters else "update_mode = 'finish' is for adapters"
            raise ConfigurationError(f"an update of the model's own weights: {fault}")
        old_paused_s = self._paused_s
        with self.paused():
            self._settle()
            self._live = ""  # until the caller knows
            changes, self._changes = self._changes, None
            if not adopt:
                copy_weights(self._model, tensors)
            elif adopt_weights(self._model, tensors, changes):
                self._subscriber.keep()
            self._weights_changed(staged=adopt)
            self._model_changes += 1
            self._emit_ready()  # tokens so far are the old version's
            self._model_version = version
            in_flight_count, recomputed_tokens = self._cross_update("", mode)
        return self._update_report(version, old_paused_s, in_flight_count, recomputed_tokens)

    def update_adapter(
        self, name: str, tensors: Mapping[str, Tensor], version: int, mode: UpdateMode
    ) -> AppliedWeights:
        """Register a revision of an adapter between two steps. Modes as of `update_weights`, for its own requests;
        ``finish``: those that have begun keep their revision. Raises ConfigurationError, with nothing
        changed, when no adapter of this name, with these names and shapes, is registered."""
        old_paused_s = self._paused_s
        with self.paused():
            self._settle()
            self._register(name, tensors, version)
            self._emit_ready()
            in_flight_count, recomputed_tokens = (0, 0) if mode == "finish" else self._cross_update(name, mode)
            self.adapters.unload(self._open.values())
        return self._update_report(version, old_paused_s, in_flight_count, recomputed_tokens)

    def _cross_update(self, adapter: str, mode: UpdateMode) -> tuple[int, int]:
        """Move the requests of an adapter ("": of the model) to the weights of the last update; returns the counts of
        running requests and of recomputed tokens."""
        crossing = {req for req in self._open.values() if not adapter or (req.adapter or POLICY_ADAPTER) == adapter}
        running = [req for req in self._table.requests[: self._rows] if req is not None and req in crossing]
        for request in crossing:
            request.update = -1
            if request.slot >= 0:
                request.update = self._table.update[request.slot] = self._update_of(request)
        if mode == "abort":
            for request in running:
                if request.interruptible:
                    self._end_running(request, "abort")
        return len(running), self._recompute(running) if mode == "recompute" else 0

    def _update_report(self, version: int, before_s: float, in_flight: int, recomputed: int) -> AppliedWeights:
        """Make the report of an update; ``before_s``: time paused before it."""
        self.version = version
        self._note_idleness()
        pause_s = self._paused_s - before_s
        return AppliedWeights(version=version, pause_s=pause_s, in_flight=in_flight, reprefilled_tokens=recomputed)
