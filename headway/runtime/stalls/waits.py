"""A register of what a process waits for, and the workers that can be looked at."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Protocol

from headway.records.stalls import Wait, WorkerLook

_MOST_DURATIONS = 4096  # between two readings of them


class VisibleWorker(Protocol):
    """A worker that can be looked at from outside."""

    @property
    def name(self) -> str: ...

    @property
    def alive(self) -> bool: ...

    @property
    def silent_s(self) -> float:
        """Seconds without a sign of life."""
        ...

    def kill(self, reason: str = "") -> None: ...

    async def look(self) -> WorkerLook | None:
        """A look at it now; None when it dies meanwhile."""
        ...


class Waits:
    """The waits that are open, and how long those took that ended well.

    Costs two dictionary operations and two readings of the clock for each wait: nothing is done per token.

    Example::

        with waits.on("trainer.publish", owner="trainer-0", waiter="train loop"):
            await trainer.publish(version)
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.workers: dict[str, VisibleWorker] = {}  # the newest of each name
        self.durations: deque[tuple[str, float]] = deque(maxlen=_MOST_DURATIONS)  # (kind, seconds), taken by a watcher
        self._now = now
        self._numbers = itertools.count()
        self._open: dict[int, tuple[str, str, str, float]] = {}

    def on(self, kind: str, owner: str, waiter: str = "the orchestrator") -> _OpenWait:
        """Register the block as a wait: see `Wait`."""
        return _OpenWait(self, kind, owner, waiter)

    def open(self) -> list[Wait]:
        """The waits that are open, oldest first."""
        return [Wait(kind=k, owner=o, waiter=w, since_s=s) for k, o, w, s in list(self._open.values())]

    def take_durations(self) -> list[tuple[str, float]]:
        """How long waits took that have ended well since the last call."""
        taken = [self.durations.popleft() for _ in range(len(self.durations))]
        return taken

    def begin(self, kind: str, owner: str, waiter: str) -> int:
        number = next(self._numbers)
        self._open[number] = (kind, owner, waiter, self._now())
        return number

    def end(self, number: int, *, well: bool) -> None:
        kind, _, _, since_s = self._open.pop(number)
        if well:
            self.durations.append((kind, self._now() - since_s))


class _OpenWait:
    __slots__ = ("_kind", "_number", "_owner", "_waiter", "_waits")

    def __init__(self, waits: Waits, kind: str, owner: str, waiter: str) -> None:
        self._waits, self._kind, self._owner, self._waiter = waits, kind, owner, waiter

    def __enter__(self) -> None:
        self._number = self._waits.begin(self._kind, self._owner, self._waiter)

    def __exit__(self, kind: object, *_: object) -> None:
        self._waits.end(self._number, well=kind is None)
