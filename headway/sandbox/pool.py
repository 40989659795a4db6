"""Leases sandboxes, with limits on how many live and how many are being started at once.

The limits are separate because the costs are: a live sandbox costs memory, a start costs time of the machine (or the
provider), and a thousand starts at once are slower than the same starts in turn.
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
    infrastructure_failure,
    of_a_start,
)
from headway.records.sandbox_statistics import Latencies, PoolStatistics
from headway.runtime.clock import Clock
from headway.runtime.retries import Breaker, backoff_s
from headway.runtime.supervision import spawn, to_its_end
from headway.sandbox.fair_semaphore import FairSemaphore
from headway.sandbox.leased import CommandCounts, LeasedSandbox
from headway.sandbox.protocol import SandboxSource

RECENT_STARTS = 512  # durations kept, against which a straggler is recognised


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on the use of a backend, and the policy where it is slow or fails."""

    live: int = 64  # sandboxes at once, those being made among them
    starts: int = 8  # being made at once
    retries: int = 2  # of a start, after a failure of the infrastructure that may pass; of an end as well
    backoff_s: float = 0.2  # before the first of them; each doubles it, and each is drawn from half to one and a half
    start_timeout_s: float = 300.0  # of one start
    end_timeout_s: float = 60.0  # of ending one, until it is tried again
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


class _Wanted(msgspec.Struct, frozen=True, kw_only=True):
    spec: SandboxSpec
    labels: Mapping[str, str] | None
    snapshot: Snapshot | None


_Making = asyncio.Task[LeasedSandbox]


class SandboxPool:
    """Leases sandboxes of a backend, first come, first served.

    Lifecycle: *open* -> *closed*, by `close`: it ends all sandboxes, not the backend. Invariants: never more than
    ``live`` sandboxes, nor more than ``starts`` of them being made; a lease that ends, however it does, has ended its
    sandbox, or counts it as leaked. A *hedge* is a second start beside one that takes far longer than earlier ones: the
    first that is ready is leased, the other ended. It takes only places that no task waits for. Example (live 2, starts
    1): of three tasks that ask at once, the first is served, then the second; the third waits until one gives back.
    """

    def __init__(
        self, backend: SandboxSource, settings: PoolSettings, clock: Clock, *, breaker: Breaker | None = None
    ) -> None:
        self._backend = backend
        self._settings = settings
        self._clock = clock
        self._breaker = breaker
        self._at_breaker = asyncio.Lock()  # starts wait here in order while the breaker is open
        self._changed = asyncio.Event()  # a probe has ended, or the pool has closed
        self._random = random.Random(settings.seed)
        self._live = FairSemaphore(settings.live, clock)
        self._starts = FairSemaphore(settings.starts, clock)
        self._boxes: dict[str, LeasedSandbox] = {}
        self._leaked: dict[str, LeasedSandbox] = {}
        self._making: set[_Making] = set()
        self._ending: set[asyncio.Task[None]] = set()  # the losers of hedged starts
        self._lent: OrderedDict[object, Callable[[], Coroutine[Any, Any, None]]] = OrderedDict()
        self._recalls: set[asyncio.Task[None]] = set()  # lent ones that are being given back
        self._closed = False
        self._can: Capabilities | None = None
        self._recent_s: deque[float] = deque(maxlen=RECENT_STARTS)
        self._counts = CommandCounts()
        self._failures: Counter[str] = Counter()
        self.trouble = ""  # why starts fail now; "": the last one didn't
        self._launched = self._started = self._retries = self._hedges = self._hedges_won = 0
        self._openings = self._lost = 0
        self._queue = self._start_times = Latencies()

    @contextlib.asynccontextmanager
    async def lease(
        self, spec: SandboxSpec, *, labels: Mapping[str, str] | None = None, snapshot: Snapshot | None = None
    ) -> AsyncIterator[LeasedSandbox]:
        """A sandbox for as long as the block runs. Raises SandboxError when it can't be made, after all retries."""
        since_s = self._clock.now()
        if self._live.taken >= self._live.count:
            asyncio.get_running_loop().call_soon(self._recall)  # runs once this task waits in line
        await self._live.take()
        try:
            wanted = _Wanted(spec=spec, labels=labels, snapshot=snapshot)
            box = await self._start(wanted, self._clock.now() - since_s)
            try:
                yield box
            finally:
                await to_its_end(self._end(box))
        finally:
            self._live.give_back()

    def lend(self, give_back: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
        """Offer a leased sandbox that isn't used for a while: as soon as a task waits for its place, ``give_back`` is
        run, which ends its lease; the longest offered goes first. Returns a function that withdraws the offer."""
        offer = object()
        self._lent[offer] = give_back
        self._recall()

        def end() -> None:
            self._lent.pop(offer, None)

        return end

    async def can_pause(self) -> bool:
        """Whether the backend's sandboxes can be paused, as `lend` needs."""
        if self._can is None:
            self._can = await self._backend.capabilities()
        return self._can.pause

    def _recall(self) -> None:
        """Have as many sandboxes given back as tasks wait."""
        while self._lent and self._live.waiters > len(self._recalls):
            _, give_back = self._lent.popitem(last=False)
            recall = asyncio.create_task(give_back(), name="giving a lent sandbox back")
            self._recalls.add(recall)
            recall.add_done_callback(self._recalled)

    def _recalled(self, recall: asyncio.Task[None]) -> None:
        self._recalls.discard(recall)
        self._recall()

    # Starts.

    async def _start(self, wanted: _Wanted, waited_s: float) -> LeasedSandbox:
        """Make a sandbox, with retries. ``waited_s``: time in line so far."""
        attempt = 0
        while True:
            since_s = self._clock.now()
            first = await self._first(wanted)
            waited_s += self._clock.now() - since_s
            try:
                box = await self._race(wanted, first)
                self._queue = self._queue.with_one(waited_s)
                return box
            except SandboxError as error:
                if not error.failure.retry or self._closed or attempt == self._settings.retries:
                    raise
            self._retries += 1
            await self._back_off(attempt)
            attempt += 1

    async def _back_off(self, attempt: int) -> None:
        await self._clock.sleep(backoff_s(attempt + 1, self._settings.backoff_s) * self._random.uniform(0.5, 1.5))

    async def _first(self, wanted: _Wanted) -> _Making:
        """Launch a start, once a place among the starts is free and the breaker admits it."""
        await self._starts.take()
        try:
            probe = await self._admitted()
        except BaseException:
            self._starts.give_back()
            raise
        return self._launch(wanted, probe=probe)

    async def _admitted(self) -> bool:
        """Wait, in order, until the breaker admits a start. True: this one is its probe."""
        breaker, patience_s = self._breaker, self._settings.outage_s
        if breaker is None:
            return False
        try:
            async with asyncio.timeout(patience_s), self._at_breaker:
                while not self._closed and not breaker.allows(now := self._clock.now()):
                    self._changed.clear()
                    left_s = (breaker.opens_s() or now) - now
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), left_s if left_s > 0 else None)
                if self._closed:
                    raise SandboxError(_CLOSED)
                return breaker.send(self._clock.now())
        except TimeoutError:
            what = f"starts of sandboxes kept failing, and {patience_s:g} s later it is no better: see what they said"
            raise SandboxError(infrastructure_failure(what)) from None

    def _launch(self, wanted: _Wanted, *, probe: bool = False) -> _Making:
        """Launch a start, for which the caller has taken a place among the starts; it is given back at its end."""
        making = asyncio.create_task(self._make(wanted), name="making a sandbox")
        self._making.add(making)
        making.add_done_callback(lambda made: self._has_ended(made, probe))  # called even if the task never began
        self._launched += 1
        return making

    async def _make(self, wanted: _Wanted) -> LeasedSandbox:
        since_s, limit_s = self._clock.now(), self._settings.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                made = await self._backend.create(**msgspec.structs.asdict(wanted))
        except TimeoutError:
            raise SandboxError(infrastructure_failure(f"a sandbox wasn't ready in {limit_s:g} s")) from None
        except SandboxError as error:
            if wanted.snapshot is not None:  # the snapshot's content may exceed the limits: the failure stands
                raise
            raise SandboxError(of_a_start(error.failure)) from error
        took_s = self._clock.now() - since_s
        self._started += 1
        self._recent_s.append(took_s)
        self._start_times = self._start_times.with_one(took_s)
        box = self._boxes[made.id] = LeasedSandbox(made, wanted.spec.ttl_s, self._counts, self._clock)
        return box

    def _has_ended(self, making: _Making, probe: bool) -> None:
        self._making.discard(making)
        self._starts.give_back()
        error = None if making.cancelled() else making.exception()
        if isinstance(error, SandboxError):
            self._failures[error.failure.cause] += 1
        if isinstance(error, SandboxError) and error.failure.cause == "infrastructure":
            self.trouble = error.failure.what
        elif error is None and not making.cancelled():
            self.trouble = ""
        if self._breaker is None:
            return
        now = self._clock.now()
        if isinstance(error, SandboxError) and error.failure.cause == "infrastructure":
            self._openings += self._breaker.fail(now, probe=probe)
        elif error is None and not making.cancelled():
            self._breaker.succeed(now, probe=probe)
        elif probe:
            self._breaker.withdraw()  # no evidence about the backend
        if probe:
            self._changed.set()

    # Hedged starts.

    async def _race(self, wanted: _Wanted, first: _Making) -> LeasedSandbox:
        """Return the sandbox that is ready first, of a start and, if it straggles, a hedge beside it."""
        running, hedge = {first}, None
        spare_places = 0  # of `live`, beyond the lease's own
        won: _Making | None = None
        try:
            while True:
                wait_s = self._straggles_after_s() if hedge is None else None
                done, _ = await asyncio.wait(running, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    hedge = self._hedge(wanted)
                    if hedge is not None:
                        running.add(hedge)
                        spare_places = 1
                    continue
                running -= done
                made = [one for one in (first, hedge) if one in done and _succeeded(one)]
                if made:
                    won = made[0]
                    running |= set(made[1:])
                    self._hedges_won += won is hedge
                    return won.result()
                if not running:
                    raise _error_of(first if first in done else done.pop())
        finally:
            if running or spare_places:
                ending = spawn(self._ending, self._drop(running, spare_places), "ending a hedged start")
                if won is None:
                    await to_its_end(_done(ending))  # the lease's own place is given back next

    def _straggles_after_s(self) -> float | None:
        settings = self._settings
        if settings.hedge_share <= 0 or len(self._recent_s) < settings.hedge_after:
            return None
        usual_s = sorted(self._recent_s)[int(settings.hedge_quantile * (len(self._recent_s) - 1))]
        return max(settings.hedge_least_s, settings.hedge_factor * usual_s)

    def _hedge(self, wanted: _Wanted) -> _Making | None:
        """Launch a hedge, unless it would keep a task waiting or exceed the share of hedges; None: not launched."""
        if self._hedges + 1 > self._settings.hedge_share * (self._launched - self._hedges):
            return None
        if self._breaker is not None and self._breaker.opens_s() is not None:
            return None
        if not self._live.take_now():
            return None
        if not self._starts.take_now():
            self._live.give_back()
            return None
        self._hedges += 1
        return self._launch(wanted)

    async def _drop(self, losers: Iterable[_Making], places: int) -> None:
        """End the starts that lost, and give back their places once nothing of them is left."""
        losers = set(losers)
        for one in losers:
            one.cancel()
        if losers:
            await asyncio.wait(losers)
        await asyncio.gather(*(self._end(one.result()) for one in losers if _succeeded(one)))
        for _ in range(places):
            self._live.give_back()

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
        """Retry ending the leaked sandboxes; called from time to time by the reaper."""
        await asyncio.gather(*map(self._end, self._leaked.values()))

    async def close(self) -> None:
        """End all sandboxes, leased ones too; waiting tasks get a SandboxError. The backend stays open."""
        self._closed = True
        self._changed.set()
        for places in (self._live, self._starts):
            places.close(_CLOSED)
        await to_its_end(self._end_all())

    async def _end_all(self) -> None:
        for making in self._making:
            making.cancel()
        under_way = [_done(task) for task in (*self._making, *self._ending, *self._recalls)]
        await asyncio.gather(*under_way, *map(self._end, {**self._leaked, **self._boxes}.values()))
        await asyncio.gather(*map(self._end, self._boxes.values()))  # those that were ready before the cancellation

    def statistics(self) -> PoolStatistics:
        living = [box for box in self._boxes.values() if not box.ended]
        return PoolStatistics(
            used=self._live.taken,
            capacity=self._live.count,
            peak=self._live.peak,
            waiters=self._live.waiters + self._starts.waiters,
            oldest_wait_s=max(self._live.oldest_wait_s, self._starts.oldest_wait_s),
            starting=len(self._making),
            live=len(living),
            paused=sum(box.paused for box in living),
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


def _succeeded(made: _Making) -> bool:
    return not made.cancelled() and made.exception() is None


def _error_of(made: _Making) -> BaseException:
    return SandboxError(_CLOSED) if made.cancelled() else made.exception() or SandboxError(_CLOSED)


async def _done(task: asyncio.Task[Any]) -> None:
    await asyncio.wait({task})
