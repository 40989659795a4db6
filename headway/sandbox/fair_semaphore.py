"""A number of places, given first come, first served."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from headway.records.sandbox import SandboxError, SandboxFailure
from headway.runtime.clock import Clock


class FairSemaphore:
    """Whoever wants one waits in line. Invariants: never more than ``count`` are taken, and none is free while anybody
    waits; whoever is cancelled in line holds none. Example (1 place): of two that ask, the second has it as soon as the
    first gives it back, whoever asks meanwhile."""

    def __init__(self, count: int, clock: Clock) -> None:
        self.count = count
        self.taken = self.peak = 0
        self._clock = clock
        self._line: OrderedDict[asyncio.Future[None], float] = OrderedDict()  # -> since when
        self._closed: SandboxFailure | None = None

    @property
    def waiters(self) -> int:
        return len(self._line)

    @property
    def oldest_wait_s(self) -> float:
        return self._clock.now() - next(iter(self._line.values())) if self._line else 0.0

    async def take(self) -> None:
        """Wait for one. Raises SandboxError: they are closed."""
        turn: asyncio.Future[None] | None = None
        try:
            if self.take_now():
                await asyncio.sleep(0)  # who was given one just now, and hasn't gone on yet, goes first
                return
            turn = asyncio.get_running_loop().create_future()
            self._line[turn] = self._clock.now()
            await turn
        except asyncio.CancelledError:
            if turn is None or (self._line.pop(turn, None) is None and _was_served(turn)):
                self.give_back()  # it was ours already
            raise

    def take_now(self) -> bool:
        """Take one if that keeps nobody waiting. Raises SandboxError: they are closed."""
        if self._closed is not None:
            raise SandboxError(self._closed)
        if self.taken >= self.count:
            return False
        self._fill(1)
        return True

    def give_back(self) -> None:
        self.taken -= 1
        while self._line and self.taken < self.count:
            turn, _ = self._line.popitem(last=False)
            if not turn.done():
                self._fill(1)
                turn.set_result(None)

    def close(self, why: SandboxFailure) -> None:
        """Whoever waits or asks from now on gets a SandboxError; what is taken stays so until it is given back."""
        self._closed = why
        while self._line:
            turn, _ = self._line.popitem(last=False)
            if not turn.done():
                turn.set_exception(SandboxError(why))

    def _fill(self, more: int) -> None:
        self.taken += more
        self.peak = max(self.peak, self.taken)


def _was_served(turn: asyncio.Future[None]) -> bool:
    return not turn.cancelled() and turn.exception() is None
