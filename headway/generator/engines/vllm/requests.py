"""Requests of the vLLM engines, whether vLLM runs in this process or behind HTTP.

Requests without a slot wait here, so vLLM is given a prompt only under the weights that will compute it; from then on
its own scheduler decides. What vLLM samples goes out as token deltas, split where the version changes.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from headway.config.engines import VLLM_TEMPERATURES
from headway.generator.engines.open_requests import OpenRequests
from headway.generator.engines.requests import EngineRequest
from headway.records.generation import FinishReason, GenerationRequest, TokenDelta
from headway.tokens.tokenizer import Tokenizer


class VllmRequest(EngineRequest):
    """A request: *waiting* (here) -> *given* to vLLM under a ticket -> finished; an update can take one that has no
    token yet, or no KV, back to waiting. Invariant: ``ticket`` is set exactly while vLLM has it."""

    __slots__ = ("logprobs", "own", "preempted", "sampled", "ticket", "unsent", "version")
    # ``response`` holds its tokens up to when it was given to vLLM, ``sampled`` those since.

    def __init__(self, request: GenerationRequest, arrival: int) -> None:
        super().__init__(request, arrival)
        self.ticket = ""
        self.own: Any = None  # vLLM's record of it
        self.sampled: list[int] = []
        self.preempted = 0  # how often vLLM took its KV, as far as it has been told
        self.unsent: list[int] = []  # tokens since the last delta, all of one version
        self.logprobs: list[float] = []
        self.version = -1

    @property
    def tokens(self) -> int:
        return super().tokens + len(self.sampled)


class VllmRequests(OpenRequests[VllmRequest]):
    """Half an engine: its requests, and what vLLM says of them. The other half gives them to vLLM."""

    def __init__(
        self,
        *,
        slots: int,
        context_tokens: int,
        vocabulary: int,
        tokenizer: Tokenizer | None,
        truncates: bool,
        now: Callable[[], float],
    ) -> None:
        """``truncates``: it has log-probabilities of the whole vocabulary under top-p and top-k, too."""
        super().__init__(
            slots=slots, context_tokens=context_tokens, vocabulary=vocabulary, tokenizer=tokenizer, now=now
        )
        self._truncates = truncates
        self._given: dict[str, VllmRequest] = {}  # by ticket
        self._tickets = 0
        self._generated = 0

    # --- what vLLM is told ------------------------------------------------------------------------------------

    @abstractmethod
    def _give(self, entry: VllmRequest) -> None:
        """Hand a request to vLLM under a new ticket, or end it where vLLM refuses it."""

    @abstractmethod
    def _withdraw(self, entries: Sequence[VllmRequest]) -> None:
        """Take requests back from vLLM; what it sampled for them stays with them. One may end meanwhile."""

    # --- requests -------------------------------------------------------------------------------------------

    def abort(self, request_ids: Sequence[str]) -> None:
        """See `TorchEngine.abort`."""
        for request_id in request_ids:
            entry = self._open.get(request_id)
            if entry is None:
                continue
            if entry.ticket:
                self._withdraw([entry])
            else:
                self._waiting.remove(entry)
            if request_id in self._open:
                self._end(entry, "abort")
        self._note_idleness()

    def _entry(self, request: GenerationRequest, arrival: int) -> VllmRequest:
        return VllmRequest(request, arrival)

    def _emit_ready(self) -> None:
        for entry in self._given.values():
            if entry.unsent or entry.reprefilled:
                self._emit(entry)

    def _unserved(self, entry: VllmRequest) -> str:
        """Return why vLLM can't serve a request that the torch engine would; "" if it can."""
        how = entry.sampling
        lowest, highest = VLLM_TEMPERATURES
        if how.temperature != 0 and not lowest <= how.temperature <= highest:
            return f"temperature = {how.temperature}: vLLM samples at 0 and from {lowest} to {highest}"
        if (how.top_p < 1 or how.top_k > 0) and not self._truncates:
            return (
                f"top_p = {how.top_p}, top_k = {how.top_k}: vLLM's own sampler has log-probabilities of the kept "
                "tokens alone, and those of the full vocabulary are needed; valid: top_p = 1, top_k = 0"
            )
        return ""

    def _drop(self, entry: VllmRequest) -> None:
        """Take one back of which nothing more is wanted."""
        self._withdraw([entry])

    def _give_waiting(self) -> None:
        """Give vLLM what waits, as long as there are slots."""
        while len(self._given) < self.slots and (head := self._waiting.peek()) is not None:
            self._waiting.pop()
            assert isinstance(head, VllmRequest)
            self._give(head)

    def _may_sample(self, entry: VllmRequest) -> int:
        """Tokens a request may still get."""
        return min(entry.sampling.max_tokens - len(entry.response), self.context_tokens - entry.tokens)

    def _now_given(self, entry: VllmRequest, ticket: str) -> None:
        """vLLM has taken it."""
        entry.ticket, entry.preempted = ticket, 0
        entry.reprefilled = entry.reprefilled or bool(entry.response)
        self._given[ticket] = entry

    def _forget_ticket(self, entry: VllmRequest) -> None:
        del self._given[entry.ticket]
        entry.ticket, entry.own = "", None
        entry.response += entry.sampled
        entry.sampled.clear()

    # --- what vLLM says -----------------------------------------------------------------------------------------

    def _gained(
        self,
        entry: VllmRequest,
        ids: Sequence[int],
        logprobs: Sequence[float],
        version: int,
        ended: FinishReason | None,
        error: str = "",
    ) -> None:
        """A request's new tokens, all of one version; ``ended``: vLLM has no more for it."""
        if ids:
            if entry.unsent and entry.version != version:
                self._emit(entry)
            entry.version = version
        over = ended
        for token, logprob in zip(ids, logprobs, strict=True):
            if not math.isfinite(logprob):
                over, error = "error", "the model's output is not finite"
                break
            entry.unsent.append(token)
            entry.logprobs.append(logprob)
            entry.sampled.append(token)
            self._generated += 1
            if entry.stop_strings is not None and entry.stop_strings.push(token):
                over = "stop"
                break
        if over is None:
            return
        if ended is None:
            self._drop(entry)
        else:
            self._forget_ticket(entry)
        self._end(entry, over, error)

    def _end_void(self, entry: VllmRequest, error: str) -> None:
        """End one whose tokens are not to be believed, those that were handed out already included."""
        if entry.ticket:
            self._drop(entry)
        self._deltas.append(TokenDelta(request_id=entry.request_id, finish_reason="error", error=error, void=True))
        self._ended(entry)

    def _void_given(self, error: str, since: int | None = None) -> None:
        """vLLM samples from something else than was thought: all that it has ends void, and what has ended in the
        deltas from ``since`` on."""
        for entry in list(self._given.values()):
            self._end_void(entry, error)
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
            )
        )
        entry.unsent.clear()
        entry.logprobs.clear()
        entry.reprefilled = False
