"""A register of a process's open waits, and the workers whose status can be inspected."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from headway.records.stalls import Wait, WorkerStatus

_MOST_DURATIONS = 4096  # between two readings of them


class InspectableWorker(Protocol):
    """A worker whose status can be asked for from outside."""

    @property
    def name(self) -> str: ...

    @property
    def alive(self) -> bool: ...

    @property
    def silent_s(self) -> float:
        """Seconds without a sign of life."""
        ...

    def kill(self, reason: str = "") -> None: ...

    async def inspect(self) -> WorkerStatus | None:
        """Its status now; None when it dies meanwhile."""
        ...


class Waits:
    """The open waits, and the durations of those that ended without an error.

    Costs two dictionary operations and two readings of the clock for each wait: nothing is done per token.

    Example::

        with waits.on("trainer.publish", owner="trainer-0", waiter="train loop"):
            await trainer.publish(version)
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.workers: dict[str, InspectableWorker] = {}  # the newest of each name
        self.durations: deque[tuple[str, float]] = deque(maxlen=_MOST_DURATIONS)  # (kind, seconds), taken by a watcher
        self._now = now
        self._numbers = itertools.count()
        self._open: dict[int, tuple[str, str, str, float]] = {}

    @contextmanager
    def on(self, kind: str, owner: str, waiter: str = "the orchestrator") -> Iterator[None]:
        """Register the block as a wait: see `Wait`."""
        wait_number, since_s = next(self._numbers), self._now()
        self._open[wait_number] = (kind, owner, waiter, since_s)
        try:
            yield
            self.durations.append((kind, self._now() - since_s))
        finally:
            del self._open[wait_number]

    def open(self) -> list[Wait]:
        """The waits that are open, oldest first."""
        return [Wait(kind=k, owner=o, waiter=w, since_s=s) for k, o, w, s in list(self._open.values())]

    def take_durations(self) -> list[tuple[str, float]]:
        """The durations of waits that have ended without an error since the last call."""
        return [self.durations.popleft() for _ in range(len(self.durations))]
