"""So many a second, and no more: whoever comes too early waits in line."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from pathlib import Path

from headway.runtime.clock import Clock

LONGEST_WAIT_S = 3600.0  # what is further away than this was written before the machine's clock began anew


class Pace:
    """``burst`` at once, then ``per_s`` a second; first come, first served.

    Example (2 a second, burst 1): three that come together are let through after 0, 0.5 and 1 s.
    """

    def __init__(self, per_s: float, burst: int, clock: Clock) -> None:
        self._every_s = 1.0 / per_s
        self._burst_s = (burst - 1) * self._every_s
        self._clock = clock
        self._next_s = clock.now() - self._burst_s  # when the next one would go if there were no burst
        self._turn = asyncio.Lock()

    async def wait(self) -> None:
        """Return when it is one's turn."""
        async with self._turn:
            now = self._clock.now()
            self._next_s = max(self._next_s, now - self._burst_s)
            if self._next_s > now:
                await self._clock.sleep(self._next_s - now)
            self._next_s += self._every_s


class SharedRateLimit:
    """The same for all processes of a machine that name the same file: an account has one limit, whoever uses it.

    The file holds when the next one would go, by the machine's monotonic clock; a place is taken under its lock.
    """

    def __init__(self, file: Path, per_s: float, burst: int, clock: Clock) -> None:
        self._file = file
        self._every_s = 1.0 / per_s
        self._burst_s = (burst - 1) * self._every_s
        self._clock = clock

    async def wait(self) -> None:
        """Return when it is one's turn."""
        await self._clock.sleep(max(0.0, self._take(0.0, self._every_s) - self._clock.now()))

    def hold(self, seconds: float) -> None:
        """Nobody goes before then: the provider has said so."""
        self._take(seconds, 0.0)

    def _take(self, least_s: float, more_s: float) -> float:
        """When it is one's turn; the next one's is later by ``more_s``."""
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
