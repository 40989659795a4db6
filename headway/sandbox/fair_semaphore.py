"""Implements a semaphore that serves waiters first come, first served, and can be closed."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from headway.records.sandbox import SandboxError, SandboxFailure
from headway.runtime.clock import Clock


class FairSemaphore:
    """A semaphore of ``count`` slots that serves waiters in order. Invariants: never more than ``count`` slots are
    taken, and none is free while a task waits; a task that is cancelled in the queue has none. Example (1 slot): of two
    tasks, the second gets it as soon as the first releases it, before any later one."""

    def __init__(self, count: int, clock: Clock) -> None:
        self.count = count
        self.acquired = self.peak = 0
        self._clock = clock
        self._queue: OrderedDict[asyncio.Future[None], float] = OrderedDict()  # waiter -> when it joined
        self._closed: SandboxFailure | None = None

    @property
    def waiters(self) -> int:
        return len(self._queue)

    @property
    def oldest_wait_s(self) -> float:
        return self._clock.now() - next(iter(self._queue.values())) if self._queue else 0.0

    async def acquire(self) -> None:
        """Wait for a slot and take it. Raises SandboxError when the semaphore is closed."""
        turn_future: asyncio.Future[None] | None = None
        try:
            if self.try_acquire():
                await asyncio.sleep(0)  # a waiter that was just served, and hasn't resumed yet, goes first
                return
            turn_future = asyncio.get_running_loop().create_future()
            self._queue[turn_future] = self._clock.now()
            await turn_future
        except asyncio.CancelledError:
            if turn_future is None or (self._queue.pop(turn_future, None) is None and _was_served(turn_future)):
                self.release()  # the slot had been assigned already
            raise

    def try_acquire(self) -> bool:
        """Take a slot if one is free; return whether it did. Raises SandboxError when the semaphore is closed."""
        if self._closed is not None:
            raise SandboxError(self._closed)
        if self.acquired >= self.count:
            return False
        self._occupy()
        return True

    def release(self) -> None:
        self.acquired -= 1
        while self._queue and self.acquired < self.count:
            turn_future, _ = self._queue.popitem(last=False)
            if not turn_future.done():
                self._occupy()
                turn_future.set_result(None)

    def close(self, why: SandboxFailure) -> None:
        """Raise SandboxError in all present and later waiters. Taken slots stay taken until they are released."""
        self._closed = why
        while self._queue:
            turn_future, _ = self._queue.popitem(last=False)
            if not turn_future.done():
                turn_future.set_exception(SandboxError(why))

    def _occupy(self) -> None:
        self.acquired += 1
        self.peak = max(self.peak, self.acquired)


def _was_served(turn: asyncio.Future[None]) -> bool:
    return not turn.cancelled() and turn.exception() is None
