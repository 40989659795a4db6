"""The channel interface of a process of a workflow: of the workflow's own process, or of a worker's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from headway.records.errors import ConfigurationError

if TYPE_CHECKING:
    from headway.control.channel_state import ChannelStatistics
    from headway.flow.paths import PayloadRef

_current: FlowProcess | None = None


class FlowProcess(Protocol):
    """The operations on channels that a process of a workflow offers to `Channel`."""

    def chunk_size(self, name: str) -> float:
        """Items of channel ``name`` that this process takes at once under the plan; inf: all. Raises ConfigurationError
        where several workers share all items, and the plan doesn't give the number of items."""
        ...

    async def put(self, number: int, name: str, items: Sequence[Any], weights: Sequence[float]) -> None: ...

    async def get(self, number: int, name: str, weight: float | None) -> list[Any]: ...

    def close_channel(self, number: int, name: str) -> None: ...

    async def statistics_of(self, number: int) -> ChannelStatistics: ...


PART_BYTES = 8 << 20  # bytes of items that are held before space in the channel is requested


async def put_in_parts(
    items: Sequence[Any],
    weights: Sequence[float],
    hold: Callable[[Any], Awaitable[PayloadRef]],
    put: Callable[[Sequence[PayloadRef], Sequence[float]], Awaitable[None]],
) -> None:
    """Put items in parts, so that few of them are in memory twice while their producer waits for a full channel."""
    refs: list[PayloadRef] = []
    first_index = 0
    for index, item in enumerate(items):
        refs.append(await hold(item))
        if index == len(items) - 1 or sum(ref.size_bytes for ref in refs) >= PART_BYTES:
            await put(refs, list(weights[first_index : index + 1]))
            refs, first_index = [], index + 1


def set_current_process(process: FlowProcess | None) -> None:
    """Set this process's part of its workflow; None: it has none."""
    global _current
    _current = process


def current_process() -> FlowProcess:
    """Return this process's part of its workflow. Raises ConfigurationError outside a workflow."""
    if _current is None:
        raise ConfigurationError("a channel can be used inside a running workflow only (headway.flow.run)")
    return _current
