"""Limits the rate of calls; a call that comes too early waits for its turn."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from pathlib import Path

from headway.runtime.clock import Clock

LONGEST_WAIT_S = 3600.0  # a time further ahead was written before the machine's monotonic clock restarted


class RateLimiter:
    """Limits calls to ``burst`` at once and then ``per_s`` a second, first come, first served.

    Example (2 a second, burst 1): three calls that come together return after 0, 0.5 and 1 s.
    """

    def __init__(self, per_s: float, burst: int, clock: Clock) -> None:
        self._every_s = 1.0 / per_s
        self._burst_s = (burst - 1) * self._every_s
        self._clock = clock
        self._next_s = clock.now() - self._burst_s  # the time of the next call without a burst
        self._turn = asyncio.Lock()

    async def wait(self) -> None:
        """Wait for the caller's turn."""
        async with self._turn:
            now = self._clock.now()
            self._next_s = max(self._next_s, now - self._burst_s)
            if self._next_s > now:
                await self._clock.sleep(self._next_s - now)
            self._next_s += self._every_s


class SharedRateLimit:
    """Limits calls to a rate that all processes of this machine share which name the same file, one per account.

    The file has the time of the next call on the machine's monotonic clock; each call takes its turn under a lock.
    """

    def __init__(self, file: Path, per_s: float, burst: int, clock: Clock) -> None:
        self._file = file
        self._every_s = 1.0 / per_s
        self._burst_s = (burst - 1) * self._every_s
        self._clock = clock

    async def wait(self) -> None:
        """Wait for the caller's turn."""
        await self._clock.sleep(max(0.0, self._take(0.0, self._every_s) - self._clock.now()))

    def hold(self, seconds: float) -> None:
        """Delay all further calls by at least ``seconds``, as the provider requested."""
        self._take(seconds, 0.0)

    def _take(self, least_s: float, more_s: float) -> float:
        """Take a turn: return its time, at least ``least_s`` from now, and move the next one ``more_s`` behind it."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            now, turn_s = self._clock.now(), 0.0
            with contextlib.suppress(ValueError):
                turn_s = float(os.pread(descriptor, 64, 0) or b"0")
            if turn_s > now + LONGEST_WAIT_S:
                turn_s = 0.0
            turn_s = max(turn_s, now - self._burst_s, now + least_s if least_s else 0.0)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, repr(turn_s + more_s).encode(), 0)
            return turn_s
        finally:
            os.close(descriptor)
