"""A model call as the pool sees it: what was asked, what has arrived, who works on it."""

from __future__ import annotations

import asyncio

import msgspec

from headway.records.clients import Watch
from headway.records.generation import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    PartialResponse,
    TokenDelta,
    VersionSpan,
)


class Call:
    """One open request: *held* (no replica) -> *assigned* -> finished; a replica's death takes it back to held.

    Invariant: ids, logprobs and the tokens of all spans have equal lengths; ``partial()`` is all another replica
    needs to go on.
    """

    __slots__ = (
        "_ids",
        "_least_tokens",
        "_logprobs",
        "_most_tokens",
        "_spans",
        "_told_tokens",
        "cancelled",
        "first_token_s",
        "future",
        "opened_s",
        "outstanding",
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
        self._least_tokens = len(request.prompt_ids)
        self._most_tokens = self._least_tokens + request.sampling.max_tokens
        self.future = future
        self.replica: int | None = None
        self.ticket = ""  # the id it has inside that replica
        self._start_over()
        self.watch = watch
        self._told_tokens = len(self._ids)
        self.serial = 0  # in the order they came
        self.outstanding = self.outstanding_tokens  # as the router has counted it
        self.opened_s = 0.0
        self.prefix: list[tuple[int, int]] | None = None  # keys of its prompt's beginnings, once they were asked for
        self.cancelled = False  # it ends with the tokens it has, whoever worked on it
        self.probe = False  # its replica's breaker waits to hear how it ends
        self.refused_by: tuple[int, ...] = ()  # replicas that didn't accept it
        self.reprefills = 0
        self.resumes = 0
        self.first_token_s = 0.0

    def __lt__(self, other: Call) -> bool:
        """Who goes first of those that wait: the lower priority, which is the older group, then who came first."""
        return (self.request.priority, self.serial) < (other.request.priority, other.serial)

    @property
    def tokens(self) -> int:
        """Response tokens so far."""
        return len(self._ids)

    @property
    def outstanding_tokens(self) -> int:
        """Prompt and still allowed response tokens: what it may cost a replica."""
        return max(self._least_tokens, self._most_tokens - len(self._ids))

    def _start_over(self) -> None:
        """With the tokens that were asked with, alone."""
        partial = self.request.partial
        self._ids = list(partial.ids)
        self._logprobs = list(partial.logprobs)
        self._spans = [[span.version, span.tokens] for span in partial.versions]

    def absorb(self, delta: TokenDelta, now: float) -> None:
        """Take over a delta's tokens; a void one takes all back that were gained."""
        self.reprefills += delta.reprefilled
        if delta.void:
            self._start_over()
        if not delta.ids:
            return
        if self.first_token_s == 0.0:
            self.first_token_s = now
        self._ids.extend(delta.ids)
        self._logprobs.extend(delta.logprobs)
        if self._spans and self._spans[-1][0] == delta.version:
            self._spans[-1][1] += len(delta.ids)
        else:
            self._spans.append([delta.version, len(delta.ids)])

    def tell(self) -> None:
        """Tell who watches, when there is enough to tell."""
        watch = self.watch
        if watch is not None and len(self._ids) - self._told_tokens >= watch.every_tokens:
            self._told_tokens = len(self._ids)
            watch.told(self.partial())

    def partial(self) -> PartialResponse:
        """All tokens so far."""
        return PartialResponse(
            ids=tuple(self._ids),
            logprobs=tuple(self._logprobs),
            versions=tuple(VersionSpan(version=version, tokens=tokens) for version, tokens in self._spans),
        )

    def resubmission(self) -> GenerationRequest:
        """The request for the next replica: it goes on after the tokens so far."""
        return msgspec.structs.replace(self.request, request_id=self.ticket, partial=self.partial())

    def finish(self, reason: FinishReason, error: str = "", *, refused: bool = False) -> None:
        """Give the caller its result (none if it has stopped waiting)."""
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
