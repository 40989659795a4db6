"""`Channel`: a bounded queue between workers, whose items travel from producer to consumer directly."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from headway.flow.process import current_process
from headway.records.errors import ConfigurationError

if TYPE_CHECKING:
    from headway.control.channel_state import ChannelStatistics

ITEMS, BYTES = 1024, 1 << 30  # a channel's default bounds


class Channel:
    """A handle of a channel, in the workflow or in a worker that received it as an argument.

    The channel is first in, first out, with any number of producers and consumers on any machine of the run. Items stay
    with their producer until a consumer fetches them (the workflow's process sees only their number, weight and size).
    An item is acknowledged when the call that got it ends: if the consumer dies before, it is delivered again, first.
    """

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self._number = number  # a name can be used again, step after step

    def __repr__(self) -> str:
        return f"Channel({self.name!r})"

    async def put(self, item: Any, weight: float = 1.0) -> None:
        """Put an item, waiting while the channel is full. Raises ChannelClosed; ConfigurationError for an item that is
        larger than the channel, or can't be pickled."""
        await self.put_all([item], [weight])

    async def put_all(self, items: Iterable[Any], weights: Sequence[float] = ()) -> None:
        """Put several items, in order; returns when all are in the channel."""
        items = list(items)
        if weights and len(weights) != len(items):
            raise ConfigurationError(f"channel {self.name}: {len(weights)} weights for {len(items)} items")
        if items:
            await current_process().put(self._number, self.name, items, weights or [1.0] * len(items))

    async def get(self, weight: float | None = None) -> Any:
        """Get the oldest item; with ``weight`` a list of the oldest items whose weights sum to at least that, or all
        remaining items of a closed channel. Raises ChannelClosed when it is closed and empty."""
        items = await current_process().get(self._number, self.name, weight)
        if not items:
            raise ChannelClosed(f"channel {self.name} is closed")
        return items[0] if weight is None else items

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Yield items one by one, until the channel is closed and empty."""
        while items := await current_process().get(self._number, self.name, None):
            yield items[0]

    async def chunks(
        self, weight: float | None = None, *, order: Callable[[Any], int] | None = None, start: int = 0
    ) -> AsyncIterator[list[Any]]:
        """Yield lists of items until the channel is closed and empty. A list has at least ``weight``, or in a worker by
        default the chunk size that the plan gives its stage, which may be all items.

        ``order`` maps an item to its number: items then come in the order of these numbers from ``start`` on, however
        they arrive, so that a single consumer gets the same lists under every plan of that chunk size. An item whose
        number has come before, since the call that put it was made again, is dropped. Items after a missing number
        come when the channel is closed.
        """
        chunk_weight = weight if weight is not None else current_process().chunk_size(self.name)
        if order is None:
            while items := await current_process().get(self._number, self.name, chunk_weight):
                yield items
            return
        early_items: dict[int, Any] = {}
        chunk: list[Any] = []
        async for item in self:
            if (number := order(item)) >= start:
                early_items.setdefault(number, item)
            while start in early_items:
                chunk.append(early_items.pop(start))
                start += 1
                if len(chunk) >= chunk_weight:
                    yield chunk
                    chunk = []
        chunk += [early_items[position] for position in sorted(early_items)]
        while chunk:
            chunk_length = len(chunk) if math.isinf(chunk_weight) else math.ceil(chunk_weight)
            yield chunk[:chunk_length]
            chunk = chunk[chunk_length:]

    def close(self) -> None:
        """Reject further puts; items in the channel can still be got. Valid in the workflow only, which knows when all
        producers are done."""
        current_process().close_channel(self._number, self.name)

    async def statistics(self) -> ChannelStatistics:
        """Return the channel's present state, and its totals so far."""
        return await current_process().statistics_of(self._number)


class ChannelClosed(Exception):
    """A channel is closed: a put is rejected, or a get finds it empty."""
