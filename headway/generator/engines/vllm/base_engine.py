"""Request bookkeeping of both vLLM engines: vLLM in this process, and behind HTTP.

Requests without a slot wait here, so that vLLM gets a prompt only under the weights that will compute it; from then on
vLLM's own scheduler decides. Sampled tokens become token deltas, split where the version changes.
"""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from headway.config.auto import VLLM_TEMPERATURES
from headway.control.logprob_limits import compare
from headway.generator.engines.engine import Engine
from headway.generator.engines.requests import EngineRequest
from headway.generator.engines.settings import EngineSettings
from headway.generator.engines.vllm.adapters import VllmAdapters, VllmRevision
from headway.records.errors import ConfigurationError, WeightsMismatch
from headway.records.generation import (
    BASE_MODEL,
    POLICY_ADAPTER,
    AppliedWeights,
    FinishReason,
    GenerationRequest,
    PathScores,
    Probe,
    ProbeScores,
    PromptLogprobs,
    PublishedWeights,
    TokenDelta,
    UpdateMode,
    probe_ids,
)
from headway.records.tokens import EXPERTS, TokenIds, TokenRows
from headway.tokens.tokenizer import Tokenizer


class VllmRequest(EngineRequest):
    """A request: *waiting* (here) -> *submitted* to vLLM under a ticket -> finished; an update returns a request
    without tokens, or without KV, to waiting. Invariant: ``ticket`` is set exactly while vLLM has the request.

    ``response`` has the tokens from before vLLM got the request, ``sampled`` those since.
    """

    def __init__(self, request: GenerationRequest, arrival: int) -> None:
        super().__init__(request, arrival)
        self.ticket = ""
        self.rows_known = request.rows_known
        self.handle: Any = None  # the engine's handle: vLLM's record, or the open stream
        self.sampled: list[int] = []
        self.preempted = 0  # preemptions counted so far
        self.unsent: list[int] = []  # tokens since the last delta, all of one version
        self.logprobs: list[float] = []
        self.routed: list[TokenRows] = []  # experts since the last delta
        self.version = -1
        self.revision: VllmRevision | None = None  # the adapter that vLLM has it with
        self.begun = request.partial.versions[-1].version if request.partial.versions else None

    def add_rows(self, experts: TokenRows) -> None:
        """Add the experts of the next tokens that vLLM has read."""
        self.routed.append(experts)
        self.rows += len(experts)

    @property
    def tokens(self) -> int:
        return super().tokens + len(self.sampled)


@dataclass(frozen=True)
class VllmPrompt:
    """Given tokens, which vLLM computes in its own chunks, beside its requests: in one ``advance``."""

    advance: Callable[[], PromptLogprobs]


class VllmRequests(Engine[VllmRequest]):
    """Base of the vLLM engines: requests and their tokens. Subclasses submit requests to vLLM and step it."""

    def __init__(
        self,
        settings: EngineSettings,
        *,
        name: str,
        context_tokens: int,
        vocabulary: int,
        tokenizer: Tokenizer | None,
        truncates: bool,
        precision: str,
        adapters: VllmAdapters | None,
        now: Callable[[], float],
    ) -> None:
        """``name``: vLLM's, in errors. ``context_tokens``: vLLM's own limit. ``truncates``: vLLM returns
        log-probabilities over the full vocabulary under top-p and top-k, too. ``precision``: of
        `control.agreement.precision_of`. ``adapters``: beside a model that stays as vLLM loaded it; subclasses register
        them."""
        super().__init__(
            slots=settings.slots,
            context_tokens=min(settings.max_context_tokens, context_tokens),
            vocabulary=vocabulary,
            tokenizer=tokenizer,
            version=settings.version,
            now=now,
        )
        self._name = name
        self._truncates = truncates
        self._probe_every_updates = settings.probe_every_updates
        self._submitted: dict[str, VllmRequest] = {}  # by ticket
        self._tickets = 0
        self._broken = False  # vLLM computes with unknown weights
        self._precision = "tf32" if precision == "float32" else precision
        self._adapters = adapters
        self.bias: dict[int, float] = {}  # by token id: added to the logits that vLLM samples from

    # --- requests to vLLM -------------------------------------------------------------------------------------

    @abstractmethod
    def _submit(self, entry: VllmRequest) -> None:
        """Submit a request to vLLM under a new ticket, or end it if vLLM refuses it."""

    @abstractmethod
    def _withdraw(self, entries: Sequence[VllmRequest]) -> None:
        """Abort requests in vLLM; they keep the tokens sampled so far. Some may finish meanwhile."""

    @abstractmethod
    def _pump(self) -> None:
        """Add the tokens that vLLM has sampled to their requests."""

    def step(self) -> bool:
        """See `Engine.step`."""
        if self._broken:
            return False
        while len(self._submitted) < self.slots and self._waiting:
            request = heapq.heappop(self._waiting)
            if request.sampling.grammar and request.response:
                self._restart_grammar(request)
            self._submit(request)
        if not self._submitted:
            self._note_idleness()  # vLLM may have refused all that were waiting
            return False
        started_s = self._now()
        self._pump()
        self._unload_idle()
        self._busy_s += self._now() - started_s
        self._note_idleness()
        return True

    # --- requests -------------------------------------------------------------------------------------------

    def abort(self, request_ids: Sequence[str]) -> None:
        """See `Engine.abort`."""
        for request_id in request_ids:
            request = self._open.get(request_id)
            if request is None:
                continue
            if request.ticket:
                self._end_submitted([request])
            else:
                self._end_waiting(request)
        self._note_idleness()

    def _restart_grammar(self, entry: VllmRequest) -> None:
        """Void a request's tokens: vLLM begins every request at the start of its grammar."""
        self._deltas.append(TokenDelta(request_id=entry.request_id, void=True))
        for unsent_part in (entry.unsent, entry.logprobs, entry.routed):
            unsent_part.clear()
        entry.response, entry.rows, entry.begun = TokenIds(), entry.rows_known, None
        entry.already_ended(self._tokenizer, self.context_tokens)  # its stop strings start over as well

    def _end_submitted(self, entries: Sequence[VllmRequest]) -> None:
        """End requests that vLLM has with reason "abort", unless they finish meanwhile."""
        self._withdraw(entries)
        for request in entries:
            if request.request_id in self._open:
                self._end(request, "abort")

    def _take_back(self, entries: Sequence[VllmRequest]) -> None:
        """Return requests from vLLM to waiting, unless they finish meanwhile."""
        self._withdraw(entries)
        for request in entries:
            if request.request_id in self._open:
                heapq.heappush(self._waiting, request)

    def _entry(self, request: GenerationRequest, arrival: int) -> VllmRequest:
        return VllmRequest(request, arrival)

    def _emit_ready(self) -> None:
        for request in self._submitted.values():
            if request.unsent or request.reprefilled:
                self._emit(request)

    def _refusal(self, entry: VllmRequest) -> str:
        """Return why vLLM can't serve a request that the torch engine could; "" when it can."""
        params = entry.sampling
        lowest_t, highest_t = VLLM_TEMPERATURES
        if unknown_reason := self._unknown_adapter(entry.adapter):
            return unknown_reason
        if params.temperature != 0 and not lowest_t <= params.temperature <= highest_t:
            return f"temperature = {params.temperature}: vLLM samples at 0 and from {lowest_t} to {highest_t}"
        if params.kept_sets:
            return f"kept_sets = {params.kept_sets}: vLLM doesn't return among which tokens it sampled; valid: 0"
        if (params.top_p < 1 or params.top_k > 0) and not self._truncates:
            return (
                f"top_p = {params.top_p}, top_k = {params.top_k}: vLLM's own sampler has log-probabilities of the kept "
                "tokens alone, and those of the full vocabulary are needed; valid: top_p = 1, top_k = 0"
            )
        return ""

    def _unknown_adapter(self, name: str) -> str:
        """Return why nothing can be computed with the adapter; "" if it can."""
        if self._adapters is not None:
            return self._adapters.unknown(name)
        return "" if name in ("", BASE_MODEL) else f"there is no adapter {name!r}; registered: none"

    def _drop(self, entry: VllmRequest) -> None:
        """Abort a request in vLLM whose further tokens aren't needed."""
        self._withdraw([entry])

    def _may_sample(self, entry: VllmRequest) -> int:
        """Count of tokens that a request may still sample."""
        return min(entry.sampling.max_tokens - len(entry.response), self.context_tokens - entry.tokens)

    def _choose_revision(self, entry: VllmRequest) -> VllmRevision | None:
        """Fix the adapter of a request that is to be submitted."""
        if self._adapters is not None:
            entry.revision = self._adapters.chosen(entry.adapter, entry.begun)
        return entry.revision

    def _note_submitted(self, entry: VllmRequest, ticket: str) -> None:
        """Note that vLLM has accepted a request under ``ticket``."""
        entry.ticket, entry.preempted = ticket, 0
        entry.reprefilled = entry.reprefilled or bool(entry.response)
        self._submitted[ticket] = entry

    def _forget_ticket(self, entry: VllmRequest) -> None:
        del self._submitted[entry.ticket]
        entry.ticket, entry.handle = "", None
        entry.response += entry.sampled
        entry.sampled.clear()

    # --- outputs of vLLM ----------------------------------------------------------------------------------------

    def _append_tokens(
        self,
        entry: VllmRequest,
        ids: Sequence[int],
        logprobs: Sequence[float],
        version: int,
        ended: FinishReason | None,
        error: str = "",
    ) -> None:
        """Add a request's new tokens, all of one version. ``ended``: vLLM's finish reason, None while it runs."""
        if ids:
            if entry.unsent and entry.version != version:
                self._emit(entry)
            entry.version = version
        finish_reason = ended
        for token, logprob in zip(ids, logprobs, strict=True):
            if not math.isfinite(logprob):
                finish_reason, error = "error", "the model's output is not finite"
                break
            entry.unsent.append(token)
            entry.logprobs.append(logprob)
            entry.sampled.append(token)
            self._generated += 1
            if entry.stop_strings is not None and entry.stop_strings.push(token):
                finish_reason = "stop"
                break
        if finish_reason is None:
            return
        if ended is None:
            self._drop(entry)
        else:
            self._forget_ticket(entry)
        self._end(entry, finish_reason, error)

    def _note_recomputed(self, entry: VllmRequest) -> None:
        """Note that a request's KV is recomputed: its unsent tokens still had the old KV."""
        if entry.unsent:
            self._emit(entry)
        entry.reprefilled = True

    def _cross_update(self, running: Sequence[VllmRequest], mode: UpdateMode) -> int:
        """End the requests that cross an update, or note that their KV is recomputed, by the update mode. Returns the
        count of recomputed tokens."""
        if mode == "abort":
            self._end_submitted([request for request in running if request.interruptible])
        if mode != "recompute":
            return 0
        for request in running:
            self._note_recomputed(request)
        return sum(request.tokens for request in running)

    # --- weights ------------------------------------------------------------------------------------------------

    def apply(self, published: PublishedWeights, mode: UpdateMode) -> AppliedWeights:
        """See `Engine.apply`."""
        if published.adapter or self._adapters is not None:
            return self._apply_adapter(published, mode)
        return self._apply_model(published, mode)

    @abstractmethod
    def _apply_model(self, published: PublishedWeights, mode: UpdateMode) -> AppliedWeights:
        """Fetch, verify and apply a version of the model's own weights, and probe that vLLM samples from it. Raises
        WeightsCorrupt, with nothing changed, or WeightsMismatch."""

    @abstractmethod
    def _load_revision(self, label: str, folder: Path) -> Any:
        """Load a folder in PEFT's format into vLLM as a LoRA; returns its handle. Raises WeightsMismatch."""

    @abstractmethod
    def _unload_revision(self, revision: VllmRevision) -> None:
        """Remove a LoRA, which no request in vLLM has, from vLLM."""

    @abstractmethod
    def _prompt_logprobs(self, ids: Sequence[int], top: int, revision: VllmRevision | None) -> PromptLogprobs:
        """Return vLLM's log-probabilities of ``ids``, and of the ``top`` likeliest tokens in each one's place, by its
        whole path. Raises ConfigurationError for what vLLM refuses, and WeightsMismatch if none come."""

    def _sequence_logprobs(self, ids: Sequence[int], revision: VllmRevision | None) -> list[float]:
        """Return vLLM's log-probabilities of ``ids[1:]``."""
        return self._prompt_logprobs(ids, 0, revision).logprobs[1:].tolist()

    def _prompt_pass(self, ids: TokenIds, top: int, adapter: str) -> VllmPrompt:
        reason = self._unknown_adapter(adapter)
        if len(ids) == self.context_tokens:
            reason = f"prompt: {len(ids)} tokens; valid: 1 to {len(ids) - 1}: in vLLM's context one more is sampled"
        if reason:
            raise ConfigurationError(reason)

        def advance() -> PromptLogprobs:
            if self._broken:
                raise WeightsMismatch(f"{self._name} computes with unknown weights")
            return self._prompt_logprobs(ids, top, self._newest_revision(adapter))

        return VllmPrompt(advance)

    def _newest_revision(self, adapter: str) -> VllmRevision | None:
        return None if self._adapters is None else self._adapters.chosen(adapter, None)

    @abstractmethod
    def _drained(self) -> AbstractContextManager[object]:
        """Take all tokens sampled by now. Where vLLM is in this process, nothing is sampled in the block."""

    def _register_adapters(self) -> None:
        """Register the adapters as they are before any update, each once it is proved that vLLM computes its targets.
        Raises ConfigurationError, which names a target that vLLM leaves out."""
        adapters = self._adapters
        for name in adapters.names if adapters is not None else ():
            assert adapters is not None
            proof_revision = self._loaded(adapters, name, prove=True)
            ids = probe_ids(0, self._vocabulary, self.context_tokens)
            got = self._sequence_logprobs(ids, proof_revision)
            self._unload_revision(proof_revision)
            if difference := compare(got, adapters.logprobs(name, ids, prove=True), self._precision).wrong:
                why = f"{self._name} does not compute adapter {name!r} as the trainer does: {difference}"
                raise ConfigurationError(f"{why}{adapters.absent(name, ids, got)}; valid: generator.engine = 'torch'")
            adapters.add(self._loaded(adapters, name))

    def _loaded(self, adapters: VllmAdapters, name: str, *, prove: bool = False) -> VllmRevision:
        with adapters.written(name, prove=prove) as (label, folder):
            return VllmRevision(name, self.version, label, self._load_revision(label, folder))

    def _unload_idle(self) -> None:
        """Unload the revisions that no request holds any more."""
        if self._adapters is None or len(self._adapters.registered) == len(self._adapters.newest):
            return
        for revision in self._adapters.idle(self._held_revisions()):
            self._adapters.registered.remove(revision)
            self._unload_revision(revision)

    def _held_revisions(self) -> set[VllmRevision | None]:
        return {request.revision for request in self._submitted.values()}

    def _requeue(self, entries: Sequence[VllmRequest]) -> list[VllmRequest]:
        """Return requests from vLLM to waiting, to be submitted with the newest revision; returns the unfinished."""
        self._take_back(entries)
        unfinished_requests = [request for request in entries if request.request_id in self._open]
        for request in unfinished_requests:
            if request.unsent:
                self._emit(request)
        return unfinished_requests

    def _apply_adapter(self, published: PublishedWeights, mode: UpdateMode) -> AppliedWeights:
        """Register a version of an adapter. ``finish``: requests that vLLM has keep their revision; ``recompute``: they
        are submitted again, with their tokens; ``abort``: they are parked, or treated as by ``recompute`` where not
        interruptible. Where too many revisions are held, the oldest one's requests are submitted again.

        Raises WeightsCorrupt or ConfigurationError, with nothing changed, or WeightsMismatch."""
        adapters, name, old_paused_s, started_s = self._adapters, published.adapter, self._paused_s, self._now()
        if adapters is None or mode == "keep":
            reason = "a request's KV is of the revision that it came with" if adapters else "there is none"
            raise ConfigurationError(f"an update of adapter {name!r} with update_mode = {mode!r} in vLLM: {reason}")
        adapters.fetch(published)
        fetch_s = self._now() - started_s
        with self._drained():
            bound = [req for req in self._submitted.values() if req.revision is not None and req.revision.name == name]
            # Within a grammar, a request that is submitted to vLLM again would lose its tokens.
            moved = [] if mode == "finish" else [req for req in bound if not req.sampling.grammar or not req.sampled]
            in_flight_count = len(moved)
            if mode == "abort":
                self._end_submitted([req for req in moved if req.interruptible])
            moved = self._requeue([req for req in moved if req.ticket])
            while (crowding_revision := adapters.crowding(name, self._held_revisions())) is not None:
                moved += self._requeue([req for req in self._submitted.values() if req.revision is crowding_revision])
                adapters.registered.remove(crowding_revision)
                self._unload_revision(crowding_revision)
            self.version = published.version
            adapters.add(self._loaded(adapters, name))
            self._unload_idle()
        if self._probe_due(adapters.updates):
            ids, delta_index = probe_ids(adapters.updates, self._vocabulary, self.context_tokens), len(self._deltas)
            actual = self._sequence_logprobs(ids, adapters.newest[name])
            if difference := compare(actual, adapters.logprobs(name, ids), self._precision).wrong:
                self._break(f"adapter {name!r}: {difference}", delta_index)
        self._note_idleness()
        return AppliedWeights(
            version=published.version,
            fetch_s=fetch_s,
            pause_s=self._paused_s - old_paused_s,
            in_flight=in_flight_count,
            reprefilled_tokens=sum(req.tokens for req in moved),
        )

    def score(self, probe: Probe) -> ProbeScores:
        """See `Engine.score`; vLLM computes a prompt's log-probabilities by prefill and shows no hidden states."""
        logprobs = self._prompt_logprobs(probe.ids, 0, self._newest_revision(POLICY_ADAPTER)).logprobs[1:]
        return ProbeScores(probe=probe, precision=self._precision, paths={"prefill": PathScores(logprobs=logprobs)})

    def _probe_due(self, updates: int) -> bool:
        return self._probe_every_updates > 0 and updates % self._probe_every_updates == 0

    def _break(self, reason: str, since: int | None = None) -> NoReturn:
        """Stop sampling and void all requests in vLLM. ``since``: first delta that may be of other weights.

        Raises WeightsMismatch."""
        self._broken = True
        error_text = f"{self._name} does not compute with the published weights of version {self.version}: {reason}"
        self._void_submitted(error_text, since)
        raise WeightsMismatch(error_text)

    def _end_void(self, entry: VllmRequest, error: str) -> None:
        """End a request and void all its tokens, those in earlier deltas included."""
        if entry.ticket:
            self._drop(entry)
        self._deltas.append(TokenDelta(request_id=entry.request_id, finish_reason="error", error=error, void=True))
        self._ended(entry)

    def _void_submitted(self, error: str, since: int | None = None) -> None:
        """Void all requests in vLLM, and those that finished in the deltas from ``since`` on: vLLM samples from other
        weights than assumed."""
        for request in list(self._submitted.values()):
            self._end_void(request, error)
        if since is not None:
            self._deltas[since:] = [
                TokenDelta(request_id=delta.request_id, finish_reason="error", error=error, void=True)
                for delta in self._deltas[since:]
                if delta.finish_reason is not None
            ]

    def _emit(
        self, entry: VllmRequest, finish_reason: FinishReason | None = None, error: str = "", refused: bool = False
    ) -> None:
        self._deltas.append(
            TokenDelta.of(
                entry.request_id,
                entry.unsent,
                entry.logprobs,
                version=entry.version if entry.unsent else -1,
                finish_reason=finish_reason,
                error=error,
                refused=refused,
                reprefilled=entry.reprefilled,
                token_rows={EXPERTS: TokenRows.joined(entry.routed)} if entry.routed else {},
            )
        )
        entry.unsent.clear()
        entry.logprobs.clear()
        entry.routed.clear()
        entry.reprefilled = False
