"""How many sandboxes there are, and how many are being made: whoever wants one waits in line, and keeps it for a while.

Both are limited, for they are different: what lives costs memory, what starts costs the machine's (or the provider's)
time, and a thousand starts at once are slower than the same in turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping

import msgspec

from headway.records.sandbox import SandboxError, SandboxSpec, Snapshot
from headway.runtime.clock import Clock
from headway.sandbox.protocol import Backend, Sandbox

KEPT_TIMES = 4096  # the latest, of which quantiles are told


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a backend is used."""

    live: int = 64  # sandboxes at once, those being made among them
    starts: int = 8  # being made at once
    retries: int = 2  # of a start, after a failure of the infrastructure that may pass
    backoff_s: float = 0.2  # before the first of them; each doubles it, and each is drawn from half to one and a half
    seed: int = 0


class PoolStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The pool as it is now, and what it has seen."""

    used: int
    capacity: int
    peak: int
    waiters: int
    oldest_wait_s: float  # of who waits now
    starting: int
    started: int
    retries: int
    failures: dict[str, int]  # by cause, retried ones too
    queue_p50_s: float
    queue_p99_s: float
    start_p50_s: float
    start_p99_s: float


class SandboxPool:
    """Leases sandboxes of a backend, first come, first served.

    Invariants: never more than ``live`` leases, nor more than ``starts`` of them being made; a lease that ends, however
    it does, has ended its sandbox. Example (live 2, starts 1): of three that ask at once, the first is served, then the
    second; the third waits until one of them gives back.
    """

    def __init__(self, backend: Backend, settings: PoolSettings, clock: Clock) -> None:
        self._backend = backend
        self._settings = settings
        self._clock = clock
        self._random = random.Random(settings.seed)
        self._live = asyncio.Semaphore(settings.live)
        self._starts = asyncio.Semaphore(settings.starts)
        self._waiting: dict[int, float] = {}  # ticket -> since when
        self._tickets = 0
        self._used = self._peak = self._starting = self._started = self._retries = 0
        self._failures: Counter[str] = Counter()
        self._queue_s: deque[float] = deque(maxlen=KEPT_TIMES)
        self._start_s: deque[float] = deque(maxlen=KEPT_TIMES)

    @contextlib.asynccontextmanager
    async def lease(
        self,
        spec: SandboxSpec,
        *,
        labels: Mapping[str, str] | None = None,
        ttl_s: float | None = None,
        snapshot: Snapshot | None = None,
    ) -> AsyncIterator[Sandbox]:
        """A sandbox for as long as the block runs. Raises SandboxError when it can't be made, after all retries."""
        async with self._queued():
            box = await self._start(spec, labels, ttl_s, snapshot)
            try:
                yield box
            finally:
                await box.terminate()

    @contextlib.asynccontextmanager
    async def _queued(self) -> AsyncIterator[None]:
        """A place among the live ones."""
        self._tickets += 1
        ticket, since = self._tickets, self._clock.now()
        self._waiting[ticket] = since
        try:
            await self._live.acquire()
        finally:
            del self._waiting[ticket]
        self._queue_s.append(self._clock.now() - since)
        self._used += 1
        self._peak = max(self._peak, self._used)
        try:
            yield
        finally:
            self._used -= 1
            self._live.release()

    async def _start(
        self, spec: SandboxSpec, labels: Mapping[str, str] | None, ttl_s: float | None, snapshot: Snapshot | None
    ) -> Sandbox:
        attempt = 0
        while True:
            try:
                async with self._starts:
                    self._starting += 1
                    since = self._clock.now()
                    try:
                        box = await self._backend.create(spec, labels=labels, ttl_s=ttl_s, snapshot=snapshot)
                    finally:
                        self._starting -= 1
                self._start_s.append(self._clock.now() - since)
                self._started += 1
                return box
            except SandboxError as error:
                self._failures[error.failure.cause] += 1
                if not error.failure.retry or attempt == self._settings.retries:
                    raise
            self._retries += 1
            await self._clock.sleep(self._settings.backoff_s * 2**attempt * self._random.uniform(0.5, 1.5))
            attempt += 1

    def statistics(self) -> PoolStatistics:
        return PoolStatistics(
            used=self._used,
            capacity=self._settings.live,
            peak=self._peak,
            waiters=len(self._waiting),
            oldest_wait_s=self._clock.now() - min(self._waiting.values(), default=self._clock.now()),
            starting=self._starting,
            started=self._started,
            retries=self._retries,
            failures=dict(self._failures),
            queue_p50_s=_quantile(self._queue_s, 0.5),
            queue_p99_s=_quantile(self._queue_s, 0.99),
            start_p50_s=_quantile(self._start_s, 0.5),
            start_p99_s=_quantile(self._start_s, 0.99),
        )


def _quantile(times: deque[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(share * len(times)))] if times else 0.0
