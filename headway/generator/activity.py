"""The states of one replica over time, as spans: busy, idle, lent, update."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

ActivitySpan = tuple[str, float, float]  # state, start and end, seconds of the machine's monotonic clock

_KEPT = 512  # spans between two calls of `take`; older ones are dropped


class Activity:
    """Records a replica's state changes as spans; repeating the current state changes nothing.

    Example: be("busy"); be("busy"); be("idle"); take() gives [("busy", 0.0, 2.0), ("idle", 2.0, 3.0)].
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._state = "idle"
        self._since_s = now()
        self._ended: deque[ActivitySpan] = deque(maxlen=_KEPT)

    def be(self, state: str) -> None:
        """Enter ``state`` now; a new span begins if it differs from the current one."""
        if state != self._state:
            self._end()
            self._state = state

    @contextmanager
    def during(self, state: str) -> Iterator[None]:
        """Be in ``state`` inside the block, and in the previous state after it."""
        before = self._state
        self.be(state)
        try:
            yield
        finally:
            self.be(before)

    def take(self) -> list[ActivitySpan]:
        """Return the spans since the last call, oldest first; the current state's span is cut at this moment."""
        self._end()
        spans = list(self._ended)
        self._ended.clear()
        return spans

    def _end(self) -> None:
        now = self._now()
        self._ended.append((self._state, self._since_s, now))
        self._since_s = now
