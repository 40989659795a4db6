"""An endless, reshuffled, resumable walk through a list of tasks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headway.records.errors import ConfigurationError
from headway.records.task import Task


class TaskCursor:
    """Hands out tasks for ever: each epoch is a permutation drawn from (seed, epoch) alone.

    Invariant: ``position`` (tasks handed out since the start) is the whole state, so a cursor made from
    equal tasks and seed and ``seek``-ed to it goes on exactly where another stopped. Memory: one permutation.

    Example: over 3 tasks positions 0-2 are each task once, 3-5 each once more in another order;
    ``cursor.seek(4)`` then ``next()`` gives what the fifth ``next()`` of a fresh cursor gives.
    """

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        if not tasks:
            raise ConfigurationError("there are no tasks to draw from")
        self._tasks = tasks
        self._seed = seed
        self._position = 0
        self._epoch = -1  # the epoch ``_order`` belongs to
        self._order: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    @property
    def position(self) -> int:
        """Tasks handed out since the start."""
        return self._position

    @property
    def epoch(self) -> int:
        """Full passes completed."""
        return self._position // len(self._tasks)

    def next(self) -> Task:
        """Hand out one task and move on."""
        epoch, offset = divmod(self._position, len(self._tasks))
        if epoch != self._epoch:
            self._order = permutation(len(self._tasks), self._seed, epoch)
            self._epoch = epoch
        self._position += 1
        return self._tasks[int(self._order[offset])]

    def seek(self, position: int) -> None:
        """Go to ``position`` (>= 0), as if that many tasks had been handed out."""
        if position < 0:
            raise ValueError(f"position = {position}: must be >= 0")
        self._position = position


def permutation(size: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """A permutation of ``range(size)`` [size] that depends on (size, seed, epoch) and nothing else.

    Indices are sorted by a keyed 64-bit mix (the finaliser of SplitMix64, Steele et al. 2014), so the order
    doesn't change with the version of a library's shuffle.
    """
    key = hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=8).digest()
    mixed = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed += np.uint64(int.from_bytes(key, "little"))
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return np.argsort(mixed, kind="stable")
