"""An open request as the pool sees it: its arguments, its tokens so far, the replica it is on."""

from __future__ import annotations

import asyncio

import msgspec

from headway.records.clients import Watch
from headway.records.generation import FinishReason, GenerationRequest, GenerationResult, PartialResponse, TokenDelta
from headway.records.token_block import TokenBlock


class OpenRequest:
    """An open request: *held* (no replica) -> *assigned* -> finished; a replica's death returns it to held.

    ``partial()`` is all that another replica needs to resume it.
    """

    __slots__ = (
        "_block",
        "_max_tokens",
        "_notified_tokens",
        "_prompt_tokens",
        "cancelled",
        "first_token_s",
        "future",
        "opened_s",
        "outstanding_tokens",
        "prefix",
        "probe",
        "refused_by",
        "replica",
        "reprefills",
        "request",
        "resumes",
        "serial",
        "ticket",
        "watch",
    )

    def __init__(
        self, request: GenerationRequest, future: asyncio.Future[GenerationResult], watch: Watch | None = None
    ) -> None:
        self.request = request
        self._prompt_tokens = len(request.prompt_ids)
        self._max_tokens = self._prompt_tokens + request.sampling.max_tokens
        self.outstanding_tokens = 0  # prompt and still allowed response tokens: what it may cost a replica
        self.future = future
        self.replica: int | None = None
        self.ticket = ""  # the id it has inside that replica
        self._start_over()
        self.watch = watch
        self._notified_tokens = len(self._block)
        self.serial = 0  # order of arrival
        self.opened_s = 0.0
        self.prefix: list[tuple[int, int]] | None = None  # keys of its prompt's prefixes, once computed
        self.cancelled = False  # ends with its tokens so far, even if its replica dies before the abort arrives
        self.probe = False  # its outcome decides whether its replica's breaker closes
        self.refused_by: tuple[int, ...] = ()  # indices of replicas that didn't accept it
        self.reprefills = 0
        self.resumes = 0
        self.first_token_s = 0.0

    def __lt__(self, other: OpenRequest) -> bool:
        """Order waiting requests: the lower priority (the older group) first, then the earlier arrival."""
        return (self.request.priority, self.serial) < (other.request.priority, other.serial)

    @property
    def tokens(self) -> int:
        """Response tokens so far."""
        return self._block.tokens

    def _start_over(self) -> None:
        """Drop all tokens except those that the request was opened with."""
        self._block = TokenBlock(self.request.partial)
        self._count()

    def _count(self) -> None:
        remaining_tokens = self._max_tokens - self._block.tokens
        self.outstanding_tokens = remaining_tokens if remaining_tokens > self._prompt_tokens else self._prompt_tokens

    def absorb(self, delta: TokenDelta, now: float) -> None:
        """Append a delta's tokens. A void delta revokes all tokens sampled since the request was opened; if the request
        continues, those that it was opened with too."""
        if delta.reprefilled:
            self.reprefills += 1
        if delta.void:
            if delta.finish_reason is None:
                self.request = msgspec.structs.replace(self.request, partial=PartialResponse())
            self._start_over()
        if delta.token_rows:
            self._block.append_rows(delta.token_rows)
        if token_bytes := delta.data:
            if not self.first_token_s:
                self.first_token_s = now
            self._block.append(token_bytes, delta.version)
            remaining = self._max_tokens - self._block.tokens  # as _count: this runs for every delta
            self.outstanding_tokens = remaining if remaining > self._prompt_tokens else self._prompt_tokens

    def notify_watch(self) -> None:
        """Notify the watch if enough tokens are new."""
        watch = self.watch
        if watch is not None and len(self._block) - self._notified_tokens >= watch.every_tokens:
            self._notified_tokens = len(self._block)
            watch.on_tokens(self._block.response(with_rows=False))

    def partial(self) -> PartialResponse:
        """All tokens so far."""
        initial_response = self.request.partial
        return initial_response if self._block.tokens == len(initial_response.ids) else self._block.response()

    def resubmission(self) -> GenerationRequest:
        """Return the request for the next replica, which resumes after the tokens so far."""
        return msgspec.structs.replace(self.request, request_id=self.ticket, partial=self.partial())

    def finish(self, reason: FinishReason, error: str = "", *, refused: bool = False) -> None:
        """Resolve the caller's future with the result; no-op if the caller has stopped waiting."""
        if self.future.done():
            return
        self.future.set_result(
            GenerationResult(
                request_id=self.request.request_id,
                response=self.partial(),
                finish_reason=reason,
                error=error,
                refused=refused,
                reprefills=self.reprefills,
                resumes=self.resumes,
                first_token_s=self.first_token_s,
            )
        )

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)
