"""The router: assigns each request to a replica, from its arrival to its end, through deaths of replicas."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator, Collection, Mapping, Sequence

import msgspec

from headway.config.router import RouterConfig
from headway.control.routing.replicas import PrefixMemory, ReplicaLoad, Standing, choose_replica
from headway.generator.routing.open_request import OpenRequest
from headway.generator.routing.replica import Replica, call_replica
from headway.records.clients import Watch
from headway.records.errors import RemoteError, WorkerDied
from headway.records.generation import GenerationRequest, RouterStatistics, TokenDelta
from headway.records.tokens import TokenIds, decoder, encoder
from headway.runtime.clock import Clock
from headway.runtime.supervision import cancel_all, spawn
from headway.runtime.workers import EventCallback

_ACCEPTING: tuple[Standing, ...] = ("serving", "yielded", "idle")
_ROUNDING_S = 1e-6  # a timer may come this much too early


class Router:
    """Assigns open requests to replicas.

    A request goes to the replica that ``control.routing`` chooses; all requests of one pass of the event loop are
    submitted in one call. While no replica takes requests a request is *held*; held requests are assigned oldest first.
    A request whose replica died, rests, drains or didn't accept it resumes elsewhere from its tokens, or is held again.

    The number of open requests is bounded by the callers: admission for rollouts, `routing.limiter` for clients.

    Invariant: a call is in ``calls`` of exactly one replica, or held, or done; ``outstanding_tokens`` of a replica is
    the sum over its calls. The pool owns the replicas' lives: it calls ``settle`` when a replica may take requests
    again, ``reassign`` when one is dead, ``clear`` when one is to be emptied.
    """

    def __init__(
        self, replicas: list[Replica], settings: RouterConfig, clock: Clock, on_event: EventCallback, lag: int = 0
    ) -> None:
        """``replicas``: the pool's own list, which may grow. ``lag``: versions by which one that takes requests may be
        older than the newest applied one; it may always have the one before that."""
        self._replicas = replicas
        self._settings = settings
        self._clock = clock
        self._on_event = on_event
        self._calls: dict[str, OpenRequest] = {}  # by request id, in order of arrival
        self._held: list[OpenRequest] = []  # a heap of held requests; finished ones are skipped when popped
        self._prefixes = PrefixMemory(settings.prefix_block_tokens, settings.remembered_prefixes)
        self._last_prompt: tuple[object, str] = ((), "")  # the last prompt and adapter that were looked up
        self._last_keys: list[tuple[int, int]] = []
        self._lag = lag
        self._newest_update = 0  # highest update applied by any replica so far
        self._newest_version = self._oldest_version = 0  # of that update; and the oldest that still takes requests
        self._tickets = itertools.count()
        self._serials = itertools.count()
        self._counts: Counter[str] = Counter()
        self._used_tokens = self._peak_tokens = 0
        self._pending_events: deque[tuple[str, str]] = deque()  # events not reported yet
        self._flushes: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._emptied: asyncio.Event | None = None  # set when a replica has no requests left; None: not draining
        self._encoder = encoder()
        self._deltas = decoder(list[TokenDelta])

    # --- requests -------------------------------------------------------------------------------------------

    def open(self, request: GenerationRequest, watch: Watch | None = None) -> OpenRequest:
        """Accept a request; its future gets the result. Raises ValueError for an id that is open already."""
        if request.request_id in self._calls:
            raise ValueError(f"request {request.request_id!r} is already open")
        call = OpenRequest(request, asyncio.get_running_loop().create_future(), watch)
        call.serial, call.opened_s = next(self._serials), self._clock.now()
        self._calls[request.request_id] = call
        self._used_tokens += call.outstanding_tokens
        self._peak_tokens = max(self._peak_tokens, self._used_tokens)
        if self._held:  # older requests first
            self._hold(call)
            self.settle()
        elif not self._route(call):
            self._hold(call)
        return call

    def close(self, call: OpenRequest) -> None:
        """Remove a call whose caller has its result or is gone."""
        self._release(call)
        if self._calls.pop(call.request.request_id, None) is not None:
            self._used_tokens -= call.outstanding_tokens

    def cancel(self, request_id: str) -> None:
        """End a request: its future gets finish_reason "abort" and the tokens so far. Unknown: no-op."""
        call = self._calls.get(request_id)
        if call is None:
            return
        call.cancelled = True
        if call.replica is None:
            call.finish("abort")
            return
        replica = self._replicas[call.replica]
        if replica.outbox.pop(call.ticket, None) is not None:  # never reached the engine
            call.finish("abort")
            return
        replica.aborts.append(call.ticket)
        self._flush_soon(replica)

    def fail_all(self, error: Exception) -> None:
        """Fail all open requests with ``error``: no replica will take them any more."""
        for call in list(self._calls.values()):
            call.fail(error)

    def tokens_so_far(self, request_id: str) -> int:
        """Count of streamed response tokens of an open request; 0 for an unknown id."""
        call = self._calls.get(request_id)
        return 0 if call is None else call.tokens

    def open_tokens(self) -> list[int]:
        """Count of streamed response tokens of every open request."""
        return [call.tokens for call in self._calls.values()]

    def statistics(self) -> RouterStatistics:
        """Return the statistics of the open requests and of the replicas' breakers."""
        now_s = self._clock.now()
        standings = self.standings(now_s)
        oldest_call = next(iter(self._calls.values()), None)
        breakers = [replica.breaker for replica in self._replicas if not replica.gone]
        return RouterStatistics(
            used_tokens=self._used_tokens,
            capacity_tokens=self.capacity_tokens(standings),
            peak_tokens=self._peak_tokens,
            open_requests=len(self._calls),
            waiters=sum(not call.future.done() for call in self._held),
            oldest_age_s=0.0 if oldest_call is None else now_s - oldest_call.opened_s,
            breakers_open=sum(breaker.state(now_s) != "closed" for breaker in breakers),
            **self._counts,
        )

    def capacity_tokens(self, standings: Sequence[Standing] | None = None) -> int:
        """Return the total KV capacity, in tokens, of the replicas that take requests."""
        standings = self.standings(self._clock.now()) if standings is None else standings
        replica_standings = zip(self._replicas, standings, strict=True)
        return sum(replica.capacity_tokens for replica, standing in replica_standings if standing in _ACCEPTING)

    # --- replicas -------------------------------------------------------------------------------------------

    def standings(self, now: float, replicas: Sequence[Replica] | None = None) -> list[Standing]:
        """Return the standing of each of ``replicas``, by default of all, in order."""
        replicas = self._replicas if replicas is None else replicas
        for replica in replicas:
            if replica.live and replica.update > self._newest_update:
                self._newest_update, previous_version = replica.update, self._newest_version
                self._newest_version = replica.version
                self._oldest_version = min(previous_version, replica.version - self._lag)
        newest_update, grace_s = self._newest_update, self._settings.update_grace_s
        return [  # inlined for healthy replicas: every request checks every replica
            "serving"
            if replica.live
            and replica.update >= newest_update
            and not (replica.draining or replica.silent or replica.idle or replica.yielded)
            and replica.breaker.closed
            else replica.standing(now, newest_update, grace_s, self._oldest_version)
            for replica in replicas
        ]

    def settle(self) -> None:
        """Assign held requests, oldest first: a replica may take requests again."""
        while self._held:
            call = heapq.heappop(self._held)
            if not call.future.done() and not self._route(call):
                self._hold(call)
                return

    @contextlib.asynccontextmanager
    async def drained(self, slots: int) -> AsyncIterator[None]:
        """Keep all replicas free of requests inside the block, which begins when those in flight have finished. New
        requests are held until it ends, and so are those that wait for one of a replica's ``slots``."""
        self._emptied = asyncio.Event()
        try:
            for replica in self._replicas:
                unstarted = [call for call in replica.calls.values() if call.tokens == len(call.request.partial.ids)]
                excess_count = max(0, len(replica.calls) - slots)
                self.clear(replica, sorted(unstarted, reverse=True)[:excess_count])
            while any(replica.calls for replica in self._replicas):
                self._emptied.clear()
                await self._emptied.wait()
            yield
        finally:
            self._emptied = None
            self.settle()

    def clear(self, replica: Replica, calls: Collection[OpenRequest] | None = None) -> None:
        """Move the requests of a live replica, or ``calls`` among them, to others, with their tokens so far."""
        moved_calls = sorted(replica.calls.values() if calls is None else calls)
        for call in moved_calls:
            if replica.outbox.pop(call.ticket, None) is None:
                replica.aborts.append(call.ticket)
                call.resumes += 1
                self._counts["moves"] += 1
            self._release(call)
        self._flush_soon(replica)
        self._route_again(moved_calls)

    def reassign(self, replica: Replica) -> None:
        """Move the requests of a dead replica to others, with the tokens that were streamed. Opens its breaker, which
        the next ``report`` names."""
        now_s = self._clock.now()
        replica.epoch += 1
        replica.silent = False
        replica.updating_since_s = None
        replica.aborts.clear()
        unsent_by_ticket, replica.outbox = replica.outbox, {}
        orphan_calls = sorted(replica.calls.values())
        for call in orphan_calls:
            if call.ticket not in unsent_by_ticket:
                call.resumes += 1
                self._counts["moves"] += 1
            self._release(call)
        if not replica.draining and replica.breaker.trip(now_s):
            self._note_opened(replica, "it died")
        self._route_again(orphan_calls)

    def note_restarted(self, replica: Replica) -> None:
        """Close the breaker of a replica that was restarted and answers."""
        if replica.breaker.reset():
            self._note_closed(replica, "it was restarted and answers")
        self.report()

    def _route_again(self, calls: list[OpenRequest]) -> None:
        for call in calls:
            if call.cancelled:
                call.finish("abort")  # its replica died before the abort took effect
            elif not call.future.done() and not self._route(call):
                self._hold(call)

    # --- routing --------------------------------------------------------------------------------------------

    def _route(self, call: OpenRequest) -> bool:
        """Assign a call to a replica; returns False when none takes it now."""
        if self._emptied is not None:
            return False
        now_s = self._clock.now()
        needed_tokens = call.outstanding_tokens
        saved_by_index = self._saved_tokens(call) if len(self._replicas) > 1 else {}
        oldest_version = call.request.oldest_version
        is_older = [r.update < self._newest_update and r.version < oldest_version for r in self._replicas]
        takes_any = not call.refused_by and not any(is_older)
        candidates = self._candidates(now_s, saved_by_index, needed_tokens) if takes_any else self._replicas
        standings = self.standings(now_s, candidates)
        if any(is_older):
            of_newer: list[Standing] = ["behind" if old else s for old, s in zip(is_older, standings, strict=True)]
            standings = of_newer
        if call.refused_by:  # prefer other replicas; retry there if there is no other
            filtered: list[Standing] = [s if i not in call.refused_by else "down" for i, s in enumerate(standings)]
            standings = filtered if any(standing in _ACCEPTING for standing in filtered) else standings
        loads = [
            ReplicaLoad(
                standing=standing,
                outstanding_tokens=candidate.outstanding_tokens,
                saved_tokens=saved_by_index.get(candidate.index, 0),
                capacity_tokens=candidate.capacity_tokens,
            )
            for candidate, standing in zip(candidates, standings, strict=True)
        ]
        route = choose_replica(loads, needed_tokens)
        if route is None:
            return False
        replica = candidates[route.replica]
        call.probe = replica.breaker.send(now_s)
        call.replica = replica.index
        call.ticket = str(next(self._tickets))  # never reused, so that no late delta matches the wrong call
        replica.calls[call.ticket] = call
        replica.outstanding_tokens += needed_tokens
        replica.outbox[call.ticket] = call
        self._flush_soon(replica)
        self._counts["routed"] += 1
        self._counts["spills"] += route.spilled
        if call.prefix:
            self._prefixes.remember(call.prefix, replica.index, replica.epoch)
        return True

    def _candidates(self, now: float, saved: Mapping[int, int], needed: int) -> Sequence[Replica]:
        """Return the replicas to choose among, by index. If the least loaded serving replica has the capacity, these
        are that one and those that save tokens, since no other could be chosen; else all."""
        least_loaded: Replica | None = None
        for replica in self._replicas:
            is_lighter = least_loaded is None or replica.outstanding_tokens < least_loaded.outstanding_tokens
            if is_lighter and self.standings(now, (replica,))[0] == "serving":
                least_loaded = replica
        if least_loaded is None or least_loaded.outstanding_tokens + needed > least_loaded.capacity_tokens:
            return self._replicas
        return [self._replicas[index] for index in sorted({least_loaded.index, *saved})]

    def _saved_tokens(self, call: OpenRequest) -> dict[int, int]:
        """Map replica index -> prompt tokens that it needn't prefill, weighted by ``router.affinity``."""
        affinity = self._settings.affinity
        if not affinity:
            return {}
        epoch_by_index = {replica.index: replica.epoch for replica in self._replicas if replica.live}
        if call.prefix is None:
            prompt_ids, adapter = call.request.prompt_ids, call.request.adapter
            if self._last_prompt[0] is not prompt_ids or self._last_prompt[1] != adapter:  # a group shares the object
                self._last_prompt, self._last_keys = (prompt_ids, adapter), self._prefixes.keys(prompt_ids, adapter)
            call.prefix = self._last_keys
        cached = self._prefixes.cached_tokens(call.prefix, epoch_by_index)
        return cached if affinity == 1.0 else {index: round(affinity * tokens) for index, tokens in cached.items()}

    def _remember_session(self, call: OpenRequest, replica: Replica) -> None:
        """Remember the call's whole context as this replica's: the session's next turn begins with it."""
        if call.request.session and call.prefix:
            context_ids = TokenIds.joined((call.request.prompt_ids, call.partial().ids))
            prefix_keys = self._prefixes.keys(context_ids, call.request.adapter)
            self._prefixes.remember(prefix_keys, replica.index, replica.epoch)

    def _hold(self, call: OpenRequest) -> None:
        """Hold a call until a replica takes it; retried at the latest when a breaker's cool-down is over."""
        heapq.heappush(self._held, call)
        self._wake_for_probe()

    def _wake_for_probe(self) -> None:
        now_s = self._clock.now()
        breakers = [replica.breaker for replica in self._replicas if replica.live]
        due_times_s = [due_s for b in breakers if b.state(now_s) == "open" and (due_s := b.opens_s()) is not None]
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due_times_s and self._held:
            delay_s = max(0.0, min(due_times_s) - now_s) + _ROUNDING_S
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._probe_due)

    def _probe_due(self) -> None:
        self._timer = None
        self.settle()
        self._wake_for_probe()

    def _release(self, call: OpenRequest) -> None:
        """Remove a call from its replica."""
        if call.replica is None:
            return
        replica = self._replicas[call.replica]
        if replica.calls.pop(call.ticket, None) is not None:
            replica.outstanding_tokens -= call.outstanding_tokens
        call.replica = None
        if call.probe:  # the probe has no outcome
            call.probe = False
            replica.breaker.withdraw()
            self._settle_soon()
        if not replica.calls:
            if replica.draining:
                replica.emptied.set()
            if self._emptied is not None:
                self._emptied.set()

    def _settle_soon(self) -> None:
        if self._held:
            asyncio.get_running_loop().call_soon(self.settle)

    # --- between calls and workers --------------------------------------------------------------------------

    def _flush_soon(self, replica: Replica) -> None:
        """Submit all calls of this pass of the event loop together: the task runs in the next pass."""
        if replica.flushing:
            return
        replica.flushing = True
        spawn(self._flushes, self._flush(replica), f"{replica.name}-submit")

    async def _flush(self, replica: Replica) -> None:
        replica.flushing = False
        calls, replica.outbox = list(replica.outbox.values()), {}
        aborted_tickets, replica.aborts = replica.aborts, []
        worker = replica.worker
        if worker is None or not replica.live:
            return  # the replica died meanwhile: its calls have been moved
        tickets = [call.ticket for call in calls]
        with contextlib.suppress(WorkerDied):  # the replica's supervisor moves the calls
            try:
                if encoded_requests := self._encoded(calls):
                    await call_replica(worker, "submit", encoded_requests)
            except RemoteError as error:
                refused_calls = [
                    call for call, ticket in zip(calls, tickets, strict=True) if replica.calls.get(ticket) is call
                ]
                self._not_accepted(replica, refused_calls, error)
            try:
                if aborted_tickets:
                    await call_replica(worker, "abort", aborted_tickets)
            except RemoteError as error:
                self._note_failure(replica, False, str(error))
        self.report()

    def _encoded(self, calls: list[OpenRequest]) -> bytes:
        """Encode the message of a submission; b"" if there is nothing to submit. A request that can't be encoded (a
        number of more than 64 bits, text that is no Unicode) fails alone."""
        try:
            return self._encoder.encode([call.resubmission() for call in calls]) if calls else b""
        except (OverflowError, TypeError, ValueError):
            pass  # one of them is at fault
        encoded_requests: list[msgspec.Raw] = []
        for call in calls:
            try:
                encoded_requests.append(msgspec.Raw(self._encoder.encode(call.resubmission())))
            except (OverflowError, TypeError, ValueError) as error:
                call.finish("error", f"the request can't be sent to a generator: {error}", refused=True)
        return self._encoder.encode(encoded_requests) if encoded_requests else b""

    def _not_accepted(self, replica: Replica, calls: list[OpenRequest], error: RemoteError) -> None:
        """Move calls on which a replica raised to others, or fail those with no other replica or no retry left."""
        had_probe = any(call.probe for call in calls)
        for call in calls:
            call.probe = False
            replica.aborts.append(call.ticket)  # the replica may have accepted some before it raised
            self._release(call)
            call.refused_by = (*call.refused_by, replica.index)
        self._flush_soon(replica)
        self._note_failure(replica, had_probe, str(error))
        for call in sorted(calls):
            retries_spent = len(call.refused_by) > self._settings.retries
            if retries_spent or not self._has_others(call.refused_by):
                call.finish("error", str(error))
            elif not call.future.done():
                self._counts["retries"] += 1
                self._route_again([call])

    def absorb(self, replica: Replica, event: bytes) -> None:
        """Apply the deltas that a replica streamed. Raises msgspec.DecodeError if ``event`` isn't a list of deltas."""
        now_s = self._clock.now()
        for delta in self._deltas.decode(event):
            call = replica.calls.get(delta.request_id)  # engines know requests by their tickets
            if call is None:
                continue  # its caller is gone
            previous_tokens = call.outstanding_tokens
            call.absorb(delta, now_s)
            gained_tokens = previous_tokens - call.outstanding_tokens
            replica.outstanding_tokens -= gained_tokens
            self._used_tokens -= gained_tokens
            if delta.finish_reason is None and not call.probe:
                if call.watch is not None:
                    call.notify_watch()
                continue
            has_failed = delta.finish_reason == "error" and not delta.refused
            if has_failed or (delta.data and call.probe) or delta.finish_reason in ("stop", "length"):
                was_probe, call.probe = call.probe, False
                if has_failed:
                    self._note_failure(replica, was_probe, delta.error)
                elif replica.breaker.succeed(now_s, probe=was_probe):
                    self._note_closed(replica, "requests succeed again")
                if was_probe:
                    self._settle_soon()
            if delta.finish_reason is not None:
                replica.answered.append(call.request.request_id)
                if delta.finish_reason != "error":
                    self._remember_session(call, replica)
                self._release(call)
                call.finish(delta.finish_reason, delta.error, refused=delta.refused)
            else:
                call.notify_watch()
        self.report()

    # --- breakers -------------------------------------------------------------------------------------------

    def _has_others(self, excluded: Collection[int]) -> bool:
        """Whether any replica other than ``excluded`` takes requests."""
        standings = self.standings(self._clock.now())
        return any(standing in _ACCEPTING and index not in excluded for index, standing in enumerate(standings))

    def _note_failure(self, replica: Replica, probe: bool, why: str) -> None:
        """Count a failed request on a replica's breaker."""
        now_s, breaker = self._clock.now(), replica.breaker
        if breaker.fail(now_s, probe=probe, alone=not self._has_others((replica.index,))):
            self._note_opened(replica, why)
        elif probe and breaker.state(now_s) == "closed":
            self._note_closed(replica, f"it fails, but no other replica takes requests: {why}")

    def _note_opened(self, replica: Replica, why: str) -> None:
        self._counts["breaker_openings"] += 1
        self._pending_events.append(("breaker_opened", f"{replica.name}: {why}"))
        self._wake_for_probe()

    def _note_closed(self, replica: Replica, why: str) -> None:
        self._pending_events.append(("breaker_closed", f"{replica.name}: {why}"))
        self._settle_soon()

    def report(self) -> None:
        """Report the noted events. Called last: the event handler may raise."""
        while self._pending_events:
            self._on_event(*self._pending_events.popleft())

    async def stop(self) -> None:
        """Cancel the timer and all submissions under way; open requests stay as they are."""
        if self._timer is not None:
            self._timer.cancel()
        await cancel_all(*self._flushes)
