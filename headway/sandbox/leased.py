"""Wraps a backend's sandbox during a lease: measures its commands and renews its time to live."""

from __future__ import annotations

import contextlib
from collections import Counter

from headway.records.sandbox import Command, ExecResult, SandboxError
from headway.records.sandbox_statistics import Latencies
from headway.runtime.clock import Clock
from headway.sandbox.protocol import Sandbox
from headway.sandbox.wrapper import SandboxWrapper

SPARE_TTL_S = 60.0  # beyond the next command's limit, to read its results and perhaps take a snapshot


class CommandCounts:
    """Counts, failures and latencies of commands, over all leased sandboxes of a pool."""

    def __init__(self) -> None:
        self.execs = 0
        self.failures: Counter[str] = Counter()  # by cause
        self.latency = Latencies()
        self.overhead = Latencies()

    def add(self, took_s: float, result: ExecResult) -> None:
        self.latency = self.latency.with_duration(took_s)
        self.overhead = self.overhead.with_duration(max(0.0, took_s - result.duration_s))
        if result.failure is not None:
            self.failures[result.failure.cause] += 1


class LeasedSandbox(SandboxWrapper):
    """A `Sandbox` whose time to live never ends during use. The time counts from readiness; it is renewed before a
    command that might outlast it, and before any use once half of it has passed."""

    def __init__(self, box: Sandbox, ttl_s: float, counts: CommandCounts, clock: Clock) -> None:
        super().__init__(box)
        self._ttl_s = ttl_s
        self._ends_s = clock.now() + ttl_s
        self._counts = counts
        self._clock = clock
        self.paused = False
        self.given_up = False  # its leaseholder has ended it

    async def exec(self, command: Command) -> ExecResult:
        self._counts.execs += 1
        started_s = self._clock.now()
        try:
            exec_result = await super().exec(command)
        except SandboxError as error:
            self._counts.failures[error.failure.cause] += 1
            raise
        self._counts.add(self._clock.now() - started_s, exec_result)
        return exec_result

    async def before_use(self, longest_s: float = 0.0) -> None:
        """Renew the time to live if needed. At a provider that costs a call, which E2B refuses for a paused sandbox."""
        needed_s = longest_s + SPARE_TTL_S
        if not self.paused and self._ends_s - self._clock.now() < max(self._ttl_s / 2, needed_s):
            with contextlib.suppress(SandboxError):  # the use itself then reports what is wrong
                await self.renew(max(self._ttl_s, needed_s))

    async def pause(self) -> None:
        await super().pause()
        self.paused = True

    async def resume(self) -> None:
        await super().resume()
        self.paused = False
        await self.before_use()

    async def renew(self, ttl_s: float) -> None:
        started_s = self._clock.now()  # earlier than the request's arrival, from which the time to live counts
        await super().renew(ttl_s)
        self._ends_s = started_s + ttl_s

    async def terminate(self) -> None:
        self.given_up = True
        await super().terminate()
