"""State of a channel between workers: its items, their consumers, and redelivery after a consumer's death. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

ConsumerChoice = Callable[[float, Mapping[str, float]], str]
ConsumerBalance = Literal["round_robin", "weight"] | ConsumerChoice
"""The assignment of items to consumers: in turn, to the one of least weight so far, or by a function of an item's
weight and the consumers' weights so far."""


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """An item in a channel; its content stays with its producer."""

    number: int  # in the order of arrival; kept when it is delivered again
    producer: str
    weight: float
    bytes: int
    payload: Any


class ChannelStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Current state of a channel, and its totals."""

    name: str
    used: int  # items that no consumer has got
    capacity: int
    used_bytes: int
    capacity_bytes: int
    peak: int  # most items at once
    getters: int  # consumers that wait for items
    putters: int  # producers that wait for capacity
    oldest_age_s: float  # how long its oldest item has been in it; 0.0 when empty
    unacknowledged: int  # items got by calls that haven't ended
    put: int  # items, in all
    redelivered: int  # items that came back from dead consumers
    weights: dict[str, float]  # weight got, or assigned, by consumer
    closed: bool = False


@dataclass(kw_only=True, eq=False)
class Put:
    """A producer's items on their way into the channel."""

    items: deque[Item]


@dataclass(kw_only=True, eq=False)
class Get:
    """A consumer's request: for one item, or for items of a total weight of at least ``weight``."""

    consumer: str
    weight: float | None
    items: list[Item] = field(default_factory=list[Item])

    @property
    def full(self) -> bool:
        return bool(self.items) and (self.weight is None or sum(item.weight for item in self.items) >= self.weight)


class ChannelState:
    """The items of a channel, first in, first out, and the producers and consumers that wait.

    An item is *waiting* with its producer while there is no capacity, then *in* the channel, then *got* by a consumer,
    until its call ends (`acknowledge`) or it dies (`redeliver`: the item is the channel's first again). Items
    go to the oldest request, or with ``balance`` to the consumer they are assigned to when they come in. A request for
    a weight collects items as they come, so any capacity of at least one item will do.

    Invariants: every item put is in exactly one of the four places, or acknowledged; at most ``capacity`` items and
    ``capacity_bytes`` are in the channel, but for those that were brought back.
    """

    def __init__(
        self,
        name: str,
        capacity: int,
        capacity_bytes: int,
        balance: ConsumerBalance | None = None,
        consumers: Sequence[str] = (),
    ) -> None:
        """Create an open channel. ``consumers``: required with ``balance``."""
        if capacity < 1 or capacity_bytes < 1:
            raise ValueError(f"channel {name}: capacity {capacity} items, {capacity_bytes} bytes: must be at least 1")
        if balance is not None and not consumers:
            raise ValueError(f"channel {name}: balance needs the consumers")
        self.name = name
        self.capacity = capacity
        self.capacity_bytes = capacity_bytes
        self.closed = False
        self.readers: set[str] = set()  # consumers with at least one request
        self._balance = balance
        self._weights = dict.fromkeys(consumers, 0.0)
        self._turn = 0
        self._in: deque[tuple[float, str, Item]] = deque()  # (arrival time, assigned consumer or "", item)
        self._bytes = self._peak = self._count = self._redelivered = 0
        self._advanced_s = 0.0  # when items moved last
        self._puts: deque[Put] = deque()
        self._gets: deque[Get] = deque()
        self._got: dict[str, list[Item]] = {}

    def put(self, producer: str, payloads: Sequence[tuple[Any, float, int]]) -> Put:
        """Put items, each a payload with its weight and bytes; all are in once the `Put` has no items.

        Raises ValueError for an item that never fits."""
        if self.closed:
            raise ValueError(f"channel {self.name} is closed")
        for _, weight, size_bytes in payloads:
            if not (weight > 0 and math.isfinite(weight)):
                raise ValueError(f"channel {self.name}: an item's weight {weight:g} must be a positive number")
            if size_bytes > self.capacity_bytes:
                raise ValueError(
                    f"channel {self.name}: an item of {size_bytes:,} bytes is larger than the channel "
                    f"({self.capacity_bytes:,} bytes)"
                )
        items: deque[Item] = deque()
        for payload, weight, size_bytes in payloads:
            items.append(Item(number=self._count, producer=producer, weight=weight, bytes=size_bytes, payload=payload))
            self._count += 1
        self._puts.append(put := Put(items=items))
        return put

    def get(self, consumer: str, weight: float | None = None) -> Get:
        """Request an item, or items of at least ``weight`` together.

        The request is served when it is `full`, or when the channel is closed and has no more items for it."""
        if self._balance is not None and consumer not in self._weights:
            valid_names = ", ".join(self._weights)
            raise ValueError(f"channel {self.name}: {consumer} is not one of its consumers ({valid_names})")
        if weight is not None and not weight > 0:
            raise ValueError(f"channel {self.name}: weight {weight:g} must be positive")
        self.readers.add(consumer)
        self._gets.append(get := Get(consumer=consumer, weight=weight))
        return get

    def close(self) -> None:
        """Refuse further puts. Items in the channel can still be got, and waiting ones still come in."""
        self.closed = True

    def advance(self, now: float) -> list[Put | Get]:
        """Move items as far as possible; return the completed puts and the served gets.

        At the end of a closed channel a get has fewer items than requested, or none."""
        settled_operations: list[Put | Get] = []
        self._advanced_s = now
        has_moved = True
        while has_moved:
            has_moved = self._admit(now, settled_operations)
            has_moved = self._serve(settled_operations) or has_moved
        if self.closed and not self._puts:
            for get in [get for get in self._gets if self._first_for(get.consumer) is None]:
                self._settle(get)
                settled_operations.append(get)
        return settled_operations

    def withdraw(self, waiting: Put | Get) -> list[Item]:
        """Remove a put or a get that no longer waits.

        Items that a get has collected return to the channel; items of a put that aren't in are dropped and returned."""
        if isinstance(waiting, Put):
            if waiting in self._puts:
                self._puts.remove(waiting)
                return list(waiting.items)
        elif waiting in self._gets:
            self._gets.remove(waiting)
            self._return(waiting.consumer, waiting.items)
        return []

    def give_back(self, consumer: str, payloads: Sequence[Any]) -> None:
        """Return items that ``consumer`` got but didn't use to the channel."""
        received_items = self._got.get(consumer, [])
        returned_items = [item for item in received_items if item.payload in payloads]
        self._got[consumer] = [item for item in received_items if item.payload not in payloads]
        self._return(consumer, returned_items)

    def acknowledge(self, consumer: str, payloads: Sequence[Any] | None = None) -> list[Item]:
        """Remove the items that ``consumer`` got and has processed, all or those of ``payloads``. Returns them."""
        received_items = self._got.pop(consumer, [])
        if payloads is None:
            return received_items
        self._got[consumer] = [item for item in received_items if item.payload not in payloads]
        return [item for item in received_items if item.payload in payloads]

    def redeliver(self, consumer: str) -> int:
        """Return the items that a dead ``consumer`` got or was collecting to the channel. Returns the number."""
        for get in [get for get in self._gets if get.consumer == consumer]:
            self.withdraw(get)
        undelivered_items = self._got.pop(consumer, [])
        self._redelivered += len(undelivered_items)
        self._return(consumer, undelivered_items)
        return len(undelivered_items)

    def lose(self, producer: str, kept: Callable[[Item], bool]) -> list[Item]:
        """Drop the items of a dead ``producer`` that died with it, those not ``kept``. Returns them."""
        self._puts = deque(put for put in self._puts if not put.items or put.items[0].producer != producer)
        lost_items = [item for _, _, item in self._in if item.producer == producer and not kept(item)]
        self._in = deque(queued for queued in self._in if queued[2] not in lost_items)
        self._bytes -= sum(item.bytes for item in lost_items)
        return lost_items

    def statistics(self, now: float) -> ChannelStatistics:
        return ChannelStatistics(
            name=self.name,
            used=len(self._in),
            capacity=self.capacity,
            used_bytes=self._bytes,
            capacity_bytes=self.capacity_bytes,
            peak=self._peak,
            getters=len(self._gets),
            putters=len(self._puts),
            oldest_age_s=max(0.0, now - self._in[0][0]) if self._in else 0.0,
            unacknowledged=sum(map(len, self._got.values())),
            put=self._count,
            redelivered=self._redelivered,
            weights=dict(self._weights),
            closed=self.closed,
        )

    def _admit(self, now: float, settled: list[Put | Get]) -> bool:
        """Move waiting items in while there is capacity, the oldest first."""
        has_moved = False
        while self._puts:
            put = self._puts[0]
            while put.items and self._fits(put.items[0]):
                item = put.items[0]
                self._in.append((now, self._assign(item), item))
                put.items.popleft()
                self._bytes += item.bytes
                has_moved = True
            if put.items:
                break
            settled.append(self._puts.popleft())
        self._peak = max(self._peak, len(self._in))
        return has_moved

    def _fits(self, item: Item) -> bool:
        return len(self._in) < self.capacity and (not self._in or self._bytes + item.bytes <= self.capacity_bytes)

    def _serve(self, settled: list[Put | Get]) -> bool:
        """Give items to waiting requests, the oldest first."""
        has_moved = False
        for get in list(self._gets):
            while not get.full and (position := self._first_for(get.consumer)) is not None:
                _, _, item = self._in[position]
                del self._in[position]
                self._bytes -= item.bytes
                get.items.append(item)
                has_moved = True
            if get.full:
                self._settle(get)
                settled.append(get)
        return has_moved

    def _settle(self, get: Get) -> None:
        self._gets.remove(get)
        get.items.sort(key=lambda item: item.number)  # items returned while it collected come first
        self._got.setdefault(get.consumer, []).extend(get.items)
        if self._balance is None:
            self._weights[get.consumer] = self._weights.get(get.consumer, 0.0) + sum(item.weight for item in get.items)

    def _first_for(self, consumer: str) -> int | None:
        if self._balance is None:
            return 0 if self._in else None
        return next((position for position, (_, owner, _) in enumerate(self._in) if owner == consumer), None)

    def _assign(self, item: Item) -> str:
        """Choose the consumer of an item that comes in; "" without a balance."""
        balance, consumer_names = self._balance, list(self._weights)
        if balance is None:
            return ""
        if callable(balance):
            consumer = balance(item.weight, dict(self._weights))
            if consumer not in self._weights:
                raise ValueError(f"channel {self.name}: balance chose {consumer!r}; valid: {', '.join(consumer_names)}")
        elif balance == "round_robin":
            consumer = consumer_names[self._turn % len(consumer_names)]
            self._turn += 1
        else:
            consumer = min(consumer_names, key=self._weights.__getitem__)
        self._weights[consumer] += item.weight
        return consumer

    def _return(self, consumer: str, items: Sequence[Item]) -> None:
        """Return items to the front of the channel, in their order."""
        owner = consumer if self._balance is not None else ""
        returned_items = [(self._in[0][0] if self._in else self._advanced_s, owner, item) for item in items]
        self._in = deque(sorted([*returned_items, *self._in], key=lambda queued: queued[2].number))
        self._bytes += sum(item.bytes for item in items)
