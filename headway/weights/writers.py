"""The ranks that publish versions together, as publishing sees them. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class Writers(Protocol):
    """The ranks that publish the versions of one model together, each its rows, by equal calls in equal order.

    The calls of a rank come from one thread at a time, which isn't always the same.
    """

    rank: int
    nodes: tuple[str, ...]  # of each rank; those of one node write into the same file

    def all_gather(self, value: T) -> list[T]:
        """Return every rank's ``value``, rank 0's first."""
        ...

    def exchange(self, transfers: Iterable[tuple[int, int, Tensor]]) -> None:
        """Send and receive memory: (source, target, [bytes] uint8), of which other ranks' is ignored."""
        ...


class OneWriter:
    """A process that publishes alone."""

    rank: int = 0
    nodes: tuple[str, ...] = ("",)

    def all_gather(self, value: T) -> list[T]:
        """See `Writers.all_gather`."""
        return [value]

    def exchange(self, transfers: Iterable[tuple[int, int, Tensor]]) -> None:
        """See `Writers.exchange`."""
