"""Deterministic stand-in for the generator pool: no model, and all its time passes on the injected clock."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from typing import Literal

from headway.control.routing.replicas import ReplicaLoad, choose_replica
from headway.generator.fake_replica import FakeReplica, FakeRequest, ReplicaCosts
from headway.records.clients import Watch
from headway.records.errors import HeadwayError
from headway.records.generation import (
    AppliedWeights,
    EngineStatistics,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    Probe,
    ProbeScores,
    PublishedWeights,
    RouterStatistics,
    UpdateMode,
)
from headway.runtime.clock import Clock

TokenLatency = float | Callable[[int], float]


class FakeGenerator:
    """Stand-in for ``GeneratorPool``: same protocol and routing, continuous batching, described latencies.

    In each of ``replicas``, all running requests advance together, one token each per decode step:
    ``token_s`` (a number, or a function of how many run) plus ``kv_token_s`` for every token in their KV. A prefill
    pauses decoding for ``prefill_token_s`` a token; a prompt in a running sibling's KV isn't prefilled again.
    ``prefill_s(request)`` describes a prefill elsewhere instead, which only delays its request. When
    ``kv_capacity_tokens`` are full, the youngest request is preempted: it waits, and is prefilled again. ``slots``
    bounds the running requests.

    ``length_of(request)``: response tokens; a length above ``max_tokens`` ends with "length". ``update_s``: pause of
    every replica in an update; ``recompute`` then prefills the running requests again, ``abort`` ends them, ``drain``
    lets them finish first.
    ``error_of(request)``: a cause with which the request fails after its prefill, or "".

    A token has the version that was applied when it was completed. Equal calls at equal times give equal results;
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
        update_mode: UpdateMode | Literal["drain"] = "keep",
        error_of: Callable[[GenerationRequest], str] | None = None,
        version: int = 0,
        pause_s: float = 0.0,
        beside: float = 1.0,
        replicas: int = 1,
        kv_token_s: float = 0.0,
        prefill_token_s: float = 0.0,
        kv_capacity_tokens: int | None = None,
        counted: bool = False,
    ) -> None:
        """``counted``: responses of any length take no memory (records/counted.py), but a buffer can't read them back.
        Replicas pause ``pause_s`` after they are asked to. Decode steps take ``beside`` times as long while the trainer
        computes on devices of its own (`trainer_computes`).
        ``slots`` and ``kv_capacity_tokens`` are for each replica."""
        self._clock = clock
        self._pause_s = pause_s
        self._length_of = length_of or _length_from_seed
        self._update_s = update_s
        self._drains = update_mode == "drain"
        self._mode: UpdateMode = "keep" if update_mode == "drain" else update_mode
        self._emptied = asyncio.Event()  # set while no request is in flight
        self._error_of = error_of
        costs = ReplicaCosts(
            token_s=token_s,
            kv_token_s=kv_token_s,
            prefill_token_s=prefill_token_s,
            prefill_s=prefill_s,
            beside=beside,
            slots=slots,
            kv_capacity_tokens=kv_capacity_tokens,
            counted=counted,
        )
        self._replicas = [DrivenReplica(costs, version, clock, self._end) for _ in range(replicas)]
        self._open: dict[str, tuple[FakeRequest, DrivenReplica, asyncio.Future[GenerationResult]]] = {}
        self._serial = 0
        self._last_route: tuple[Sequence[int], int] | None = None
        self._routed = self._spills = self._moves = 0
        self._updating = asyncio.Lock()
        self._stopped = False

    # --- the Generator protocol -----------------------------------------------------------------------------

    async def start(self) -> None:
        for replica in self._replicas:
            replica.advance()

    async def generate(self, request: GenerationRequest, watch: Watch | None = None) -> GenerationResult:
        """See :class:`headway.records.clients.Generator`. A replica keeps a session's KV between turns while
        its capacity allows."""
        if self._stopped:
            raise HeadwayError("the generator is stopped")
        if request.request_id in self._open:
            raise ValueError(f"request {request.request_id!r} is already open")
        length, limit = max(1, self._length_of(request)), request.sampling.max_tokens
        fake = FakeRequest(request, self._serial, min(length, limit), "stop" if length <= limit else "length", watch)
        self._serial += 1
        if self._error_of is not None and self._error_of(request):
            fake.reason = "error"
        replica = self._route(fake)
        future: asyncio.Future[GenerationResult] = asyncio.get_running_loop().create_future()
        self._open[request.request_id] = fake, replica, future
        replica.advance()
        replica.core.enter(fake)
        if fake.length <= fake.resumed_tokens:
            self._end(fake)
        replica.settle()
        try:
            return await future
        finally:
            open_tuple = self._open.get(request.request_id)
            if open_tuple is not None and open_tuple[0] is fake:  # the caller was cancelled
                del self._open[request.request_id]
                replica.advance()
                replica.core.withdraw(fake)
                replica.settle()
                self._note_emptied()

    def cancel(self, request_id: str) -> None:
        """End a request with reason "abort" and its tokens so far. Unknown ids: no-op."""
        if request_id in self._open:
            fake_request, replica, _ = self._open[request_id]
            replica.advance()
            self._end(fake_request, "abort")
            replica.settle()

    async def update_weights(self, weights: PublishedWeights, leave_slow: bool = False) -> list[AppliedWeights]:
        """Apply a version to all replicas, in the fake's update mode; one report for each."""
        async with self._updating:
            if self._drains:
                await self._drain()
            update_counts: list[tuple[int, int]] = []
            for replica in self._replicas:
                replica.advance()
                crossing_requests, token_count = replica.core.begin_update(self._mode)
                if self._mode == "abort":
                    for fake_request in crossing_requests:
                        if fake_request.request.interruptible:
                            self._end(fake_request, "abort")
                update_counts.append((len(crossing_requests), token_count))
                replica.settle()
            if self._update_s > 0:
                await self._clock.sleep(self._update_s)
            for replica, (_, token_count) in zip(self._replicas, update_counts, strict=True):
                replica.advance()
                replica.core.end_update(weights.version, token_count)
                replica.settle()
        return [
            AppliedWeights(
                version=weights.version, pause_s=self._update_s, in_flight=in_flight, reprefilled_tokens=token_count
            )
            for in_flight, token_count in update_counts
        ]

    def take_voided(self) -> list[str]:
        """See :class:`headway.records.clients.Generator`. The fake has no weights."""
        return []

    async def score(self, probe: Probe) -> list[ProbeScores]:
        """See :class:`headway.records.clients.Generator`. The fake has no model, so it returns no scores."""
        return []

    async def applied_version(self) -> int:
        return self.version

    async def pause_replicas(self, indices: Collection[int]) -> None:
        """See :class:`headway.records.clients.Generator`."""
        if self._pause_s:
            await self._clock.sleep(self._pause_s)
        self._set_yielded(indices, yielded=True)

    async def resume_replicas(self, indices: Collection[int]) -> None:
        """See :class:`headway.records.clients.Generator`."""
        self._set_yielded(indices, yielded=False)

    def trainer_computes(self, computes: bool) -> None:
        """Note whether the trainer computes beside the replicas."""
        for replica in self._replicas:
            core = replica.core
            slowed = computes and core.costs.beside != 1.0
            if core.beside != slowed:
                replica.advance()
                core.beside = slowed
                replica.settle()

    async def idle_replicas(self, idle: Collection[int]) -> None:
        """See :class:`headway.records.clients.Generator`."""
        for index, replica in enumerate(self._replicas):
            replica.idle = index in idle
        if all(replica.idle for replica in self._replicas):
            return
        for request_id, (fake_request, replica, future) in list(self._open.items()):
            if replica.idle:
                replica.advance()
                replica.core.interrupt(fake_request)
                replica.settle()
                other_replica = self._route(fake_request)
                other_replica.advance()
                other_replica.core.enter(fake_request)
                self._open[request_id] = fake_request, other_replica, future
                other_replica.settle()
                self._moves += 1

    async def statistics(self) -> list[EngineStatistics]:
        for replica in self._replicas:
            replica.advance()
        return [replica_statistics(replica.core, idle=replica.idle) for replica in self._replicas]

    def routing(self) -> RouterStatistics:
        """See :class:`headway.records.clients.Generator`. Token counts are those of the last event."""
        return RouterStatistics(
            used_tokens=sum(replica.core.outstanding_tokens for replica in self._replicas),
            capacity_tokens=sum(replica.core.costs.kv_capacity_tokens or 0 for replica in self._replicas),
            open_requests=len(self._open),
            routed=self._routed,
            spills=self._spills,
            moves=self._moves,
        )

    def forget_session(self, session: str) -> None:
        """Drop the KV of a session whose rollout is over. Unknown names: no-op."""
        for replica in self._replicas:
            replica.core.forget_session(session)

    @property
    def version(self) -> int:
        """Lowest version applied by any replica."""
        return min(replica.core.version for replica in self._replicas)

    @property
    def busy_s(self) -> float:
        """Seconds spent computing so far, mean over the replicas."""
        for replica in self._replicas:
            replica.advance()
        return sum(replica.core.busy_s for replica in self._replicas) / len(self._replicas)

    def tokens_so_far(self, request_id: str) -> int:
        """See :class:`headway.records.clients.Generator`."""
        if request_id not in self._open:
            return 0
        fake_request, replica, _ = self._open[request_id]
        replica.advance()
        return fake_request.resumed_tokens + fake_request.done + replica.core.produced(fake_request)

    async def stop(self) -> None:
        """Stop the generator; calls that still wait raise HeadwayError."""
        self._stopped = True
        for replica in self._replicas:
            replica.stop()
        for _, _, future in list(self._open.values()):
            if not future.done():
                future.set_exception(HeadwayError("the generator is stopped"))

    # --- inside ---------------------------------------------------------------------------------------------

    def _route(self, entry: FakeRequest) -> DrivenReplica:
        """Choose a replica by the pool's rule; a session's later turn goes to the replica with its KV."""
        self._routed += 1
        if len(self._replicas) == 1:
            return self._replicas[0]
        if entry.session:
            for replica in self._replicas:
                if replica.core.holds(entry.session) and not replica.idle:
                    return replica
        prompt_ids = entry.request.prompt_ids
        last_route, all_idle = self._last_route, all(candidate.idle for candidate in self._replicas)
        cached_index = last_route[1] if last_route is not None and last_route[0] == prompt_ids else None
        for replica in self._replicas:
            replica.advance()
        route = choose_replica(
            [
                ReplicaLoad(
                    standing="serving" if all_idle or not candidate.idle else "idle",
                    outstanding_tokens=candidate.core.outstanding_tokens,
                    saved_tokens=len(prompt_ids) if index == cached_index else 0,
                )
                for index, candidate in enumerate(self._replicas)
            ]
        )
        assert route is not None  # all are live
        self._last_route = prompt_ids, route.replica
        self._spills += route.spilled
        return self._replicas[route.replica]

    async def _drain(self) -> None:
        """Wait until every request that has begun has finished; others don't begin until the update is applied."""
        self._emptied.clear()
        for replica in self._replicas:
            replica.core.begin_drain()
        self._note_emptied()
        await self._emptied.wait()

    def _note_emptied(self) -> None:
        if not self._emptied.is_set() and not any(
            fake_request.begun or fake_request.reprefills for fake_request, _, _ in self._open.values()
        ):
            self._emptied.set()

    def _set_yielded(self, indices: Collection[int], *, yielded: bool) -> None:
        for replica in (self._replicas[index] for index in indices):
            replica.advance()
            replica.core.yielded = yielded
            replica.settle()

    def _end(self, entry: FakeRequest, reason: FinishReason | None = None) -> None:
        """Resolve a request's future; ``reason``: by default the one it was opened with."""
        reason = reason or entry.reason
        _, replica, future = self._open.pop(entry.request.request_id)
        core, begun = replica.core, entry.begun
        response, produced_tokens = core.response(entry, reason)
        core.generated += core.produced(entry)
        context_tokens = entry.context_tokens + core.produced(entry)
        core.withdraw(entry)
        core.finished += 1
        if entry.session and reason != "error":
            core.keep_session(entry.session, context_tokens)
        if not future.done():
            future.set_result(
                GenerationResult(
                    request_id=entry.request.request_id,
                    response=response,
                    finish_reason=reason,
                    error=self._error_of(entry.request) if reason == "error" and self._error_of is not None else "",
                    reprefills=entry.reprefills + bool(begun and entry.request.partial.ids),
                    first_token_s=entry.first_token_s if produced_tokens else 0.0,
                )
            )
        self._note_emptied()


class DrivenReplica:
    """A FakeReplica driven by the event loop's timers, whose time is the clock's."""

    def __init__(self, costs: ReplicaCosts, version: int, clock: Clock, on_end: Callable[[FakeRequest], None]) -> None:
        self.core = FakeReplica(costs, version, clock.now(), on_end)
        self.idle = False  # takes no requests while others do
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_s = math.inf

    def advance(self) -> None:
        self.core.advance(self._clock.now())

    def settle(self) -> None:
        """Process due events and set the timer for the next one."""
        self.core.settle()
        due_s = self.core.next_event_s()
        if due_s == self._timer_due_s:
            return
        self.stop()
        if due_s < math.inf:
            self._timer_due_s = due_s
            self._timer = asyncio.get_running_loop().call_at(due_s, self._wake)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_due_s = None, math.inf

    def _wake(self) -> None:
        self._timer, self._timer_due_s = None, math.inf
        self.advance()
        self.settle()


def replica_statistics(core: FakeReplica, *, idle: bool) -> EngineStatistics:
    """Return a fake replica's counters and present state."""
    return EngineStatistics(
        version=core.version,
        idle=idle,
        running=len(core.running),
        waiting=core.open - len(core.running),
        slots=core.costs.slots,
        kv_used_tokens=core.held_tokens,
        kv_capacity_tokens=core.costs.kv_capacity_tokens or 0,
        generated_tokens=core.generated_tokens,
        prefilled_tokens=core.prefilled,
        finished=core.finished,
        preemptions=core.preemptions,
        busy_s=core.busy_s,
        idle_s=core.idle_s,
        paused_s=core.paused_s,
        yielded_s=core.yielded_s,
        decode_steps=int(core.decode_steps),
    )


def _length_from_seed(request: GenerationRequest) -> int:
    """Default response length: 1 .. max_tokens, spread evenly over seeds."""
    return 1 + (request.sampling.seed * 2654435761) % request.sampling.max_tokens
