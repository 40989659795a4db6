"""The base class of the engines: it accepts, refuses and ends requests, and counts idle and paused time."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from headway.generator.engines.grammars import CompilingGrammars
from headway.generator.engines.prompt_pass import require_prompt
from headway.generator.engines.requests import EngineRequest, refusal
from headway.records.execution import MemoryMove
from headway.records.generation import (
    AppliedWeights,
    EngineStatistics,
    FinishReason,
    GenerationRequest,
    Probe,
    ProbeScores,
    PromptLogprobs,
    PublishedWeights,
    TokenDelta,
    UpdateMode,
)
from headway.records.tokens import TokenIds
from headway.tokens.tokenizer import Tokenizer

Entry = TypeVar("Entry", bound=EngineRequest)


class Memory(Protocol):
    """An engine's weights and KV, which can be moved off its device."""

    directory: str | None  # of the file with them, on a CPU; None: the machine's temporary folder

    @property
    def offloaded(self) -> bool:
        """Whether weights and KV are off the device: then the engine must neither step nor apply weights."""
        ...

    def offload(self) -> MemoryMove:
        """Free weights and KV; requests stay, and may come and end. No-op while offloaded. Raises StorageFailed,
        with nothing changed."""
        ...

    def onload(self) -> MemoryMove:
        """Undo `offload`; no-op while not offloaded."""
        ...


class Prompt(Protocol):
    """Given tokens whose log-probabilities an engine computes."""

    def advance(self) -> PromptLogprobs | None:
        """Compute a part, once between two steps; returns the log-probabilities after the last one."""
        ...


class Engine(ABC, Generic[Entry]):
    """The interface of an engine to its replica's process, and the request bookkeeping around sampling.

    Invariant: a request is in ``_open`` from ``submit`` to its one delta with a ``finish_reason``.

    An engine that enforces grammars itself sets ``_compiling``, where requests with a grammar wait first.
    """

    memory: Memory | None = None  # None: it can't be offloaded
    sees = False  # requests may have pictures
    prefetches = False  # `prefetch` does something

    def __init__(
        self,
        *,
        slots: int,
        context_tokens: int,
        vocabulary: int,
        tokenizer: Tokenizer | None,
        version: int,
        now: Callable[[], float],
    ) -> None:
        """``now``: monotonic seconds, for the statistics."""
        self.slots = slots
        self.context_tokens = context_tokens
        self.version = version
        self._vocabulary = vocabulary
        self._tokenizer = tokenizer
        self._now = now
        self._waiting: list[Entry] = []  # a heap of the requests without a slot
        self._compiling: CompilingGrammars[Entry] | None = None
        self._open: dict[str, Entry] = {}
        self._deltas: list[TokenDelta] = []
        self._arrivals = 0
        self._generated = self._prefilled = self._finished = self._preemptions = self._steps = 0
        self._idle_since: float | None = now()
        self._idle_s = self._paused_s = self._busy_s = 0.0

    @abstractmethod
    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests with reason "abort"; their last delta has the unsent tokens. Unknown ids: no-op."""

    @abstractmethod
    def step(self) -> bool:
        """Sample one token for every running request. Returns False when there is nothing to do."""

    @abstractmethod
    def apply(self, published: PublishedWeights, mode: UpdateMode) -> AppliedWeights:
        """Fetch, verify and apply a version between two steps (DESIGN rule 4). Raises WeightsCorrupt, with nothing
        changed, or WeightsMismatch, after which the engine samples no more."""

    def prefetch(self, published: PublishedWeights) -> None:
        """Fetch and verify a version beside the steps, in another thread, so that the pause of `apply`, which must
        follow, is shorter. Raises WeightsCorrupt, with nothing changed."""
        return

    @abstractmethod
    def score(self, probe: Probe) -> ProbeScores:
        """Score ``probe`` with the newest weights (the trained adapter's, where there is one), beside all requests."""

    def prompt_pass(self, ids: TokenIds, top: int = 0, adapter: str = "") -> Prompt:
        """Begin to compute the log-probabilities of ``ids``, and of the ``top`` likeliest tokens in each one's place,
        by the newest weights (``adapter``: its name, "" for the run's or none). Raises ConfigurationError."""
        require_prompt(ids, top, self.context_tokens, self._vocabulary)
        return self._prompt_pass(ids, top, adapter)

    @abstractmethod
    def _prompt_pass(self, ids: TokenIds, top: int, adapter: str) -> Prompt:
        """Begin the prompt, which is one that engines can compute."""

    @abstractmethod
    def statistics(self) -> EngineStatistics:
        """Return the counters since the start, and the present state."""

    @abstractmethod
    def _entry(self, request: GenerationRequest, arrival: int) -> Entry:
        """Make the engine's record of a request."""

    @abstractmethod
    def _emit_ready(self) -> None:
        """Make deltas of the running requests' unsent tokens."""

    @abstractmethod
    def _emit(
        self, entry: Entry, finish_reason: FinishReason | None = None, error: str = "", refused: bool = False
    ) -> None:
        """Make a delta of a request's unsent tokens; with ``finish_reason``, its last."""

    def _refusal(self, entry: Entry) -> str:
        """Return why this engine, unlike others, can't serve a valid request; "" if it can."""
        return ""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests. One that can't be served ends with its own "error" delta; the others are unaffected.

        Raises ValueError, with none queued, for an id that is already open: its deltas would be ambiguous.
        """
        request_ids = [request.request_id for request in requests]
        open_ids = [request_id for request_id in request_ids if request_id in self._open]
        if open_ids or len(set(request_ids)) < len(request_ids):
            raise ValueError(f"request ids must be unique among open requests: {open_ids or request_ids}")
        for request in requests:
            self._accept(request)
        self._note_idleness()

    def take_deltas(self, running: bool = True) -> list[TokenDelta]:
        """Return and clear the deltas since the last call, in order; without ``running``, only those of requests that
        have ended or crossed an update."""
        if running:
            self._emit_ready()
        deltas, self._deltas = self._deltas, []
        return deltas

    @property
    def open_requests(self) -> int:
        """Count of requests that run or wait."""
        return len(self._open)

    @property
    def ready_deltas(self) -> int:
        """Count of deltas that ``take_deltas(running=False)`` would return."""
        return len(self._deltas)

    def _accept(self, request: GenerationRequest) -> None:
        record = self._entry(request, self._arrivals)
        self._arrivals += 1
        self._open[record.request_id] = record
        reason = refusal(request, self.context_tokens, self._vocabulary, self._tokenizer) or self._refusal(record)
        if not reason and record.pixels and not self.sees:
            reason = "its prompt has pictures, which this engine can't read; valid: a model of transformers that can"
        if reason:
            self._end(record, "error", reason, refused=True)
        elif (finish_reason := record.already_ended(self._tokenizer, self.context_tokens)) is not None:
            self._end(record, finish_reason)
        elif self._compiling is not None and request.sampling.grammar:
            self._compiling.start(record)
            self._take_compiled()
        else:
            heapq.heappush(self._waiting, record)

    def _take_compiled(self, *, idle: bool = False) -> None:
        """Queue the requests whose grammars are compiled, and end those whose can't be."""
        for record, error, refused in () if self._compiling is None else self._compiling.take(idle=idle):
            if error:
                self._end(record, "error", error, refused=refused)
            else:
                heapq.heappush(self._waiting, record)

    def _end(self, entry: Entry, reason: FinishReason, error: str = "", *, refused: bool = False) -> None:
        """End a request with its last delta. ``refused``: the request itself is at fault."""
        self._emit(entry, reason, error, refused)
        self._ended(entry)

    def _end_waiting(self, entry: Entry) -> None:
        """End a waiting request with reason "abort", in linear time."""
        if self._compiling is None or not self._compiling.discard(entry):
            self._waiting.remove(entry)
            heapq.heapify(self._waiting)
        self._end(entry, "abort")

    def _ended(self, entry: Entry) -> None:
        """Close a request whose last delta has been made."""
        del self._open[entry.request_id]
        self._finished += 1

    # --- time and statistics --------------------------------------------------------------------------------

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count the time inside the block as paused, not as idle: no request could have been decoded."""
        started_s = self._now()
        try:
            yield
        finally:
            pause_s = self._now() - started_s
            self._paused_s += pause_s
            if self._idle_since is not None:
                self._idle_since += pause_s

    @property
    def idle_s(self) -> float:
        """Seconds without an open request."""
        return self._idle_s + (self._now() - self._idle_since if self._idle_since is not None else 0.0)

    def _note_idleness(self) -> None:
        """Start idle time after the last request ended, stop it when one is open again."""
        if not self._open and self._idle_since is None:
            self._idle_since = self._now()
        elif self._open and self._idle_since is not None:
            self._idle_s += self._now() - self._idle_since
            self._idle_since = None

    def _statistics(self, running: int, kv_used_tokens: int, kv_capacity_tokens: int) -> EngineStatistics:
        return EngineStatistics(
            version=self.version,
            running=running,
            waiting=len(self._open) - running,
            compiling=0 if self._compiling is None else len(self._compiling),
            slots=self.slots,
            kv_used_tokens=kv_used_tokens,
            kv_capacity_tokens=kv_capacity_tokens,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            finished=self._finished,
            preemptions=self._preemptions,
            busy_s=self._busy_s,
            idle_s=self.idle_s,
            paused_s=self._paused_s,
            decode_steps=self._steps,
        )
