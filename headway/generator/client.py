"""Generator replicas behind one torch-free handle (records.clients.Generator)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headway.config.schema import Experiment
from headway.control.routing import ReplicaLoad, choose_replica
from headway.generator.activity import ActivitySpan
from headway.generator.calls import Call
from headway.generator.counters import accumulated
from headway.generator.replica import Replica
from headway.records.clients import Watch
from headway.records.errors import HeadwayError, RemoteError, WeightsCorrupt, WorkerDied
from headway.records.generation import (
    AppliedWeights,
    EngineStatistics,
    GenerationRequest,
    GenerationResult,
    PublishedWeights,
    TokenDelta,
)
from headway.records.trace import Span, WorkerState
from headway.runtime.clock import Clock
from headway.runtime.workers import Launcher, Worker

_BACKOFF_S = 0.5  # before the first restart is repeated; doubled each time
_LONGEST_BACKOFF_S = 30.0
_FORGIVEN_AFTER_S = 300.0  # a replica that was live for so long since a death is forgiven it
# A replica serves calls between two decode steps. One that takes ten minutes over it is stuck, though its health checks
# (another thread answers them) see nothing: better killed than waited for.
_CALL_TIMEOUT_S = 600.0


class EventCallback(Protocol):
    """Told of a replica's death, restart and loss."""

    def __call__(self, name: str, detail: str, /) -> object: ...


class GeneratorPool:
    """Replicas that share the requests; one that dies costs a restart and a prefill, never a request.

    A request goes to the live replica with the fewest outstanding tokens. When a replica dies its requests go on
    elsewhere, from the tokens streamed so far; the replica restarts with the newest published weights before
    its first request. One that needs more than ``restart_limit`` restarts within five minutes of service (failed ones
    count, the time they take doesn't) is lost; with the last one, every call raises WorkerDied.
    """

    def __init__(
        self,
        launcher: Launcher,
        experiment: Experiment,
        clock: Clock,
        *,
        on_event: EventCallback | None = None,
        log_directory: str | Path | None = None,
        restart_limit: int = 5,
    ) -> None:
        """``on_event(name, detail)`` is told of deaths, restarts and losses."""
        self._launcher = launcher
        self._clock = clock
        self._on_event = on_event or (lambda name, detail, /: None)
        self._mode = experiment.generator.update_mode
        self._restart_limit = restart_limit
        self._replicas = [
            Replica.of(index, device, experiment, log_directory)
            for index, device in enumerate(experiment.generator.devices)
        ]
        self._calls: dict[str, Call] = {}
        self._held: list[Call] = []  # open, but no replica is live
        self._newest: PublishedWeights | None = None
        self._updating = asyncio.Lock()
        self._lent = False
        self._last_route: tuple[tuple[int, ...], int] | None = None
        self._tickets = itertools.count()
        self._keepers: list[asyncio.Task[None]] = []
        self._flushes: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._encoder = msgspec.msgpack.Encoder()
        self._deltas = msgspec.msgpack.Decoder(list[TokenDelta])

    # --- the Generator protocol -----------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all replicas. Raises what the first failing one raised (its own typed error); the others are
        stopped then."""
        starts = await asyncio.gather(*(self._launch(replica) for replica in self._replicas), return_exceptions=True)
        failures = [error for error in starts if isinstance(error, BaseException)]
        if failures:
            await self.stop()
            raise _own_cause(failures[0])
        for replica in self._replicas:
            self._go_live(replica)
        self._keepers = [asyncio.create_task(self._keep(replica), name=replica.spec.name) for replica in self._replicas]

    async def generate(self, request: GenerationRequest, watch: Watch | None = None) -> GenerationResult:
        """See :class:`headway.records.clients.Generator`. Cancelling the caller aborts the request in the engine.

        Raises ValueError for an id that is open already, WorkerDied when every replica is lost.
        """
        if request.request_id in self._calls:
            raise ValueError(f"request {request.request_id!r} is already open")
        self._require_running()
        call = Call(request, asyncio.get_running_loop().create_future(), watch)
        self._calls[request.request_id] = call
        self._route(call)
        try:
            return await call.future
        except asyncio.CancelledError:
            self.cancel(request.request_id)
            raise
        finally:
            self._forget(call)

    def cancel(self, request_id: str) -> None:
        """End a request: its ``generate`` returns with finish_reason "abort" and the tokens so far. Unknown: no-op."""
        call = self._calls.get(request_id)
        if call is None:
            return
        if call.replica is None:
            call.finish("abort")
            return
        replica = self._replicas[call.replica]
        if call in replica.outbox:  # never reached the engine
            replica.outbox.remove(call)
            call.finish("abort")
            return
        replica.aborts.append(call.ticket)
        self._flush_soon(replica)

    async def update_weights(self, weights: PublishedWeights) -> list[AppliedWeights]:
        """Apply a version on every live replica at once; one report each. A replica that is down gets it when it
        restarts. Raises WeightsCorrupt when a replica could not verify them; it goes on with what it had."""
        async with self._updating:
            self._require_running()
            self._newest = weights
            live = [replica for replica in self._replicas if replica.live]
            outcomes = await asyncio.gather(
                *(self._apply(replica, weights) for replica in live), return_exceptions=True
            )
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, WorkerDied):
                raise outcome
        return [outcome for outcome in outcomes if isinstance(outcome, AppliedWeights)]

    async def applied_version(self) -> int:
        """Lowest version applied by a live replica; while none is live, the one the next will start with."""
        self._require_running()
        versions = [replica.version for replica in self._replicas if replica.live]
        if versions:
            return min(versions)
        return self._newest.version if self._newest is not None else 0

    async def lend_devices(self) -> None:
        """See :class:`headway.records.clients.Generator`."""
        await self._set_lent(True)

    async def reclaim_devices(self) -> None:
        """See :class:`headway.records.clients.Generator`."""
        await self._set_lent(False)

    async def rest_replicas(self, resting: Collection[int]) -> None:
        """See :class:`headway.records.clients.Generator`."""
        for replica in self._replicas:
            replica.resting = replica.index in resting
        if any(replica.live and not replica.resting for replica in self._replicas):
            for replica in self._replicas:
                if replica.live and replica.resting:
                    self._clear(replica)

    async def statistics(self) -> list[EngineStatistics]:
        """One per replica, in order; counters go on across restarts."""
        self._require_running()
        await asyncio.gather(*(self._refresh(replica) for replica in self._replicas if replica.live))
        return [
            msgspec.structs.replace(accumulated(replica.past, replica.present), resting=replica.resting)
            for replica in self._replicas
        ]

    async def activity(self) -> list[Span]:
        """What every live replica has been doing since this was last asked, on a track of its name."""
        live = [(replica.spec.name, replica.worker) for replica in self._replicas if replica.live and replica.worker]
        found = await asyncio.gather(*(_activity(worker) for _, worker in live))
        return [
            Span(track=name, name=state, start_s=start_s, end_s=end_s)
            for (name, _), spans in zip(live, found, strict=True)
            for state, start_s, end_s in spans
        ]

    @property
    def worker_states(self) -> list[WorkerState]:
        """Every replica's health."""
        return [WorkerState(name=r.spec.name, up=r.live, restarts=r.restarts) for r in self._replicas]

    async def stop(self) -> None:
        """Stop all replicas; whoever still waits gets HeadwayError."""
        self._stopping = True
        for task in [*self._keepers, *self._flushes]:
            task.cancel()
        await asyncio.gather(*self._keepers, *self._flushes, return_exceptions=True)
        workers = [replica.worker for replica in self._replicas if replica.worker is not None]
        for replica in self._replicas:
            replica.live, replica.worker = False, None
        await asyncio.gather(*(worker.stop(1.0) for worker in workers))
        for call in list(self._calls.values()):
            call.fail(HeadwayError("the generator pool is stopped"))

    def tokens_so_far(self, request_id: str) -> int:
        """See :class:`headway.records.clients.Generator`."""
        call = self._calls.get(request_id)
        return 0 if call is None else call.tokens

    def open_tokens(self) -> list[int]:
        """Response tokens of every open request, as far as they were streamed."""
        return [call.tokens for call in self._calls.values()]

    @property
    def pids(self) -> list[int]:
        """Process ids of the live replicas, in order."""
        return [replica.worker.pid for replica in self._replicas if replica.live and replica.worker is not None]

    # --- requests to replicas -------------------------------------------------------------------------------

    def _route(self, call: Call) -> None:
        """Assign a call, or hold it while no replica is live."""
        prompt = call.request.prompt_ids
        preferred = None
        if self._last_route is not None and self._last_route[0] == prompt:
            preferred = self._last_route[1]
        all_rest = all(replica.resting for replica in self._replicas if replica.live)
        loads = [
            ReplicaLoad(
                live=replica.live and (all_rest or not replica.resting), outstanding_tokens=replica.outstanding_tokens
            )
            for replica in self._replicas
        ]
        index = choose_replica(loads, len(prompt), preferred)
        if index is None:
            self._held.append(call)
            return
        self._last_route = (prompt, index)
        replica = self._replicas[index]
        call.replica = index
        call.ticket = str(next(self._tickets))  # never used again, so that no late delta meets the wrong call
        replica.calls[call.ticket] = call
        replica.outstanding_tokens += call.outstanding_tokens
        replica.outbox.append(call)
        self._flush_soon(replica)

    def _clear(self, replica: Replica) -> None:
        """Move the requests of a live replica to others, from the tokens they have."""
        moved = list(replica.calls.values())
        for call in moved:
            if call in replica.outbox:
                replica.outbox.remove(call)
            else:
                replica.aborts.append(call.ticket)
                call.resumes += 1
            self._release(call)
        self._flush_soon(replica)
        for call in moved:
            self._route(call)

    def _flush_soon(self, replica: Replica) -> None:
        """Submit what gathers in this pass of the loop as one call."""
        if replica.flushing:
            return
        replica.flushing = True
        task = asyncio.create_task(self._flush(replica), name=f"{replica.spec.name}-submit")
        self._flushes.add(task)
        task.add_done_callback(self._flushes.discard)

    async def _flush(self, replica: Replica) -> None:
        await asyncio.sleep(0)  # whoever is ready in this pass submits first
        replica.flushing = False
        calls, replica.outbox = replica.outbox, []
        aborts, replica.aborts = replica.aborts, []
        worker = replica.worker
        if worker is None or not replica.live:
            return  # it died meanwhile: its calls have been moved
        try:
            if calls:
                await _call(worker, "submit", self._encoder.encode([call.resubmission() for call in calls]))
            if aborts:
                await _call(worker, "abort", aborts)
        except WorkerDied:
            return  # its keeper moves the calls
        except RemoteError as error:
            for call in calls:
                call.finish("error", str(error))

    def _absorb(self, replica: Replica, event: bytes) -> None:
        """Take over what a replica streamed."""
        now = self._clock.now()
        for delta in self._deltas.decode(event):
            call = replica.calls.get(delta.request_id)  # the engine knows it by its ticket
            if call is None:
                continue  # its caller is gone
            before = call.outstanding_tokens
            call.absorb(delta, now)
            replica.outstanding_tokens += call.outstanding_tokens - before
            if delta.finish_reason is not None:
                self._release(call)
                call.finish(delta.finish_reason, delta.error)
            else:
                call.tell()

    def _release(self, call: Call) -> None:
        """Take a call off its replica."""
        if call.replica is None:
            return
        replica = self._replicas[call.replica]
        if replica.calls.pop(call.ticket, None) is not None:
            replica.outstanding_tokens -= call.outstanding_tokens
        call.replica = None

    def _forget(self, call: Call) -> None:
        self._release(call)
        self._calls.pop(call.request.request_id, None)
        if call in self._held:
            self._held.remove(call)

    # --- life of a replica ----------------------------------------------------------------------------------

    async def _keep(self, replica: Replica) -> None:
        """Keeps a replica up until it is lost. What goes wrong in keeping it loses it too, so callers hear of it."""
        try:
            await self._serve_and_revive(replica)
        except Exception as error:  # the keeper's one capture point: without it, calls would be held for ever
            worker = replica.worker
            self._bury(replica)
            if worker is not None:
                worker.kill()
            self._lose(replica, f"its keeper failed: {type(error).__name__}: {error}")

    async def _serve_and_revive(self, replica: Replica) -> None:
        """Consumes a replica's events, waits for its death, restarts it; ends when it is lost."""
        while replica.worker is not None:
            worker = replica.worker
            async for event in worker.events:  # ends, drained, when the worker is dead
                self._absorb(replica, event)
            death = await worker.died
            if self._stopping:
                return
            self._bury(replica)
            self._on_event("generator_died", f"{replica.spec.name}: {death.cause}")
            await self._revive(replica, death)

    def _go_live(self, replica: Replica) -> None:
        replica.live, replica.live_since_s = True, self._clock.now()

    def _bury(self, replica: Replica) -> None:
        """Move a dead replica's calls to the live ones, from the tokens they have."""
        if replica.live:
            replica.served_s += self._clock.now() - replica.live_since_s
        replica.live, replica.worker = False, None
        replica.past = accumulated(replica.past, replica.present, dead=True)
        replica.present = EngineStatistics(version=replica.version)
        replica.aborts.clear()
        submitted = [call for call in replica.calls.values() if call not in replica.outbox]
        orphans = [*submitted, *replica.outbox]
        replica.outbox = []
        for call in submitted:
            call.resumes += 1
        for call in orphans:
            self._release(call)
        for call in orphans:
            if not call.future.done():
                self._route(call)

    async def _revive(self, replica: Replica, death: HeadwayError) -> None:
        """Restart until it lives with the newest weights, or give it up."""
        cause = death
        while True:
            replica.deaths.append(replica.served_s)
            while replica.deaths[0] < replica.served_s - _FORGIVEN_AFTER_S:
                replica.deaths.popleft()
            if len(replica.deaths) > self._restart_limit:
                self._lose(replica, f"gave up after {self._restart_limit} restarts; last: {cause}")
                return
            if len(replica.deaths) > 1:
                await self._clock.sleep(min(_LONGEST_BACKOFF_S, _BACKOFF_S * 2 ** (len(replica.deaths) - 2)))
            try:
                await self._launch(replica)
                await self._catch_up(replica)
            except HeadwayError as error:
                cause = error
                self._on_event("generator_restart_failed", f"{replica.spec.name}: {error}")
                await self._discard(replica)
                continue
            self._go_live(replica)
            replica.restarts += 1
            await self._tell_lent(replica)
            held, self._held = self._held, []
            for call in held:
                self._route(call)
            self._on_event("generator_restarted", f"{replica.spec.name}: version {replica.version}")
            return

    async def _launch(self, replica: Replica) -> None:
        replica.worker = await self._launcher.start(replica.spec)
        replica.version, replica.applied = 0, None

    async def _catch_up(self, replica: Replica) -> None:
        """Apply the newest published weights. On return none newer has been announced."""
        while self._newest is not None and replica.applied is not self._newest:
            newest = self._newest
            try:
                await self._apply(replica, newest)
            except WeightsCorrupt:
                if self._newest is newest:  # else: overwritten by a newer version, which is what we want
                    raise

    async def _discard(self, replica: Replica) -> None:
        worker, replica.worker = replica.worker, None
        if worker is not None:
            worker.kill()
            with contextlib.suppress(WorkerDied):
                await worker.died

    def _lose(self, replica: Replica, cause: str) -> None:
        """Give a replica up, and with the last one every call; only then tell, which may fail."""
        if replica.lost is not None:
            return
        replica.lost = WorkerDied(replica.spec.name, cause)
        if all(other.lost is not None for other in self._replicas):
            for call in list(self._calls.values()):
                call.fail(replica.lost)
        self._on_event("generator_lost", str(replica.lost))

    def _require_running(self) -> None:
        if self._stopping:
            raise HeadwayError("the generator pool is stopped")
        lost = [replica.lost for replica in self._replicas]
        if all(error is not None for error in lost):
            raise next(error for error in lost if error is not None)

    async def _apply(self, replica: Replica, weights: PublishedWeights) -> AppliedWeights:
        """Raises WeightsCorrupt, WorkerDied or RemoteError."""
        worker = replica.worker
        if worker is None:
            raise WorkerDied(replica.spec.name, "not running")
        try:
            applied: AppliedWeights = await _call(worker, "update_weights", weights, self._mode)
        except RemoteError as error:
            raise _own_cause(error) from None
        replica.version, replica.applied = applied.version, weights
        return applied

    async def _set_lent(self, lent: bool) -> None:
        self._lent = lent
        await asyncio.gather(*(self._tell_lent(replica) for replica in self._replicas if replica.live))

    async def _tell_lent(self, replica: Replica) -> None:
        if replica.shared and replica.worker is not None:
            with contextlib.suppress(WorkerDied):  # the next one is told when it lives
                await _call(replica.worker, "lend", self._lent)

    async def _refresh(self, replica: Replica) -> None:
        worker = replica.worker
        if worker is None:
            return
        with contextlib.suppress(WorkerDied):
            present = await _call(worker, "statistics")
            if replica.worker is worker:
                replica.present = present


async def _call(worker: Worker, method: str, *args: Any) -> Any:
    """Call a replica, which is killed when it doesn't answer. Raises WorkerDied or RemoteError."""
    try:
        return await worker.call(method, *args, timeout_s=_CALL_TIMEOUT_S)
    except TimeoutError:
        cause = f"{method} gave no result in {_CALL_TIMEOUT_S:g} s"
        worker.kill(cause)
        raise WorkerDied(worker.name, cause) from None


async def _activity(worker: Worker) -> list[ActivitySpan]:
    with contextlib.suppress(WorkerDied):
        return await _call(worker, "activity")
    return []


def _own_cause(error: BaseException) -> BaseException:
    """The typed error a replica raised, where it is one of ours."""
    own = isinstance(error, RemoteError) and isinstance(error.__cause__, HeadwayError)
    return error.__cause__ if own and error.__cause__ is not None else error
