"""Weighted sampling from many items: changing one weight and finding a draw cost O(log n)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class WeightTree:
    """Integer weights of n items (Fenwick 1994). Integers, so the sums are exact and don't depend on the order of
    changes.

    Example: weights [2, 0, 3]: ``total`` is 5; ``find(0)`` and ``find(1)`` are 0, ``find(2)`` to ``find(4)`` are 2.
    """

    def __init__(self, weights: npt.NDArray[np.int64]) -> None:
        """O(n). ``weights`` [n]: >= 0 each."""
        before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(weights)])  # of all up to each
        places = np.arange(1, len(weights) + 1)
        self._weights: list[int] = weights.tolist()
        self._sums: list[int] = [0, *(before[places] - before[places - (places & -places)]).tolist()]
        self.total = int(before[-1])
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

    def find(self, at: int) -> int:
        """The item that ``at`` (0 <= at < total) falls on when the weights are laid end to end."""
        if not 0 <= at < self.total:
            raise ValueError(f"{at} is not within 0..{self.total - 1}")
        position, step = 0, self._top
        while step:
            beyond = position + step
            if beyond < len(self._sums) and self._sums[beyond] <= at:
                position = beyond
                at -= self._sums[beyond]
            step >>= 1
        return position
