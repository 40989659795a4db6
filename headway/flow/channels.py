"""The channels of a workflow, in the workflow's own process: their state, and the waits of producers and consumers."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headway.control.channel_state import ChannelState, ChannelStatistics, ConsumerBalance, Get, Item, Put
from headway.flow.channel import Channel, ChannelClosed
from headway.flow.paths import PayloadRef
from headway.flow.process import put_in_parts
from headway.flow.worker import Traffic
from headway.records.errors import ConfigurationError
from headway.runtime.clock import Clock
from headway.runtime.stalls.waits import Waits
from headway.runtime.workers import EventCallback

if TYPE_CHECKING:
    from headway.flow.peers import PeerNetwork

WORKFLOW = "the workflow"  # name of the workflow itself as a producer and consumer

_MAX_CHANNELS = 100  # above it closed channels are dropped; a workflow without steps may make many


class Channels:
    """All channels of a workflow, by number; a name can be used again when its last channel is closed.

    Payloads stay with their producers. They are released when the consumer's call has ended.
    """

    def __init__(self, clock: Clock, waits: Waits) -> None:
        self.network: PeerNetwork  # set once
        self.on_lost: EventCallback = lambda name, detail, /, **fields: None
        self._clock = clock
        self._waits = waits
        self._states: dict[int, ChannelState] = {}
        self._channel_count = 0
        self._open: dict[int, asyncio.Future[None]] = {}  # by identity of the put or get that waits
        self.edges: defaultdict[tuple[str, str], Traffic] = defaultdict(Traffic)  # (from stage, to stage) -> items
        self.changes = 0  # puts and gets that were settled

    def make(
        self, name: str, items: int, size: int, balance: ConsumerBalance | None, consumers: Sequence[str]
    ) -> Channel:
        """Make a channel. Raises ConfigurationError."""
        for state in self._states.values():
            if state.name == name and not state.closed:
                raise ConfigurationError(f"channel {name!r}: it exists already and isn't closed")
        try:
            state = ChannelState(name, items, size, balance, consumers)
        except ValueError as error:
            raise ConfigurationError(str(error)) from None
        if len(self._states) >= _MAX_CHANNELS:
            self.forget_closed()
        self._channel_count += 1
        self._states[self._channel_count] = state
        return Channel(name, self._channel_count)

    async def put_refs(self, producer: str, number: int, refs: Sequence[PayloadRef], weights: Sequence[float]) -> bool:
        """Put a producer's items; False when the channel is closed. Raises ConfigurationError for a too large item."""
        state = self._states.get(number)
        if state is None or state.closed:
            self._release(refs)
            return False
        try:
            put_operation = state.put(
                producer, [(ref, weight, ref.size_bytes) for ref, weight in zip(refs, weights, strict=True)]
            )
        except ValueError as error:
            self._release(refs)
            raise ConfigurationError(f"{error}; put by {producer}") from None
        await self._wait_until_settled(state, put_operation, f"space in channel {state.name}", producer)
        return True

    async def get_refs(self, consumer: str, number: int, weight: float | None) -> list[PayloadRef]:
        """Get items for a consumer; empty when the channel is closed and empty."""
        state = self._states.get(number)
        if state is None:
            return []
        try:
            get_operation = state.get(consumer, weight)
        except ValueError as error:
            raise ConfigurationError(str(error)) from None
        await self._wait_until_settled(state, get_operation, f"items of channel {state.name}", consumer)
        consumer_stage = consumer.rpartition("-")[0]
        for item in get_operation.items:
            self.edges[item.producer.rpartition("-")[0], consumer_stage].add(item.bytes)
        return [item.payload for item in get_operation.items]

    def give_back(self, consumer: str, number: int, refs: Sequence[PayloadRef]) -> None:
        """Return items to the channel whose consumer was cancelled while it got them."""
        if (state := self._states.get(number)) is not None:
            state.give_back(consumer, refs)
            self._advance(state)

    def acknowledge(self, consumer: str) -> None:
        """Release the items that ``consumer`` got, since its call has ended."""
        for state in self._states.values():
            self._release([item.payload for item in state.acknowledge(consumer)])

    def redeliver(self, worker: str) -> int:
        """Make the items that a dead worker had got available again, and drop those that died with it. Returns the
        number of items that are delivered again."""
        returned_count = 0
        for state in self._states.values():
            returned_count += state.redeliver(worker)
            dropped = state.lose(worker, kept=self._outlives_owner)
            if dropped:
                self.on_lost(
                    "items_lost", f"{len(dropped)} items in channel {state.name} were lost with {worker}", worker=worker
                )
            self._advance(state)
        return returned_count

    def forget_closed(self) -> None:
        """Drop closed channels from which nothing more can be got."""
        for number, state in list(self._states.items()):
            statistics = state.statistics(self._clock.now())
            if state.closed and not (statistics.used or statistics.putters or statistics.unacknowledged):
                del self._states[number]

    def unread(self) -> list[str]:
        """Return the names of channels that have items, and that no consumer has ever read."""
        return [s.name for s in self._states.values() if not s.readers and s.statistics(self._clock.now()).used]

    def waits_of(self, waiter: str) -> list[str]:
        """List what a process waits for in channels."""
        return [wait.kind for wait in self._waits.open() if wait.waiter == waiter]

    # The workflow's own end: `FlowProcess`.

    async def put(self, number: int, name: str, items: Sequence[Any], weights: Sequence[float]) -> None:
        async def put_part(refs: Sequence[PayloadRef], weights: Sequence[float]) -> None:
            if not await self.put_refs(WORKFLOW, number, refs, weights):
                raise ChannelClosed(f"channel {name} is closed")

        put_label = f"channel {name}, put by {WORKFLOW}"
        await put_in_parts(items, weights, lambda item: self.network.hold(item, put_label), put_part)

    async def get(self, number: int, name: str, weight: float | None) -> list[Any]:
        refs = await self.get_refs(WORKFLOW, number, weight)
        try:
            items = [await self.network.fetch(ref) for ref in refs]
        except asyncio.CancelledError:
            self.give_back(WORKFLOW, number, refs)
            raise
        if number in self._states:
            self._release([item.payload for item in self._states[number].acknowledge(WORKFLOW, refs)])
        return items

    def chunk_size(self, name: str) -> float:
        return math.inf

    def close_channel(self, number: int, name: str) -> None:
        if (state := self._states.get(number)) is not None:
            state.close()
            self._advance(state)

    async def statistics_of(self, number: int) -> ChannelStatistics:
        if number not in self._states:
            raise ConfigurationError("the channel is closed and removed")
        return self._states[number].statistics(self._clock.now())

    async def _wait_until_settled(self, state: ChannelState, waiting: Put | Get, reason: str, participant: str) -> None:
        """Wait until a put is accepted, or a get is served."""
        settled_future = self._open[id(waiting)] = asyncio.get_running_loop().create_future()
        try:
            self._advance(state)
            with self._waits.on(reason, f"channel {state.name}", participant):
                await settled_future
        except (asyncio.CancelledError, ConfigurationError):
            if settled_future.done() and isinstance(waiting, Get):
                state.give_back(waiting.consumer, [item.payload for item in waiting.items])
            self._release([item.payload for item in state.withdraw(waiting)])
            self._advance(state)
            raise
        finally:
            self._open.pop(id(waiting), None)

    def _advance(self, state: ChannelState) -> None:
        try:
            settled_operations = state.advance(self._clock.now())
        except ValueError as error:  # raised by the user's balance
            raise ConfigurationError(str(error)) from None
        for operation in settled_operations:
            self.changes += 1
            if (settled_future := self._open.get(id(operation))) is not None and not settled_future.done():
                settled_future.set_result(None)

    def _outlives_owner(self, item: Item) -> bool:
        return item.payload.outlives_owner(self.network.address.machine)

    def _release(self, refs: Sequence[PayloadRef]) -> None:
        """Release payloads that no consumer needs any more."""
        for ref in refs:
            self.network.release(ref)
