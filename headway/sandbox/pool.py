"""Leases sandboxes, with separate limits on live ones and on concurrent starts.

The limits are separate because the costs differ: a live sandbox costs memory, a start costs time of the machine (or the
provider), and a thousand concurrent starts are slower than the same starts in turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from typing import Any

import msgspec

from headway.config import sandbox as config
from headway.records.sandbox import (
    Capabilities,
    SandboxError,
    SandboxSpec,
    Snapshot,
    as_start_failure,
    infrastructure_failure,
)
from headway.records.sandbox_statistics import Latencies, PoolStatistics
from headway.runtime.clock import Clock
from headway.runtime.retries import Breaker, backoff_s
from headway.runtime.supervision import run_to_completion, spawn
from headway.sandbox.fair_semaphore import FairSemaphore
from headway.sandbox.leased import CommandCounts, LeasedSandbox
from headway.sandbox.protocol import SandboxSource

RECENT_STARTS = 512  # durations kept to recognise stragglers


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on the use of a backend, and the policy for slow and failed starts."""

    live: int = 64  # sandboxes at once, including those being made
    starts: int = 8  # being made at once
    retries: int = 2  # of a start after a transient failure of the infrastructure, and of an end
    backoff_s: float = 0.2  # before the first retry; doubled for each further one, times a random factor of 0.5 to 1.5
    start_timeout_s: float = 300.0  # of one start
    end_timeout_s: float = 60.0  # of ending a sandbox, until the next try
    outage_s: float = 600.0  # how long a start waits for an open breaker to close
    hedge_share: float = 0.05  # of starts, at most: a second one beside a straggler; 0: none
    hedge_quantile: float = 0.95  # of recent starts: a straggler takes longer than that, ...
    hedge_factor: float = 2.0  # ... by this factor, ...
    hedge_least_s: float = 1.0  # ... and at least this long
    hedge_after: int = 20  # starts to be measured before any counts as a straggler
    seed: int = 0


def pool_settings(settings: config.SandboxConfig) -> PoolSettings:
    """Make the pool's settings from an experiment's."""
    return PoolSettings(
        live=settings.live,
        starts=settings.starts,
        start_timeout_s=settings.start_limit_s,
    )


class _StartRequest(msgspec.Struct, frozen=True, kw_only=True):
    spec: SandboxSpec
    labels: Mapping[str, str] | None
    snapshot: Snapshot | None


_StartTask = asyncio.Task[LeasedSandbox]


class SandboxPool:
    """Leases sandboxes of a backend, first come, first served.

    Lifecycle: *open* -> *closed*, by `close`, which ends all sandboxes, not the backend. Invariants: never more than
    ``live`` sandboxes, nor more than ``starts`` of them being made; a lease that ends, for any reason, has ended its
    sandbox or counts it as leaked. A *hedge* is a second start beside one that takes far longer than earlier ones: the
    first that is ready is leased, the other is ended. It only takes slots that no task waits for. Example (live 2,
    starts 1): of three concurrent tasks, the first is served, then the second; the third waits for the end of a lease.
    """

    def __init__(
        self, backend: SandboxSource, settings: PoolSettings, clock: Clock, *, breaker: Breaker | None = None
    ) -> None:
        self._backend = backend
        self._settings = settings
        self._clock = clock
        self._breaker = breaker
        self._breaker_queue = asyncio.Lock()  # starts wait here in order while the breaker is open
        self._changed = asyncio.Event()  # set when a probe has ended or the pool is closed
        self._random = random.Random(settings.seed)
        self._live = FairSemaphore(settings.live, clock)
        self._starts = FairSemaphore(settings.starts, clock)
        self._boxes: dict[str, LeasedSandbox] = {}
        self._leaked: dict[str, LeasedSandbox] = {}
        self._pending_starts: set[_StartTask] = set()
        self._ending: set[asyncio.Task[None]] = set()  # the losers of hedged starts
        self._recallable: OrderedDict[object, Callable[[], Coroutine[Any, Any, None]]] = OrderedDict()
        self._recalls: set[asyncio.Task[None]] = set()  # parked sandboxes whose leases are being ended
        self._closed = False
        self._capabilities: Capabilities | None = None
        self._recent_s: deque[float] = deque(maxlen=RECENT_STARTS)
        self._counts = CommandCounts()
        self._failures: Counter[str] = Counter()
        self.trouble = ""  # the cause of the last start's failure; "": it succeeded
        self._launched = self._started = self._retries = self._hedges = self._hedges_won = 0
        self._openings = self._lost = 0
        self._queue = self._start_times = Latencies()

    @contextlib.asynccontextmanager
    async def lease(
        self, spec: SandboxSpec, *, labels: Mapping[str, str] | None = None, snapshot: Snapshot | None = None
    ) -> AsyncIterator[LeasedSandbox]:
        """Lease a sandbox for the duration of the block. Raises SandboxError if it can't be made, after all retries."""
        queued_s = self._clock.now()
        if self._live.acquired >= self._live.count:
            asyncio.get_running_loop().call_soon(self._recall)  # runs once this task is queued
        await self._live.acquire()
        try:
            request = _StartRequest(spec=spec, labels=labels, snapshot=snapshot)
            sandbox = await self._start(request, self._clock.now() - queued_s)
            try:
                yield sandbox
            finally:
                await run_to_completion(self._end(sandbox))
        finally:
            self._live.release()

    def allow_recall(self, give_back: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
        """Allow the pool to recall a leased sandbox that is idle: when a task waits for a slot, the pool runs
        ``give_back``, which ends the lease. The longest idle is recalled first. Returns a function that withdraws the
        permission."""
        offer = object()
        self._recallable[offer] = give_back
        self._recall()

        def withdraw() -> None:
            self._recallable.pop(offer, None)

        return withdraw

    async def can_pause(self) -> bool:
        """Return whether the backend's sandboxes can be paused, as `allow_recall` requires."""
        if self._capabilities is None:
            self._capabilities = await self._backend.capabilities()
        return self._capabilities.pause

    def _recall(self) -> None:
        """Recall as many idle sandboxes as there are waiting tasks."""
        while self._recallable and self._live.waiters > len(self._recalls):
            _, give_back = self._recallable.popitem(last=False)
            recall_task = asyncio.create_task(give_back(), name="returning a leased sandbox")
            self._recalls.add(recall_task)
            recall_task.add_done_callback(self._on_recall_done)

    def _on_recall_done(self, recall: asyncio.Task[None]) -> None:
        self._recalls.discard(recall)
        self._recall()

    # Starts.

    async def _start(self, request: _StartRequest, waited_s: float) -> LeasedSandbox:
        """Make a sandbox, with retries. ``waited_s``: time in the queue so far."""
        attempt = 0
        while True:
            started_s = self._clock.now()
            start_task = await self._admit_start(request)
            waited_s += self._clock.now() - started_s
            try:
                sandbox = await self._race(request, start_task)
                self._queue = self._queue.with_duration(waited_s)
                return sandbox
            except SandboxError as error:
                if not error.failure.retry or self._closed or attempt == self._settings.retries:
                    raise
            self._retries += 1
            await self._back_off(attempt)
            attempt += 1

    async def _back_off(self, attempt: int) -> None:
        await self._clock.sleep(backoff_s(attempt + 1, self._settings.backoff_s) * self._random.uniform(0.5, 1.5))

    async def _admit_start(self, request: _StartRequest) -> _StartTask:
        """Launch a start, once a slot for starts is free and the breaker admits it."""
        await self._starts.acquire()
        try:
            is_probe = await self._wait_for_breaker()
        except BaseException:
            self._starts.release()
            raise
        return self._launch(request, probe=is_probe)

    async def _wait_for_breaker(self) -> bool:
        """Wait, in order, until the breaker admits a start. True: this start is its probe."""
        breaker, patience_s = self._breaker, self._settings.outage_s
        if breaker is None:
            return False
        try:
            async with asyncio.timeout(patience_s), self._breaker_queue:
                while not self._closed and not breaker.allows(now := self._clock.now()):
                    self._changed.clear()
                    remaining_s = (breaker.opens_s() or now) - now
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), remaining_s if remaining_s > 0 else None)
                if self._closed:
                    raise SandboxError(_CLOSED)
                return breaker.send(self._clock.now())
        except TimeoutError:
            text = f"starts of sandboxes kept failing, and {patience_s:g} s later they still fail: read their errors"
            raise SandboxError(infrastructure_failure(text)) from None

    def _launch(self, request: _StartRequest, *, probe: bool = False) -> _StartTask:
        """Launch a start, for which the caller has acquired a slot for starts; the slot is released at its end."""
        start_task = asyncio.create_task(self._make(request), name="making a sandbox")
        self._pending_starts.add(start_task)
        start_task.add_done_callback(lambda ended: self._on_start_done(ended, probe))  # also if the task never began
        self._launched += 1
        return start_task

    async def _make(self, request: _StartRequest) -> LeasedSandbox:
        started_s, limit_s = self._clock.now(), self._settings.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                sandbox = await self._backend.create(**msgspec.structs.asdict(request))
        except TimeoutError:
            raise SandboxError(infrastructure_failure(f"a sandbox wasn't ready in {limit_s:g} s")) from None
        except SandboxError as error:
            if request.snapshot is not None:  # the snapshot may exceed the limits: the failure's cause is kept
                raise
            raise SandboxError(as_start_failure(error.failure)) from error
        took_s = self._clock.now() - started_s
        self._started += 1
        self._recent_s.append(took_s)
        self._start_times = self._start_times.with_duration(took_s)
        leased_sandbox = self._boxes[sandbox.id] = LeasedSandbox(sandbox, request.spec.ttl_s, self._counts, self._clock)
        return leased_sandbox

    def _on_start_done(self, start_task: _StartTask, probe: bool) -> None:
        self._pending_starts.discard(start_task)
        self._starts.release()
        error = None if start_task.cancelled() else start_task.exception()
        if isinstance(error, SandboxError):
            self._failures[error.failure.cause] += 1
        if isinstance(error, SandboxError) and error.failure.cause == "infrastructure":
            self.trouble = error.failure.message
        elif error is None and not start_task.cancelled():
            self.trouble = ""
        if self._breaker is None:
            return
        now = self._clock.now()
        if isinstance(error, SandboxError) and error.failure.cause == "infrastructure":
            self._openings += self._breaker.fail(now, probe=probe)
        elif error is None and not start_task.cancelled():
            self._breaker.succeed(now, probe=probe)
        elif probe:
            self._breaker.withdraw()  # no evidence about the backend
        if probe:
            self._changed.set()

    # Hedged starts.

    async def _race(self, request: _StartRequest, first: _StartTask) -> LeasedSandbox:
        """Return the sandbox that is ready first: the start's, or that of a hedge which is launched if it straggles."""
        running, hedge = {first}, None
        spare_slots = 0  # slots of `live` beyond the lease's
        winner: _StartTask | None = None
        try:
            while True:
                wait_s = self._straggles_after_s() if hedge is None else None
                done_starts, _ = await asyncio.wait(running, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                if not done_starts:
                    hedge = self._hedge(request)
                    if hedge is not None:
                        running.add(hedge)
                        spare_slots = 1
                    continue
                running -= done_starts
                succeeded_starts = [start for start in (first, hedge) if start in done_starts and _succeeded(start)]
                if succeeded_starts:
                    winner = succeeded_starts[0]
                    running |= set(succeeded_starts[1:])
                    self._hedges_won += winner is hedge
                    return winner.result()
                if not running:
                    raise _start_error(first if first in done_starts else done_starts.pop())
        finally:
            if running or spare_slots:
                drop_task = spawn(self._ending, self._cancel_losers(running, spare_slots), "ending a hedged start")
                if winner is None:
                    await run_to_completion(_wait_finished(drop_task))  # the lease's own slot is released next

    def _straggles_after_s(self) -> float | None:
        settings = self._settings
        if settings.hedge_share <= 0 or len(self._recent_s) < settings.hedge_after:
            return None
        usual_s = sorted(self._recent_s)[int(settings.hedge_quantile * (len(self._recent_s) - 1))]
        return max(settings.hedge_least_s, settings.hedge_factor * usual_s)

    def _hedge(self, request: _StartRequest) -> _StartTask | None:
        """Launch a hedge, unless it would delay a task or exceed the share of hedges; None: not launched."""
        if self._hedges + 1 > self._settings.hedge_share * (self._launched - self._hedges):
            return None
        if self._breaker is not None and self._breaker.opens_s() is not None:
            return None
        if not self._live.try_acquire():
            return None
        if not self._starts.try_acquire():
            self._live.release()
            return None
        self._hedges += 1
        return self._launch(request)

    async def _cancel_losers(self, losers: Iterable[_StartTask], slots: int) -> None:
        """End the starts that lost, and release their slots once their sandboxes have ended."""
        losers = set(losers)
        for loser in losers:
            loser.cancel()
        if losers:
            await asyncio.wait(losers)
        await asyncio.gather(*(self._end(loser.result()) for loser in losers if _succeeded(loser)))
        for _ in range(slots):
            self._live.release()

    # Ending.

    async def _end(self, box: LeasedSandbox) -> None:
        """End a sandbox, or count it as leaked. Never raises: the result of its use stands."""
        self._lost += box.ended and not box.given_up and not self._closed
        for attempt in range(self._settings.retries + 1):
            try:
                async with asyncio.timeout(self._settings.end_timeout_s):
                    await box.terminate()
                self._leaked.pop(box.id, None)
                break
            except (SandboxError, TimeoutError):
                self._leaked[box.id] = box
                if attempt < self._settings.retries:
                    await self._back_off(attempt)
        self._boxes.pop(box.id, None)

    async def end_leaked(self) -> None:
        """Retry ending the leaked sandboxes; the reaper calls it periodically."""
        await asyncio.gather(*map(self._end, self._leaked.values()))

    async def close(self) -> None:
        """End all sandboxes, including leased ones; waiting tasks get a SandboxError. The backend stays open."""
        self._closed = True
        self._changed.set()
        for semaphore in (self._live, self._starts):
            semaphore.close(_CLOSED)
        await run_to_completion(self._end_all())

    async def _end_all(self) -> None:
        for start_task in self._pending_starts:
            start_task.cancel()
        pending_waits = [_wait_finished(task) for task in (*self._pending_starts, *self._ending, *self._recalls)]
        await asyncio.gather(*pending_waits, *map(self._end, {**self._leaked, **self._boxes}.values()))
        await asyncio.gather(*map(self._end, self._boxes.values()))  # those that were ready before the cancellation

    def statistics(self) -> PoolStatistics:
        live_sandboxes = [sandbox for sandbox in self._boxes.values() if not sandbox.ended]
        return PoolStatistics(
            used=self._live.acquired,
            capacity=self._live.count,
            peak=self._live.peak,
            waiters=self._live.waiters + self._starts.waiters,
            oldest_wait_s=max(self._live.oldest_wait_s, self._starts.oldest_wait_s),
            starting=len(self._pending_starts),
            live=len(live_sandboxes),
            paused=sum(sandbox.paused for sandbox in live_sandboxes),
            leaked=len(self._leaked),
            breaker_open=self._breaker is not None and self._breaker.opens_s() is not None,
            started=self._started,
            retries=self._retries,
            hedges=self._hedges,
            hedges_won=self._hedges_won,
            breaker_openings=self._openings,
            start_failures=dict(self._failures),
            execs=self._counts.execs,
            exec_failures=dict(self._counts.failures),
            lost=self._lost,
            queue=self._queue,
            start=self._start_times,
            exec=self._counts.latency,
            exec_overhead=self._counts.overhead,
        )


_CLOSED = infrastructure_failure("the pool of sandboxes is closed", retry=False)


def _succeeded(start: _StartTask) -> bool:
    return not start.cancelled() and start.exception() is None


def _start_error(start: _StartTask) -> BaseException:
    return SandboxError(_CLOSED) if start.cancelled() else start.exception() or SandboxError(_CLOSED)


async def _wait_finished(task: asyncio.Task[Any]) -> None:
    await asyncio.wait({task})
