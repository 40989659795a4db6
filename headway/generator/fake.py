"""A generator that samples nothing, deterministically, in time that passes only on the injected clock."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable, Collection

from headway.records.clients import Watch
from headway.records.errors import HeadwayError
from headway.records.generation import (
    AppliedWeights,
    EngineStatistics,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    PartialResponse,
    PublishedWeights,
    UpdateMode,
    VersionSpan,
)
from headway.runtime.clock import Clock

TokenLatency = float | Callable[[int], float]
_ROUNDING = 1e-6  # tokens: what adding up times may lose
_PERIOD = 991  # the tokens of a response repeat after this many; prime, so that seeds differ


class _Request:
    """One request in the fake. ``base``: the work at which its first new token began."""

    def __init__(
        self,
        request: GenerationRequest,
        serial: int,
        future: asyncio.Future[GenerationResult],
        watch: Watch | None,
    ) -> None:
        self.watch = watch
        self.told = len(request.partial.ids)  # response tokens when it was last told
        self.request = request
        self.serial = serial
        self.future = future
        self.length = 0  # response tokens it will end with
        self.reason: FinishReason = "stop"
        self.base = 0.0
        self.change = 0  # index of the version it started under
        self.running = False
        self.first_token_s = 0.0
        self.reprefills = 0

    @property
    def resumed_tokens(self) -> int:
        return len(self.request.partial.ids)


class FakeGenerator:
    """Stand-in for ``GeneratorPool``: same protocol, continuous batching over ``slots``, described latencies.

    All running requests advance together: one token each per ``token_s`` (a number, or a function of how many run).
    ``length_of(request)``: tokens its response would have; one above ``max_tokens`` ends with "length".
    ``prefill_s(request)``: time before its first token. ``update_s``: how long an update pauses everything.
    ``error_of(request)``: a cause makes the request fail after its prefill, "" lets it be.

    A token belongs to the version applied when it was completed. Equal calls at equal times give equal results;
    a response's tokens depend only on seed and position.

    Example: token_s = 1, one slot, a request of length 4 at t = 0, version 1 applied at t = 2.5 (update_s = 0): it
    ends at t = 4 with spans (version 0, 2 tokens), (version 1, 2 tokens).
    """

    def __init__(
        self,
        clock: Clock,
        *,
        slots: int = 64,
        token_s: TokenLatency = 0.01,
        length_of: Callable[[GenerationRequest], int] | None = None,
        prefill_s: Callable[[GenerationRequest], float] | None = None,
        update_s: float = 0.0,
        update_mode: UpdateMode = "keep",
        error_of: Callable[[GenerationRequest], str] | None = None,
        version: int = 0,
        shares_devices: bool = False,
        lend_s: float = 0.0,
    ) -> None:
        """``shares_devices``: with the trainer, so that lending them stops it, ``lend_s`` after it was asked."""
        self._clock = clock
        self._shares_devices = shares_devices
        self._lend_s = lend_s
        self._lent = False
        self._slots = slots
        self._token_s = token_s
        self._length_of = length_of or _length_from_seed
        self._prefill_s = prefill_s
        self._update_s = update_s
        self._mode: UpdateMode = update_mode
        self._error_of = error_of
        self._work = 0.0  # tokens every slot has completed since the start
        self._work_at_s = clock.now()
        self._paused = False
        self._changes: list[tuple[float, int]] = [(0.0, version)]  # work at which each version was applied
        self._waiting: list[tuple[int, int, _Request]] = []
        self._running: dict[int, _Request] = {}
        self._due: list[tuple[float, int, _Request]] = []  # (work at its end, serial, request)
        self._watched: list[tuple[float, int, _Request]] = []  # (work at which its watch is told, serial, request)
        self._open: dict[str, _Request] = {}
        self._serial = 0
        self._timer: asyncio.Task[None] | None = None
        self._timer_due_s = math.inf
        self._updating = asyncio.Lock()
        self._stopped = False
        self._generated = self._finished = 0
        self._busy_s = self._idle_s = self._paused_s = self._lent_s = 0.0

    # --- the Generator protocol -----------------------------------------------------------------------------

    async def start(self) -> None:
        self._work_at_s = self._clock.now()

    async def generate(self, request: GenerationRequest, watch: Watch | None = None) -> GenerationResult:
        """See :class:`headway.records.clients.Generator`."""
        if self._stopped:
            raise HeadwayError("the generator is stopped")
        if request.request_id in self._open:
            raise ValueError(f"request {request.request_id!r} is already open")
        entry = _Request(request, self._serial, asyncio.get_running_loop().create_future(), watch)
        self._serial += 1
        wanted = max(1, self._length_of(request))
        entry.length = min(wanted, request.sampling.max_tokens)
        entry.reason = "stop" if wanted <= request.sampling.max_tokens else "length"
        self._open[request.request_id] = entry
        self._advance()
        if entry.length <= entry.resumed_tokens:
            self._end(entry, entry.reason)
        else:
            heapq.heappush(self._waiting, (request.priority, entry.serial, entry))
            self._settle()
        try:
            return await entry.future
        finally:
            if self._open.get(request.request_id) is entry:  # the caller was cancelled
                self._advance()
                self._remove(entry)
                self._settle()

    def cancel(self, request_id: str) -> None:
        """End a request with reason "abort" and its tokens so far. Unknown ids: no-op."""
        entry = self._open.get(request_id)
        if entry is not None:
            self._advance()
            self._end(entry, "abort")
            self._settle()

    def tokens_so_far(self, request_id: str) -> int:
        """See :class:`headway.records.clients.Generator`."""
        entry = self._open.get(request_id)
        if entry is None:
            return 0
        self._advance()
        return entry.resumed_tokens + self._produced(entry)

    async def update_weights(self, weights: PublishedWeights) -> list[AppliedWeights]:
        """Apply a version in flight, in the fake's update mode."""
        async with self._updating:
            self._advance()
            crossing = list(self._running.values())
            reprefilled = 0
            if self._mode == "abort":
                for entry in crossing:
                    if entry.request.interruptible:
                        self._end(entry, "abort")
            elif self._mode == "recompute":
                for entry in crossing:
                    entry.reprefills += 1
                    reprefilled += len(entry.request.prompt_ids) + entry.resumed_tokens + self._produced(entry)
            self._paused = True
            self._settle()
            if self._update_s > 0:
                await self._clock.sleep(self._update_s)
            self._advance()
            self._paused = False
            self._changes.append((self._work, weights.version))
            self._settle()
        return [
            AppliedWeights(
                version=weights.version,
                pause_s=self._update_s,
                in_flight=len(crossing),
                reprefilled_tokens=reprefilled,
            )
        ]

    async def applied_version(self) -> int:
        return self._changes[-1][1]

    async def lend_devices(self) -> None:
        """See :class:`headway.records.clients.Generator`."""
        if self._shares_devices and self._lend_s:
            await self._clock.sleep(self._lend_s)
        self._set_lent(self._shares_devices)

    async def reclaim_devices(self) -> None:
        """See :class:`headway.records.clients.Generator`."""
        self._set_lent(False)

    async def rest_replicas(self, resting: Collection[int]) -> None:
        """One replica can't rest."""

    async def statistics(self) -> list[EngineStatistics]:
        self._advance()
        running = self._running.values()
        produced = [self._produced(entry) for entry in running]
        held = sum(len(entry.request.prompt_ids) + entry.resumed_tokens for entry in running) + sum(produced)
        return [
            EngineStatistics(
                version=self._changes[-1][1],
                running=len(self._running),
                waiting=len(self._open) - len(self._running),
                slots=self._slots,
                kv_used_tokens=held,
                generated_tokens=self._generated + sum(produced),
                finished=self._finished,
                busy_s=self._busy_s,
                idle_s=self._idle_s,
                paused_s=self._paused_s,
                lent_s=self._lent_s,
                decode_steps=round(self._work),
            )
        ]

    async def stop(self) -> None:
        """End it; whoever still waits gets HeadwayError."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        for entry in list(self._open.values()):
            if not entry.future.done():
                entry.future.set_exception(HeadwayError("the generator is stopped"))

    # --- time and work --------------------------------------------------------------------------------------

    def _set_lent(self, lent: bool) -> None:
        self._advance()
        self._lent = lent
        self._settle()

    @property
    def _stopped_decoding(self) -> bool:
        return self._paused or self._lent

    def _step_s(self) -> float:
        latency = self._token_s
        return latency(len(self._running)) if callable(latency) else latency

    def _advance(self) -> None:
        """Bring the work up to now."""
        now = self._clock.now()
        elapsed_s, self._work_at_s = now - self._work_at_s, now
        if self._lent:
            self._lent_s += elapsed_s
        elif self._paused:
            self._paused_s += elapsed_s
        elif self._running:
            self._work += elapsed_s / self._step_s()
            self._busy_s += elapsed_s
        else:
            self._idle_s += elapsed_s

    def _settle(self) -> None:
        """Tell watches and end what is due, fill the slots, and wake up at what comes next. The work is up to date."""
        self._tell_watches()
        while self._due and (self._due[0][2].serial not in self._running or self._due[0][0] <= self._work + _ROUNDING):
            entry = heapq.heappop(self._due)[2]
            if entry.serial in self._running:
                self._end(entry, entry.reason)
        while self._waiting and len(self._running) < self._slots and not self._stopped_decoding:
            entry = heapq.heappop(self._waiting)[2]
            if self._open.get(entry.request.request_id) is entry:
                self._begin(entry)
        self._set_timer()

    def _tell_watches(self) -> None:
        """Whom it is time to tell; a watch may cancel requests, and so come back here."""
        while self._watched and self._watched[0][0] <= self._work + _ROUNDING:
            _, serial, entry = heapq.heappop(self._watched)
            if serial not in self._running or entry.watch is None:
                continue
            entry.told += entry.watch.every_tokens
            self._watch(entry)
            entry.watch.told(self._response(entry, entry.told - entry.resumed_tokens, entry.reason))

    def _watch(self, entry: _Request) -> None:
        """Remember when its watch is told next, if it lives so long."""
        if entry.watch is not None and entry.told + entry.watch.every_tokens < entry.length:
            at = entry.base + entry.told + entry.watch.every_tokens - entry.resumed_tokens
            heapq.heappush(self._watched, (at, entry.serial, entry))

    def _begin(self, entry: _Request) -> None:
        self._running[entry.serial] = entry
        entry.running = True
        entry.change = len(self._changes) - 1
        delay_s = self._prefill_s(entry.request) if self._prefill_s is not None else 0.0
        entry.base = self._work + delay_s / self._step_s()
        remaining = entry.length - entry.resumed_tokens
        if self._error_of is not None and self._error_of(entry.request):
            entry.reason, remaining = "error", 0
        entry.first_token_s = self._clock.now() + delay_s + self._step_s()
        heapq.heappush(self._due, (entry.base + remaining, entry.serial, entry))
        self._watch(entry)

    def _set_timer(self) -> None:
        if self._stopped_decoding or not self._running:
            due_s = math.inf
        else:
            due = min(self._due[0][0], self._watched[0][0] if self._watched else math.inf)
            due_s = self._work_at_s + max(0.0, due - self._work) * self._step_s()
        if due_s == self._timer_due_s:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_due_s = due_s
        if due_s < math.inf:
            self._timer = asyncio.create_task(self._wake(due_s - self._clock.now()))

    async def _wake(self, seconds: float) -> None:
        await self._clock.sleep(seconds)
        self._timer, self._timer_due_s = None, math.inf
        self._advance()
        self._settle()

    # --- results --------------------------------------------------------------------------------------------

    def _produced(self, entry: _Request) -> int:
        """New tokens it has completed."""
        if not entry.running:
            return 0
        done = math.floor(self._work - entry.base + _ROUNDING)
        return 0 if entry.reason == "error" else max(0, min(entry.length - entry.resumed_tokens, done))

    def _spans(self, entry: _Request, produced: int) -> tuple[VersionSpan, ...]:
        spans = [[span.version, span.tokens] for span in entry.request.partial.versions]
        counted = 0
        for index in range(entry.change, len(self._changes)):
            version = self._changes[index][1]
            end = produced
            if index + 1 < len(self._changes):
                end = max(counted, min(produced, math.floor(self._changes[index + 1][0] - entry.base + _ROUNDING)))
            if end > counted and spans and spans[-1][0] == version:
                spans[-1][1] += end - counted
            elif end > counted:
                spans.append([version, end - counted])
            counted = end
        return tuple(VersionSpan(version=version, tokens=tokens) for version, tokens in spans)

    def _end(self, entry: _Request, reason: FinishReason) -> None:
        produced = self._produced(entry)
        before = entry.request.partial
        response = self._response(entry, produced, reason)
        self._generated += produced
        self._finished += 1
        self._remove(entry)
        if not entry.future.done():
            entry.future.set_result(
                GenerationResult(
                    request_id=entry.request.request_id,
                    response=response,
                    finish_reason=reason,
                    error=self._error_of(entry.request) if reason == "error" and self._error_of is not None else "",
                    reprefills=entry.reprefills + (1 if entry.running and before.ids else 0),
                    first_token_s=entry.first_token_s if produced else 0.0,
                )
            )

    def _response(self, entry: _Request, produced: int, reason: FinishReason) -> PartialResponse:
        """All its tokens when it has ``produced`` new ones; ``reason``: "stop" when these are all it will have."""
        before, how = entry.request.partial, entry.request.sampling
        ids = before.ids + _tokens(how.seed, entry.resumed_tokens, produced)
        if reason == "stop" and produced == entry.length - entry.resumed_tokens and produced and how.stop_token_ids:
            ids = (*ids[:-1], how.stop_token_ids[0])
        return PartialResponse(
            ids=ids,
            logprobs=before.logprobs + (-0.5,) * produced,
            versions=self._spans(entry, produced) if entry.running else before.versions,
        )

    def _remove(self, entry: _Request) -> None:
        self._open.pop(entry.request.request_id, None)
        self._running.pop(entry.serial, None)


def _length_from_seed(request: GenerationRequest) -> int:
    """1 .. max_tokens, spread evenly over seeds."""
    return 1 + (request.sampling.seed * 2654435761) % request.sampling.max_tokens


def _tokens(seed: int, first: int, count: int) -> tuple[int, ...]:
    """Token ids from position ``first`` on: a function of seed and position alone, in 8 .. 998."""
    start = seed % _PERIOD + first
    return tuple(8 + (start + index) % _PERIOD for index in range(count))
