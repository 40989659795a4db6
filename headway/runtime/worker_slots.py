"""Worker slots: each runs one supervised worker, reports its death and starts a successor.

A pool has one ``WorkerSlot`` for each of its workers and itself decides only which worker gets a request, and what
happens to the requests of a dead one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from headway.records.errors import HeadwayError, RemoteError, WorkerDied
from headway.records.trace import WorkerState
from headway.runtime.clock import Clock
from headway.runtime.retries import backoff_s
from headway.runtime.workers import EventCallback, Launcher, WorkerHandle, WorkerSpec, death_fields

_FIRST_PAUSE_S = 0.5  # before a start that follows two failures in a row; doubled for each further one
_LONGEST_PAUSE_S = 30.0


class OutageReporter:
    """Reports the outages of one worker and its successors as events: "NAME_died", "NAME_restart_failed",
    "NAME_restarted" and "NAME_lost", where NAME is the worker's without its number. The last two have the length of the
    outage in seconds, from the last sign of life."""

    def __init__(
        self, worker: str, on_event: EventCallback, now: Callable[[], float], held: Callable[[], int] = lambda: 0
    ) -> None:
        """``held()``: number of rollouts at the worker, which its death costs."""
        self._held = held
        self.restarts = 0
        self._worker = worker
        self._on_event = on_event
        self._now = now
        self.death: WorkerDied | None = None  # the last one
        self._down_since_s = 0.0

    def died(self, death: WorkerDied) -> None:
        self.death, self._down_since_s = death, self._now() - death.silent_s
        self.report("died", f"{self._worker}: {death.cause}", lost_samples=self._held())

    def restarted(self) -> None:
        self.restarts += 1
        self.report("restarted", f"{self._worker}: after {self._now() - self._down_since_s:.1f} s")

    def report(self, stage: str, detail: str, lost_samples: int = 0) -> None:
        event_fields: dict[str, Any] = {"worker": self._worker}
        if self.death is not None:
            event_fields = {**death_fields(self.death, lost_samples), "restarts": self.restarts}
            if stage in ("restarted", "lost"):
                event_fields["lost_s"] = round(self._now() - self._down_since_s, 3)
        self._on_event(f"{self._worker.rstrip('-0123456789')}_{stage}", detail, **event_fields)


class WorkerSlot:
    """A supervised worker and its successors.

    Lifecycle: *empty* -> *live* -> *down*, when the worker dies -> *live* again after ``restart``, or *lost*, when its
    pool gives up. Its pool decides when to restart: at once, or when there is work. The pause before a start grows
    with the failures in a row (failed starts, and deaths, except those with their node): none after one, then 0.5 s,
    doubled up to 30 s. ``reset_failures`` resets them; each also expires after ``failure_expiry_s`` of service.

    Example: the worker dies: "NAME_died", 1 failure. ``restart`` fails at once: "NAME_restart_failed", 2 failures.
    ``restart`` waits 0.5 s and takes 2 s to start one: "NAME_restarted", ``lost_s`` = 2.5.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        launcher: Launcher,
        clock: Clock,
        on_event: EventCallback = lambda name, detail, /, **data: None,
        *,
        limit: int | None = None,
        prepare: Callable[[WorkerHandle], Awaitable[None]] | None = None,
        restart_arguments: Mapping[str, Any] | None = None,
        failure_expiry_s: float = math.inf,
        held: Callable[[], int] = lambda: 0,
    ) -> None:
        """``limit``: failures in a row above which the slot is ``exhausted``. ``prepare(worker)`` makes a started
        worker ready; an error of it counts as a failed start. ``restart_arguments``: additional arguments of
        successors. ``held()``: number of rollouts at the worker."""
        self.spec = spec
        self.worker: WorkerHandle | None = None  # the last one, dead or alive; None after a failed start
        self.fault: Exception | None = None  # of the last death or failed start
        self.lost: WorkerDied | None = None
        self._launcher = launcher
        self._clock = clock
        self._reporter = OutageReporter(spec.name, on_event, clock.now, held)
        self._limit = limit
        self._prepare = prepare
        self._restart_arguments = dict(restart_arguments or {})
        self._failure_expiry_s = failure_expiry_s
        self._failures: deque[float] = deque()  # in a row: served_s at each
        self._served_s = 0.0  # by all predecessors together
        self._watching: asyncio.Task[None] | None = None
        self._restarting: asyncio.Task[WorkerHandle | None] | None = None
        self._stopping = False

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def live(self) -> WorkerHandle | None:
        """The worker, while it is alive."""
        return self.worker if self.worker is not None and self.worker.alive else None

    @property
    def failures(self) -> int:
        """Number of deaths and failed starts in a row, without those forgiven."""
        return len(self._failures)

    @property
    def exhausted(self) -> bool:
        return self._limit is not None and self.failures > self._limit

    @property
    def state(self) -> WorkerState:
        return WorkerState(name=self.name, up=self.live is not None, restarts=self.restarts)

    @property
    def restarts(self) -> int:
        return self._reporter.restarts

    @property
    def has_died(self) -> bool:
        """Whether a worker of this slot has died and was reported."""
        return self._reporter.death is not None

    def reset_failures(self) -> None:
        """Reset the failures so far, since the worker gets new work: a death by that isn't the worker's fault."""
        self._failures.clear()

    async def start(self) -> WorkerHandle:
        """Start the first worker. Raises the errors of the launcher and ``prepare``, with nothing left running."""
        return await self._start(self.spec)

    @property
    def restarting(self) -> bool:
        return self._restarting is not None and not self._restarting.done()

    def begin_restart(self) -> asyncio.Task[WorkerHandle | None]:
        """Return the restart that is under way; starts one if there is none."""
        if self._restarting is None or self._restarting.done():
            self._restarting = asyncio.create_task(self._restart(), name=f"{self.name}-restart")
        return self._restarting

    async def restart(self, timeout_s: float | None = None) -> WorkerHandle | None:
        """Wait for a successor (or for the first worker, where there was none), its pause included. None: the start
        failed, as ``fault`` explains, takes longer than ``timeout_s`` and continues, or the slot is stopped."""
        restart_task = self.begin_restart()
        await asyncio.wait((restart_task,), timeout=timeout_s)
        return restart_task.result() if restart_task.done() and not restart_task.cancelled() else None

    async def dead(self) -> None:
        """Wait until the worker's death is reported. Raises the errors of the event callback."""
        if self._watching is not None:
            await asyncio.shield(self._watching)

    def give_up(self, cause: str) -> WorkerDied:
        """Give the slot up, which is reported once. Returns the error to raise in callers that need the worker."""
        if self.lost is None:
            self.lost = WorkerDied(self.name, cause)
            self._reporter.report("lost", str(self.lost))
        return self.lost

    def kill(self, reason: str = "") -> None:
        """End the worker at once, for good: its death is no failure and isn't reported."""
        self._stopping = True
        if self.worker is not None:
            self.worker.kill(reason)

    async def stop(self, grace_s: float) -> None:
        """End the worker, or the start that is under way, for good; kill it after ``grace_s``."""
        self._stopping = True
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.wait((self._restarting,))
        if self.worker is not None:
            await self.worker.stop(grace_s)
        if self._watching is not None:
            await asyncio.gather(self._watching, return_exceptions=True)

    async def _start(self, spec: WorkerSpec) -> WorkerHandle:
        try:
            self.worker = worker = await self._launcher.start(spec)
            if self._prepare is not None:
                await self._prepare(worker)
        except BaseException:
            if (failed_worker := self.worker) is not None:
                self.worker = None
                failed_worker.kill()
                await failed_worker.died
            raise
        self._watching = asyncio.create_task(self._watch(worker), name=f"{self.name}-watch")
        return worker

    async def _watch(self, worker: WorkerHandle) -> None:
        """Wait for the worker's death, count it and report it."""
        since_s = self._clock.now()
        death = await worker.died
        self._served_s += self._clock.now() - since_s
        if not self._stopping:
            self.fault = death
            if death.found_by != "node":  # a machine's end is no failure of the worker's
                self._fail(death)
            self._reporter.died(death)

    async def _restart(self) -> WorkerHandle | None:
        await self.dead()
        if (pause_s := backoff_s(self.failures - 1, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)) > 0:
            await self._clock.sleep(pause_s)
        is_first = self._watching is None
        extra_arguments = {} if is_first else self._restart_arguments
        try:
            worker = await self._start(dataclasses.replace(self.spec, arguments=self.spec.arguments | extra_arguments))
        except Exception as error:  # the capture point of restarts: callers find it in `fault`
            self._fail(error)
            self._reporter.report("restart_failed", f"{self.name}: {error}")
            return None
        if not is_first:
            self._reporter.restarted()
        return worker

    def _fail(self, fault: Exception) -> None:
        self.fault = fault
        self._failures.append(self._served_s)
        while self._failures[0] < self._served_s - self._failure_expiry_s:
            self._failures.popleft()


async def start_all(slots: Sequence[WorkerSlot]) -> list[WorkerHandle]:
    """Start the first workers of all slots concurrently. When all starts have ended, raises the error of the first slot
    that failed: the worker's own typed error, where it is one of ours."""
    outcomes = await asyncio.gather(*(slot.start() for slot in slots), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise typed_cause(outcome)
    return [worker for worker in outcomes if not isinstance(worker, BaseException)]


async def stop_all(slots: Sequence[WorkerSlot], grace_s: float) -> None:
    """Stop all slots concurrently."""
    await asyncio.gather(*(slot.stop(grace_s) for slot in slots))


def live_pids(slots: Sequence[WorkerSlot]) -> list[int]:
    """Process ids of the live workers, in order."""
    return [slot.live.pid for slot in slots if slot.live is not None]


def typed_cause(error: BaseException) -> BaseException:
    """The typed error that a worker raised, where it is one of ours; ``error`` otherwise."""
    has_typed_cause = isinstance(error, RemoteError) and isinstance(error.__cause__, HeadwayError)
    return error.__cause__ or error if has_typed_cause else error
