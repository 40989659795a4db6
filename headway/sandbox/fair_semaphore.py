"""A semaphore that serves its waiters first come, first served, and can be closed."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from headway.records.sandbox import SandboxError, SandboxFailure
from headway.runtime.clock import Clock


class FairSemaphore:
    """A semaphore of ``count`` places whose waiters are served in order. Invariants: never more than ``count`` are
    taken, and none is free while a task waits; a task that is cancelled in line has none. Example (1 place): of two
    tasks, the second gets it as soon as the first gives it back, before any later one."""

    def __init__(self, count: int, clock: Clock) -> None:
        self.count = count
        self.taken = self.peak = 0
        self._clock = clock
        self._line: OrderedDict[asyncio.Future[None], float] = OrderedDict()  # waiter -> when it joined
        self._closed: SandboxFailure | None = None

    @property
    def waiters(self) -> int:
        return len(self._line)

    @property
    def oldest_wait_s(self) -> float:
        return self._clock.now() - next(iter(self._line.values())) if self._line else 0.0

    async def take(self) -> None:
        """Wait for a place and take it. Raises SandboxError when the semaphore is closed."""
        turn: asyncio.Future[None] | None = None
        try:
            if self.take_now():
                await asyncio.sleep(0)  # a waiter that was just served, and hasn't resumed yet, goes first
                return
            turn = asyncio.get_running_loop().create_future()
            self._line[turn] = self._clock.now()
            await turn
        except asyncio.CancelledError:
            if turn is None or (self._line.pop(turn, None) is None and _was_served(turn)):
                self.give_back()  # the place was ours already
            raise

    def take_now(self) -> bool:
        """Take a place if one is free; return whether it did. Raises SandboxError when the semaphore is closed."""
        if self._closed is not None:
            raise SandboxError(self._closed)
        if self.taken >= self.count:
            return False
        self._fill()
        return True

    def give_back(self) -> None:
        self.taken -= 1
        while self._line and self.taken < self.count:
            turn, _ = self._line.popitem(last=False)
            if not turn.done():
                self._fill()
                turn.set_result(None)

    def close(self, why: SandboxFailure) -> None:
        """Raise SandboxError in all waiters, now and from now on. Taken places stay taken until they are given back."""
        self._closed = why
        while self._line:
            turn, _ = self._line.popitem(last=False)
            if not turn.done():
                turn.set_exception(SandboxError(why))

    def _fill(self) -> None:
        self.taken += 1
        self.peak = max(self.peak, self.taken)


def _was_served(turn: asyncio.Future[None]) -> bool:
    return not turn.cancelled() and turn.exception() is None
