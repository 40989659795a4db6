"""The collective operations of this process: how many it has entered, and whether it waits in one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Collectives:
    """Counts the collectives that a rank enters, so that comparing all ranks shows which one is missing.

    Example: rank 1 is in its 42nd, rank 0 has entered 41 and is in none: rank 1 waits for rank 0.
    """

    def __init__(self) -> None:
        self.name = ""  # of the last one entered
        self.entered = 0
        self._since_s: float | None = None
        self._finished: Callable[[], bool] | None = None  # of one that a device computes

    @property
    def waiting_s(self) -> float | None:
        """How long the process has been in the last one; None: it isn't in one."""
        since_s, finished = self._since_s, self._finished
        if since_s is None or (finished is not None and finished()):
            return None
        return time.monotonic() - since_s

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Count the block as a collective operation, in which this rank waits for the others."""
        self._finished = None
        self.name, self.entered, self._since_s = name, self.entered + 1, time.monotonic()
        try:
            yield
        finally:
            self._since_s = None

    def enqueue(self, finished: Callable[[], bool]) -> None:
        """Count the wait in the last one until ``finished``: it was given to a device, and `inside` ended at once."""
        self._finished, self._since_s = finished, time.monotonic()


COLLECTIVES = Collectives()  # a process has one default process group
