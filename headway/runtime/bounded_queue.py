"""A bounded, closable queue between tasks of one event loop, with statistics.

Order is first in, first out for items and for waiting tasks: an item goes straight to the getter that
has waited longest, a freed place to the putter that has waited longest.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

import msgspec

from headway.runtime.clock import Clock, RealClock

T = TypeVar("T")


class QueueClosed(Exception):
    """The queue is closed: nothing more can be put, and all that was put has been got."""


class QueueFull(Exception):
    """``put_nowait`` found no place."""


class QueueStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """The present state of a queue, and its peak since it was made."""

    name: str
    used: int  # items in it
    capacity: int
    peak: int  # most items ever in it at once
    getters: int  # tasks waiting for an item
    putters: int  # tasks waiting for a place
    oldest_age_s: float  # how long its oldest item has been in it; 0.0 when empty
    closed: bool = False

    @property
    def waiters(self) -> int:
        return self.getters + self.putters


class BoundedQueue(Generic[T]):
    """Bounded queue of ``capacity`` items.

    Lifecycle: *open* -> *closed* (putters get :class:`QueueClosed` at once; getters drain what is left,
    then get it too). Invariant: while open, ``used <= capacity``; a getter waits only when it is empty, a
    putter only when it is full. A cancelled ``get`` or ``put`` has no effect on it.

    Example: capacity 1, put "a"; a second put waits; get returns "a" and admits "b"; close; get returns
    "b", the next get raises QueueClosed.
    """

    def __init__(self, capacity: int, name: str = "queue", clock: Clock | None = None) -> None:
        if capacity < 1:
            raise ValueError(f"queue {name}: capacity {capacity} must be at least 1")
        self.name = name
        self.capacity = capacity
        self._clock: Clock = clock or RealClock()
        self._items: deque[tuple[float, T]] = deque()  # (time it was put, item)
        self._getters: deque[asyncio.Future[tuple[float, T]]] = deque()
        self._putters: deque[asyncio.Future[None]] = deque()
        self._reserved_places = 0  # places given to putters that have not run yet
        self._peak = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    @property
    def closed(self) -> bool:
        return self._closed

    async def put(self, item: T) -> None:
        """Add ``item``, waiting for a place. Raises QueueClosed, also while waiting."""
        if not self._closed and self._full():
            await self._reserve()
        if self._closed:
            raise QueueClosed(self.name)
        self._add(item)

    def put_nowait(self, item: T) -> None:
        """Add ``item`` or raise QueueFull / QueueClosed."""
        if self._closed:
            raise QueueClosed(self.name)
        if self._full():
            raise QueueFull(self.name)
        self._add(item)

    async def get(self) -> T:
        """Take the oldest item, waiting for one. Raises QueueClosed when closed and drained."""
        if self._items:
            _, item = self._items.popleft()
            self._admit_putters()
            return item
        if self._closed:
            raise QueueClosed(self.name)
        getter: asyncio.Future[tuple[float, T]] = asyncio.get_running_loop().create_future()
        self._getters.append(getter)
        try:
            _, item = await getter
        except asyncio.CancelledError:
            self._withdraw(getter)
            raise
        return item

    def __aiter__(self) -> BoundedQueue[T]:
        return self

    async def __anext__(self) -> T:
        try:
            return await self.get()
        except QueueClosed:
            raise StopAsyncIteration from None

    def close(self, remaining: Iterable[T] = ()) -> None:
        """Close the queue; a second call is a no-op. ``remaining``: late items, kept even beyond the capacity."""
        if self._closed:
            return
        for item in remaining:
            self._add(item)
        self._closed = True
        for putter in self._putters:
            if not putter.done():
                putter.set_exception(QueueClosed(self.name))
        self._putters.clear()
        for getter in self._getters:  # there are getters only when it is empty
            if not getter.done():
                getter.set_exception(QueueClosed(self.name))
        self._getters.clear()

    def statistics(self) -> QueueStatistics:
        return QueueStatistics(
            name=self.name,
            used=len(self._items),
            capacity=self.capacity,
            peak=self._peak,
            getters=sum(not getter.done() for getter in self._getters),
            putters=sum(not putter.done() for putter in self._putters),
            oldest_age_s=max(0.0, self._clock.now() - self._items[0][0]) if self._items else 0.0,
            closed=self._closed,
        )

    def _full(self) -> bool:
        """Whether a new putter has to wait. True whenever a putter waits, so that none is overtaken."""
        return len(self._items) + self._reserved_places >= self.capacity

    async def _reserve(self) -> None:
        """Wait for a place; on return it is the caller's to fill at once."""
        putter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._putters.append(putter)
        try:
            await putter
        except asyncio.CancelledError:
            if putter in self._putters:
                self._putters.remove(putter)
            elif putter.done() and not putter.cancelled() and putter.exception() is None:
                self._reserved_places -= 1
                self._admit_putters()
            raise
        self._reserved_places -= 1

    def _add(self, item: T) -> None:
        timed_item = (self._clock.now(), item)
        while self._getters:
            getter = self._getters.popleft()
            if not getter.done():
                getter.set_result(timed_item)
                self._admit_putters()  # the item took no place
                return
        self._items.append(timed_item)
        self._peak = max(self._peak, len(self._items))

    def _admit_putters(self) -> None:
        while self._putters and not self._full():
            putter = self._putters.popleft()
            if not putter.done():
                putter.set_result(None)
                self._reserved_places += 1

    def _withdraw(self, getter: asyncio.Future[tuple[float, T]]) -> None:
        """Remove a cancelled getter. An item handed to it goes to the next getter, or back to the front."""
        if not getter.done() or getter.cancelled():
            if getter in self._getters:
                self._getters.remove(getter)
            return
        if getter.exception() is not None:
            return
        timed_item = getter.result()
        while self._getters:
            next_getter = self._getters.popleft()
            if not next_getter.done():
                next_getter.set_result(timed_item)
                return
        self._items.appendleft(timed_item)
        self._peak = max(self._peak, len(self._items))
