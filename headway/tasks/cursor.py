"""An endless, resumable iteration over tasks, reshuffled every epoch, of one source or of several by weight."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from headway.records.errors import ConfigurationError
from headway.records.task import Task
from headway.tasks.mixture import Mixture


class TaskCursor:
    """An endless iterator over tasks. Each epoch of a source is a permutation that depends on (seed, epoch) alone, and
    a mixture chooses between sources by their weights (mixture.py).

    Invariant: ``position`` (tasks handed out since the start) is the whole state, so a cursor made from equal tasks,
    seed and weights and ``seek``-ed to it continues exactly where another stopped. Memory: a permutation per source.

    Example: over 3 tasks positions 0-2 are each task once, 3-5 each once more in another order;
    ``cursor.seek(4)`` then ``next()`` gives what the fifth ``next()`` of a fresh cursor gives.
    """

    def __init__(self, tasks: Sequence[Task], seed: int, weights: Mapping[str, float] | None = None) -> None:
        """``weights``: ``Task.source`` -> weight; with fewer than two sources all tasks are one source.

        Raises ConfigurationError when there are no tasks, or a source has none.
        """
        self._orders, self._mixture = make_task_orders(tasks, seed, weights)

    @property
    def position(self) -> int:
        """Tasks handed out since the start."""
        return sum(self._mixture.counts)

    def next(self) -> Task:
        """Return the next task and advance."""
        source_index = self._mixture.next()
        order = self._orders[source_index]
        return order.tasks[order.number(self._mixture.counts[source_index] - 1)]

    def seek(self, position: int) -> None:
        """Go to ``position`` (>= 0), as if that many tasks had been handed out."""
        if position < 0:
            raise ValueError(f"position = {position}: must be >= 0")
        self._mixture.seek(position)


def make_task_orders(
    tasks: Sequence[Task], seed: int, weights: Mapping[str, float] | None
) -> tuple[list[TaskOrder], Mixture]:
    """Make a task order for each source, and the mixture that chooses between them. Arguments and errors as of
    ``TaskCursor``."""
    if not tasks:
        raise ConfigurationError("there are no tasks to draw from")
    if weights is None or len(weights) < 2:
        return [TaskOrder(tasks, seed)], Mixture([1.0])
    tasks_by_source: dict[str, list[Task]] = {name: [] for name in weights}
    for task in tasks:
        tasks_by_source[task.source].append(task)
    for name, source_tasks in tasks_by_source.items():
        if not source_tasks:
            raise ConfigurationError(f"{name}: there are no tasks to draw from")
    # a separate seed for each, or sources of one size would have equal permutations
    orders = [TaskOrder(source_tasks, f"{seed}:{name}") for name, source_tasks in tasks_by_source.items()]
    return orders, Mixture(list(weights.values()))


class TaskOrder:
    """The order of a source's tasks, reshuffled every epoch."""

    def __init__(self, tasks: Sequence[Task], seed: int | str) -> None:
        self.tasks = tasks
        self._seed = seed
        self._epoch = -1  # the epoch ``_order`` belongs to
        self._order: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def number(self, position: int) -> int:
        """Return the index into ``tasks`` of the task at ``position`` (>= 0), counted over all epochs."""
        epoch, offset = divmod(position, len(self.tasks))
        if epoch != self._epoch:
            self._order = permutation(len(self.tasks), self._seed, epoch)
            self._epoch = epoch
        return int(self._order[offset])


def permutation(size: int, seed: int | str, epoch: int) -> npt.NDArray[np.int64]:
    """Return a permutation of ``range(size)``, [size], that depends on (size, seed, epoch) alone.

    Indices are sorted by a keyed 64-bit mix (the finaliser of SplitMix64, Steele et al. 2014), so the order
    doesn't change with the version of a library's shuffle.
    """
    key = hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=8).digest()
    hashes = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    hashes += np.uint64(int.from_bytes(key, "little"))
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashes ^= hashes >> np.uint64(31)
    return np.argsort(hashes, kind="stable")
