"""Samples from many weighted items: changing a weight and looking up a draw cost O(log n)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class WeightTree:
    """Integer weights of n items in a Fenwick tree (Fenwick 1994).

    As they are integers, sums are exact and don't depend on the order of changes.

    Example: weights [2, 0, 3]: ``total`` is 5; ``find(0)`` and ``find(1)`` are 0, ``find(2)`` to ``find(4)`` are 2.
    """

    def __init__(self, weights: npt.NDArray[np.int64]) -> None:
        """Build the tree in O(n). ``weights`` [n]: >= 0 each."""
        cumulative = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(weights)])  # sums of the first weights
        ends = np.arange(1, len(weights) + 1)
        self._weights: list[int] = weights.tolist()
        self._sums: list[int] = [0, *(cumulative[ends] - cumulative[ends - (ends & -ends)]).tolist()]
        self.total = int(cumulative[-1])
        self._top = 1 << (len(self._weights).bit_length() - 1) if self._weights else 0

    def __getitem__(self, index: int) -> int:
        return self._weights[index]

    def set(self, index: int, weight: int) -> None:
        change = weight - self._weights[index]
        if not change:
            return
        self._weights[index] = weight
        self.total += change
        i = index + 1
        while i < len(self._sums):
            self._sums[i] += change
            i += i & -i

    def find(self, offset: int) -> int:
        """Return the item that contains ``offset`` (0 <= offset < total) in the concatenation of all weights."""
        if not 0 <= offset < self.total:
            raise ValueError(f"{offset} is not within 0..{self.total - 1}")
        position, step = 0, self._top
        while step:
            beyond = position + step
            if beyond < len(self._sums) and self._sums[beyond] <= offset:
                position = beyond
                offset -= self._sums[beyond]
            step >>= 1
        return position
