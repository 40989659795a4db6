"""The end of channels in a process of a workflow: in its own process, or in a worker's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from headway.records.errors import ConfigurationError

if TYPE_CHECKING:
    from headway.control.channel_state import ChannelStatistics
    from headway.flow.paths import PayloadRef

_present: FlowProcess | None = None


class FlowProcess(Protocol):
    """The side of a channel that is in this process."""

    def portion(self, name: str) -> float:
        """Items of channel ``name`` that the plan has this process take at once; inf: all. Raises ConfigurationError
        where all are several workers', and nobody said how many there are."""
        ...

    async def put(self, number: int, name: str, items: Sequence[Any], weights: Sequence[float]) -> None: ...

    async def get(self, number: int, name: str, weight: float | None) -> list[Any]: ...

    def close_channel(self, number: int, name: str) -> None: ...

    async def statistics_of(self, number: int) -> ChannelStatistics: ...


PART_BYTES = 8 << 20  # of items that are held before a place for them is asked for


async def put_in_parts(
    items: Sequence[Any],
    weights: Sequence[float],
    hold: Callable[[Any], Awaitable[PayloadRef]],
    put: Callable[[Sequence[PayloadRef], Sequence[float]], Awaitable[None]],
) -> None:
    """Put items so that only a few of them are in memory twice while a full channel makes their producer wait."""
    refs: list[PayloadRef] = []
    first = 0
    for index, item in enumerate(items):
        refs.append(await hold(item))
        if index == len(items) - 1 or sum(ref.size_bytes for ref in refs) >= PART_BYTES:
            await put(refs, list(weights[first : index + 1]))
            refs, first = [], index + 1


def enter(process: FlowProcess | None) -> None:
    """Make ``process`` this process's part of its workflow; None: it is none."""
    global _present
    _present = process


def here() -> FlowProcess:
    """This process's part of its workflow. Raises ConfigurationError outside of one."""
    if _present is None:
        raise ConfigurationError("a channel can be used inside a running workflow only (headway.flow.run)")
    return _present
