"""The generator pool: replicas behind one torch-free handle (records.clients.Generator)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path

import msgspec

from headway.config.adapter import AdapterConfig
from headway.config.router import RouterConfig
from headway.config.schema import Experiment
from headway.generator.routing.counters import accumulated
from headway.generator.routing.health import Health
from headway.generator.routing.limiter import Limiter
from headway.generator.routing.live_adapters import LiveAdapters
from headway.generator.routing.prompt_calls import PromptCalls
from headway.generator.routing.replica import Replica, activity_of, call_replica, raise_but_deaths, replica_spec
from headway.generator.routing.router import Router
from headway.generator.routing.version_updates import VersionUpdates
from headway.records.clients import Watch
from headway.records.errors import (
    ConfigurationError,
    HeadwayError,
    RemoteError,
    WeightsCorrupt,
    WeightsMismatch,
    WorkerDied,
)
from headway.records.execution import MemoryMove
from headway.records.generation import (
    AppliedWeights,
    EngineStatistics,
    GenerationRequest,
    GenerationResult,
    Probe,
    ProbeScores,
    PublishedWeights,
    RouterStatistics,
)
from headway.records.trace import EngineSteps, Span, WorkerState
from headway.runtime.clock import Clock
from headway.runtime.worker_slots import WorkerSlot, live_pids, start_all, stop_all, typed_cause
from headway.runtime.workers import EventCallback, Launcher, WorkerHandle

_FAILURE_EXPIRY_S = 300.0  # a death no longer counts once its replica has been live this long
_STOP_GRACE_S = 1.0
_PATIENCE_S = 60.0  # longest wait of a new process until weights that it can't read are published again
_UNRECOVERABLE = (WeightsMismatch, ConfigurationError)  # a restarted process would raise these again


class GeneratorPool:
    """A pool of replicas that share the requests. A replica's death costs a restart and a prefill, never a request.

    The router assigns requests to replicas; the pool keeps the replicas alive, updated and health-checked. A restarted
    replica, and one that ``join``s during the run, applies the newest published weights before its first request. A
    replica that needs more than ``restart_limit`` restarts within five minutes of service is lost (failed restarts
    count, the time they take doesn't); with the last replica lost, every call raises WorkerDied. A replica that is
    behind on versions, because an update failed there or takes too long, takes no requests until it has caught up. The
    next health check repeats the update; if that fails too, the replica is restarted.

    Rollouts of the run call ``generate`` and wait. Foreign callers acquire a permit from ``limiter`` first.
    """

    def __init__(
        self,
        launcher: Launcher,
        experiment: Experiment,
        clock: Clock,
        *,
        on_event: EventCallback = lambda name, detail, /, **data: None,
        log_directory: str | Path | None = None,
        restart_limit: int = 5,
        bring_to: Callable[[PublishedWeights, str], Awaitable[PublishedWeights]] | None = None,
        adapters: Mapping[str, AdapterConfig] | None = None,
        router: RouterConfig | None = None,
        role: str = "generator",
    ) -> None:
        """``on_event(name, detail)`` reports deaths, restarts, losses, breaker changes and replicas that are behind.
        ``bring_to(weights, node)`` returns the weights in a form that the node's replicas can read. ``adapters`` are
        served beside the run's. ``router`` replaces the experiment's settings. ``role`` begins its workers' names."""
        self._launcher, self._experiment, self._clock = launcher, experiment, clock
        self._on_event, self._log_directory, self._restart_limit = on_event, log_directory, restart_limit
        self._adapters, self._role, self._bring_to = adapters, role, bring_to
        self._router_settings = settings = router or RouterConfig.of(experiment.router)
        self._replicas: list[Replica] = []
        for device in experiment.generator.devices:
            self._add_replica(device)
        lag = experiment.queue.budget // 2
        self._router = Router(self._replicas, settings, clock, self._on_event, lag)
        self.limiter = Limiter(settings, clock, self._router.capacity_tokens, self._on_event)
        self._health = Health(
            self._replicas,
            self._router,
            settings,
            clock,
            ask=self._refresh,
            bring_up=self._bring_up,
            settle=self._settle,
            on_event=self._on_event,
        )
        self._updates = VersionUpdates(clock, self._apply)
        self._updating, self._voided = asyncio.Lock(), list[str]()  # of `take_voided`
        self.adapters = LiveAdapters(self._replicas)
        self.prompts = PromptCalls(self._replicas, clock, self._require_running)
        self._supervisors: dict[str, asyncio.Task[None]] = {}  # by replica
        self._stopping = False
        self._unrecoverable: HeadwayError | None = None  # an error that no restart repairs

    async def start(self) -> None:
        """Start all replicas. If one fails, stop the others and raise the first failure, as its own typed error."""
        try:
            workers = await start_all([replica.slot for replica in self._replicas])
        except BaseException:
            await self.stop()
            raise
        for replica, worker in zip(self._replicas, workers, strict=True):
            self._go_live(replica, worker)

    async def generate(self, request: GenerationRequest, watch: Watch | None = None) -> GenerationResult:
        """See :class:`headway.records.clients.Generator`. Cancelling the caller aborts the request in the engine.

        Raises ValueError for an id that is open already, WorkerDied when every replica is lost.
        """
        self._require_running()
        call = self._router.open(request, watch)
        try:
            return await call.future
        except asyncio.CancelledError:
            self._router.cancel(request.request_id)
            raise
        finally:
            self._router.close(call)

    def cancel(self, request_id: str) -> None:
        """End a request: its ``generate`` returns with finish_reason "abort" and the tokens so far. Unknown: no-op."""
        self._router.cancel(request_id)

    async def update_weights(self, weights: PublishedWeights, leave_slow: bool = False) -> list[AppliedWeights]:
        """Apply a version on all live replicas concurrently; returns one report for each, with ``leave_slow`` for those
        that are about as fast as the first (see `VersionUpdates.announce`). A replica that is down applies it when it
        restarts. In the mode ``drain`` all requests under way finish first. Raises WeightsCorrupt if a replica could
        not verify the weights; that replica keeps its old ones."""
        settings = self._experiment.generator
        drains_first = settings.update_mode == "drain"
        async with self._updating, self._router.drained(settings.slots) if drains_first else contextlib.nullcontext():
            self._require_running()
            live_replicas = [replica for replica in self._replicas if replica.live]
            outcomes = await self._updates.announce(weights, live_replicas, leave_slow=leave_slow and not drains_first)
        self._health.note_versions()
        for outcome in outcomes:
            if isinstance(outcome, _UNRECOVERABLE):
                self._give_up(outcome)
        raise_but_deaths(outcomes)
        return [outcome for outcome in outcomes if isinstance(outcome, AppliedWeights)]

    async def applied_version(self) -> int:
        """Return the lowest version of live replicas that aren't behind; if there is none, the newest announced."""
        self._require_running()
        standings = zip(self._replicas, self._router.standings(self._clock.now()), strict=True)
        versions = [replica.version for replica, standing in standings if replica.live and standing != "behind"]
        newest = self._updates.newest
        return min(versions, default=newest.version if newest is not None else 0)

    def take_voided(self) -> list[str]:
        """See :class:`headway.records.clients.Generator`."""
        voided, self._voided = self._voided, []
        return voided

    async def score(self, probe: Probe) -> list[ProbeScores]:
        """See :class:`headway.records.clients.Generator`."""
        current_replicas = (replica for replica in self._replicas if replica.update == self._updates.count)
        return await Replica.score_all(current_replicas, probe)

    async def pause_replicas(self, indices: Collection[int]) -> None:
        """See :class:`headway.records.clients.Generator`. A replica that dies while paused stays paused."""
        await self._set_yielded(indices, yielded=True)

    async def resume_replicas(self, indices: Collection[int]) -> None:
        """See :class:`headway.records.clients.Generator`."""
        await self._set_yielded(indices, yielded=False)

    async def offload(self, index: int) -> list[MemoryMove]:
        """Free the memory of a paused replica; returns its memory moves since the last `offload` or `onload`."""
        return await self._replicas[index].offload()

    async def onload(self, index: int) -> list[MemoryMove]:
        """Let an offloaded replica compute again; it loads its memory once it has something to compute."""
        return await self._replicas[index].onload()

    async def idle_replicas(self, idle: Collection[int]) -> None:
        """See :class:`headway.records.clients.Generator`."""
        for replica in self._replicas:
            replica.idle = replica.index in idle
        live_replicas = [replica for replica in self._replicas if replica.live]
        resting_replicas = [replica for replica in live_replicas if replica.idle]
        for replica in resting_replicas if len(resting_replicas) < len(live_replicas) else ():
            self._router.clear(replica)
        self._settle()

    async def statistics(self) -> list[EngineStatistics]:
        """Return the statistics of each replica, in order; counters accumulate across restarts."""
        self._require_running()
        alive = [replica for replica in self._replicas if replica.live]
        raise_but_deaths(await asyncio.gather(*(self._refresh(replica) for replica in alive), return_exceptions=True))
        return [
            msgspec.structs.replace(accumulated(replica.past, replica.present), idle=replica.idle or replica.removed)
            for replica in self._replicas
        ]

    def routing(self) -> RouterStatistics:
        """See :class:`headway.records.clients.Generator`."""
        statistics = self._router.statistics()
        return msgspec.structs.replace(
            statistics,
            waiters=statistics.waiters + self.limiter.waiting,
            oldest_age_s=max(statistics.oldest_age_s, self.limiter.oldest_age_s()),
            refusals=self.limiter.refusals,
        )

    async def activity(self) -> list[Span | EngineSteps]:
        """Return the spans and steps of live replicas since the last call, each on a track of its replica's name."""
        live_workers = [(replica.name, replica.worker) for replica in self._replicas if replica.live and replica.worker]
        records_by_replica = await asyncio.gather(*(activity_of(name, worker) for name, worker in live_workers))
        return [record for records in records_by_replica for record in records]

    @property
    def worker_states(self) -> list[WorkerState]:
        """Health and restarts of every replica that wasn't removed."""
        slot_states = [(replica.slot, replica.live) for replica in self._replicas if not replica.removed]
        return [WorkerState(name=s.name, up=up, restarts=s.restarts, device=s.spec.device) for s, up in slot_states]

    async def stop(self) -> None:
        """Stop all replicas; calls that still wait raise HeadwayError."""
        self._stopping = True
        self.limiter.stop()
        for supervisor_task in self._supervisors.values():
            supervisor_task.cancel()
        await asyncio.gather(
            *self._supervisors.values(), self._router.stop(), self._updates.stop(), return_exceptions=True
        )
        for replica in self._replicas:
            replica.live = False
        await stop_all([replica.slot for replica in self._replicas], _STOP_GRACE_S)
        self._router.fail_all(HeadwayError("the generator pool is stopped"))

    def tokens_so_far(self, request_id: str) -> int:
        """See :class:`headway.records.clients.Generator`."""
        return self._router.tokens_so_far(request_id)

    def open_tokens(self) -> list[int]:
        """Count of streamed response tokens for every open request."""
        return self._router.open_tokens()

    @property
    def pids(self) -> list[int]:
        """Process ids of the live replicas, in order."""
        return live_pids([replica.slot for replica in self._replicas if replica.live])

    async def join(self, device: str) -> str:
        """Start one more replica on ``device``; returns its name. The replica applies the newest version before its
        first request. Raises the typed error of a failed start, after cleaning up. For a node that
        comes back, whose replica is restarting already, returns that replica's name."""
        self._require_running()
        for replica in self._replicas:
            if replica.node and replica.slot.spec.device == device and not replica.gone:
                return replica.name
        replica = self._add_replica(device)
        try:
            worker = await replica.slot.start()
            self._require_running()
        except BaseException as error:
            replica.removed = True
            await replica.slot.stop(0.0)
            self._fail_without_replicas()
            raise typed_cause(error) from None
        self._go_live(replica, worker)
        self._settle()
        self._on_event("generator_joined", f"{replica.name} on {device}: version {replica.version}")
        return replica.name

    async def leave(self, name: str, *, move: bool = False) -> None:
        """Drain a replica and stop it. It takes no more requests and finishes its own; with ``move`` they move to
        other replicas with their tokens so far. Returns once its process has ended, even if it was restarting.
        Raises ValueError for an unknown replica, and for the last one."""
        staying = {replica.name: replica for replica in self._replicas if not replica.gone and not replica.draining}
        if name not in staying:
            raise ValueError(f"{name!r} isn't a live replica; valid: {', '.join(staying)}")
        if len(staying) == 1:
            raise ValueError(f"{name} is the last live replica: another must join before it can be removed")
        replica = staying[name]
        replica.draining = True
        if move:
            self._router.clear(replica)
        try:
            if replica.calls:
                await replica.emptied.wait()
            await replica.slot.stop(_STOP_GRACE_S)
            await asyncio.wait((self._supervisors[name],))  # the supervisor absorbs the events still in the pipe
        finally:  # a cancelled caller ends the draining at once
            replica.slot.kill("it was removed")
            replica.removed = True
            self._fail_without_replicas()
            self._on_event("generator_left", name)

    async def _supervise(self, replica: Replica, worker: WorkerHandle) -> None:
        """Keep a replica running until it is lost. An error here loses the replica too, so that its calls fail."""
        try:
            await self._serve_and_revive(replica, worker)
        except Exception as error:  # the supervisor's one capture point: without it, calls would be held forever
            self._mark_dead(replica)
            replica.slot.kill()
            self._mark_lost(replica, f"its supervisor failed: {type(error).__name__}: {error}")

    async def _serve_and_revive(self, replica: Replica, first: WorkerHandle) -> None:
        """Consume a replica's events, wait for its death and restart it, until it is lost or removed."""
        worker: WorkerHandle | None = first
        while worker is not None:
            health_task = asyncio.create_task(self._health.watch(replica), name=f"{replica.name}-health")
            try:
                async for event in worker.events:  # ends, drained, when the worker is dead
                    self._router.absorb(replica, event)
            finally:
                health_task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await health_task
            await replica.slot.dead()
            if self._stopping:
                return
            self._mark_dead(replica)
            if replica.draining:
                return
            self._router.report()
            worker = await self._revive(replica)

    def _go_live(self, replica: Replica, worker: WorkerHandle) -> None:
        replica.live = True
        self._supervisors[replica.name] = asyncio.create_task(self._supervise(replica, worker), name=replica.name)

    def _mark_dead(self, replica: Replica) -> None:
        """Mark a replica dead and move its calls to live replicas, with their tokens so far."""
        replica.live = False
        replica.past = accumulated(replica.past, replica.present, dead=True)
        replica.present = EngineStatistics(version=replica.version)
        self._router.reassign(replica)

    async def _bring_up(self, replica: Replica) -> None:
        """Apply the newest weights on a replica that failed to apply them. If it fails again, kill it: a new process
        may succeed, and requests that need newer weights would otherwise wait forever."""
        worker = replica.worker
        try:
            await self._updates.bring_up(replica)
        except _UNRECOVERABLE as error:
            self._give_up(error)
        except (WeightsCorrupt, RemoteError) as error:
            if worker is not None:
                worker.kill(f"it could not load the newest weights: {error}")

    def _settle(self) -> None:
        """Assign held requests and admit waiting callers: a replica may take requests again."""
        self._router.settle()
        self.limiter.admit_waiting()

    async def _revive(self, replica: Replica) -> WorkerHandle | None:
        """Restart a dead replica until it is live with the newest weights; returns None once it is lost."""
        slot = replica.slot
        while not slot.exhausted and not replica.draining:
            if (worker := await slot.restart()) is not None:
                await self._notify_yielded(replica)
                self._settle()
                return worker
            assert slot.fault is not None
            if not isinstance(slot.fault, HeadwayError):
                raise slot.fault
            typed_error = typed_cause(slot.fault)
            if isinstance(typed_error, _UNRECOVERABLE):
                self._give_up(typed_error)
                return None
        if not replica.draining:
            self._mark_lost(replica, f"gave up after {self._restart_limit} restarts; last: {slot.fault}")
        return None

    def _add_replica(self, device: str) -> Replica:
        index, folder = len(self._replicas), self._log_directory
        spec = replica_spec(index, device, self._experiment, folder, self._adapters, self._role)
        slot = WorkerSlot(
            spec,
            self._launcher,
            self._clock,
            self._on_event,
            limit=self._restart_limit,
            prepare=lambda worker: self._prepare(replica),
            restart_arguments={"restarted": True},
            failure_expiry_s=_FAILURE_EXPIRY_S,
            held=lambda: len(replica.calls),
        )
        replica = Replica(len(self._replicas), slot, self._experiment, self._router_settings)
        self._replicas.append(replica)
        return replica

    async def _prepare(self, replica: Replica) -> None:
        """Prepare a replica's new process: apply the newest weights, and close its breaker after a restart."""
        replica.version, replica.update, replica.reported_behind = 0, 0, False
        restarted = replica.slot.has_died
        if restarted:
            await self._refresh(replica)  # the probe that closes its breaker
        await self._updates.catch_up(replica, _PATIENCE_S)
        await self.adapters.restore(replica)
        if restarted:
            self._router.note_restarted(replica)
            replica.live = True

    def _give_up(self, cause: HeadwayError) -> None:
        """Fail every call with ``cause``, now and later, which ends the run: no restart would help."""
        if self._unrecoverable is None:
            self._unrecoverable = cause
            self._router.fail_all(cause)

    def _mark_lost(self, replica: Replica, cause: str) -> None:
        """Mark a replica lost; with the last one, fail every call, even if the event handler raises."""
        if replica.slot.lost is None:
            try:
                replica.slot.give_up(cause)
            finally:
                self._fail_without_replicas(replica.slot.lost)

    def _fail_without_replicas(self, cause: HeadwayError | None = None) -> None:
        """Fail every call if no replica is left."""
        if (pool_error := self._pool_error()) is not None:
            self._router.fail_all(cause or pool_error)

    def _pool_error(self) -> HeadwayError | None:
        """Return the error that ended the pool, if no replica will be live again; None while one may be."""
        if self._unrecoverable is not None:
            return self._unrecoverable
        if not all(replica.gone for replica in self._replicas):
            return None
        return next(replica.slot.lost for replica in self._replicas if replica.slot.lost is not None)

    def _require_running(self) -> None:
        if self._stopping:
            raise HeadwayError("the generator pool is stopped")
        if (pool_error := self._pool_error()) is not None:
            raise pool_error

    async def _apply(self, replica: Replica, weights: PublishedWeights, number: int) -> AppliedWeights:
        """Apply ``weights``, of the update ``number``, on one replica. Raises WeightsCorrupt, WorkerDied or
        RemoteError."""
        if replica.live:
            await replica.onloaded.wait()
        if (worker := replica.worker) is None:
            raise WorkerDied(replica.name, "not running")
        mode = self._experiment.generator.update_mode
        mode = "keep" if mode == "drain" else mode  # nothing is in flight
        replica.updating_since_s = self._clock.now()
        try:
            if self._bring_to is not None:
                weights = await self._bring_to(weights, replica.node)
            applied: AppliedWeights = await call_replica(worker, "update_weights", weights, mode)
        except RemoteError as error:
            raise typed_cause(error) from None
        except WeightsCorrupt:
            if worker.died.done():  # with its node
                raise worker.died.result() from None
            raise
        finally:
            replica.updating_since_s = None
        if applied.damage:
            self._on_event("weights_damaged", f"{replica.name}: {applied.damage}", replica=replica.index)
            self._voided += replica.answered
        replica.answered.clear()
        replica.version, replica.update, replica.epoch = applied.version, number, replica.epoch + 1
        self._router.standings(self._clock.now(), [replica])  # from now on others that lack it are behind
        self._settle()  # it may have been behind
        return applied

    async def _set_yielded(self, indices: Collection[int], *, yielded: bool) -> None:
        chosen_replicas = [replica for replica in self._replicas if replica.index in indices]
        for replica in chosen_replicas:
            replica.yielded = yielded
        await asyncio.gather(*(self._notify_yielded(replica) for replica in chosen_replicas if replica.live))
        self._settle()

    async def _notify_yielded(self, replica: Replica) -> None:
        if replica.worker is not None:
            with contextlib.suppress(WorkerDied):  # its successor is notified when it is live
                await call_replica(replica.worker, "yield_device", replica.yielded)
                if not replica.onloaded.is_set():
                    await replica.offload()

    async def _refresh(self, replica: Replica) -> None:
        """Fetch a replica's counters. Raises WorkerDied or RemoteError."""
        worker = replica.worker
        if worker is None:
            raise WorkerDied(replica.name, "not running")
        statistics = await call_replica(worker, "statistics")
        if replica.worker is worker and worker.alive:
            replica.present = statistics
