"""An open request as the pool sees it: its arguments, its tokens so far, the replica it is on."""

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
)
from headway.records.token_block import TokenBlock


class OpenRequest:
    """A request of the pool: *held* (no replica) -> *assigned* -> finished; a replica's death takes it back to held.

    ``partial()`` is all that another replica needs to resume it.
    """

    __slots__ = (
        "_block",
        "_least_tokens",
        "_most_tokens",
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
        self._told_tokens = len(self._block)
        self.serial = 0  # by order of arrival
        self.outstanding = self.outstanding_tokens  # as last counted by the router
        self.opened_s = 0.0
        self.prefix: list[tuple[int, int]] | None = None  # keys of its prompt's prefixes, once computed
        self.cancelled = False  # ends with its tokens so far, even if its replica dies before the abort arrives
        self.probe = False  # its outcome decides whether its replica's breaker closes
        self.refused_by: tuple[int, ...] = ()  # indices of replicas that didn't accept it
        self.reprefills = 0
        self.resumes = 0
        self.first_token_s = 0.0

    def __lt__(self, other: OpenRequest) -> bool:
        """Order of waiting requests: lower priority first (the older group), then order of arrival."""
        return (self.request.priority, self.serial) < (other.request.priority, other.serial)

    @property
    def tokens(self) -> int:
        """Count of response tokens so far."""
        return len(self._block)

    @property
    def outstanding_tokens(self) -> int:
        """Prompt tokens plus response tokens still allowed: the load that the request may put on a replica."""
        return max(self._least_tokens, self._most_tokens - len(self._block))

    def _start_over(self) -> None:
        """Drop the tokens gained here; those that the request came with stay."""
        self._block = TokenBlock(self.request.partial)

    def absorb(self, delta: TokenDelta, now: float) -> None:
        """Append a delta's tokens; a void delta drops all tokens gained before."""
        if delta.reprefilled:
            self.reprefills += 1
        if delta.void:
            self._start_over()
        if data := delta.data:
            if not self.first_token_s:
                self.first_token_s = now
            self._block.append(data, delta.version)

    def tell(self) -> None:
        """Notify the watch once enough tokens are new."""
        watch = self.watch
        if watch is not None and len(self._block) - self._told_tokens >= watch.every_tokens:
            self._told_tokens = len(self._block)
            watch.told(self.partial())

    def partial(self) -> PartialResponse:
        """Return all response tokens so far, with log-probabilities and versions."""
        return self._block.response()

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
