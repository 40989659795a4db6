"""Messages from one peer that nobody has received yet: in order, and bounded in number and bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False)
class _Arrival:
    size_bytes: int
    admitted: asyncio.Future[None] = field(default_factory=_future)
    fetched: bool = False
    message: Any = None


class Inbox:
    """Messages of one peer and tag.

    Lifecycle of a message: *announced* (its place in the order is taken) -> *admitted*, once those before it leave room
    -> *fetched*, which lets its sender go on -> *received*. At most ``most`` messages and ``most_bytes`` are admitted,
    or one that is larger alone.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._arrivals: deque[_Arrival] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.receiving = asyncio.Lock()  # receivers take turns
        self.sending = asyncio.Lock()  # of messages to the peer: they leave in the order of their calls
        self.window = asyncio.Semaphore(most)  # of messages on their way to the peer

    async def accept(self, size_bytes: int, fetch: Callable[[], Awaitable[Any]]) -> None:
        """Take a message in its turn; returns when it can be received."""
        arrival = _Arrival(size_bytes)
        self._arrivals.append(arrival)
        try:
            self._admit()
            await arrival.admitted
            arrival.message = await fetch()
            arrival.fetched = True
        finally:
            if not arrival.fetched:  # its sender is gone, or has given up
                self._arrivals.remove(arrival)
                self._admit()
            self._wake(None)

    def pop(self) -> tuple[Any] | None:
        """The next message; None when there is none yet."""
        if not self._arrivals or not self._arrivals[0].fetched:
            return None
        arrival = self._arrivals.popleft()
        self._admit()
        return (arrival.message,)

    async def changed(self) -> None:
        """Wait until there may be a next message. Raises what ``fail`` is given."""
        self._waiter = _future()
        await self._waiter

    def fail(self, error: Exception) -> None:
        """End the wait of a receiver with ``error``."""
        self._wake(error)

    def _wake(self, error: Exception | None) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is None or waiter.done():
            return
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)

    def _admit(self) -> None:
        size_bytes = 0
        for number, arrival in enumerate(self._arrivals):
            size_bytes += arrival.size_bytes
            if number >= self._most or (number and size_bytes > self._most_bytes):
                return
            if not arrival.admitted.done():
                arrival.admitted.set_result(None)
