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
        prefix = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(weights)])  # sums of the first weights
        node_ends = np.arange(1, len(weights) + 1)
        self._weights: list[int] = weights.tolist()
        self._sums: list[int] = [0, *(prefix[node_ends] - prefix[node_ends - (node_ends & -node_ends)]).tolist()]
        self.total = int(prefix[-1])
        self._top = 1 << (len(self._weights).bit_length() - 1) if self._weights else 0

    def __getitem__(self, index: int) -> int:
        return self._weights[index]

    def set(self, index: int, weight: int) -> None:
        weight_change = weight - self._weights[index]
        if not weight_change:
            return
        self._weights[index] = weight
        self.total += weight_change
        i = index + 1
        while i < len(self._sums):
            self._sums[i] += weight_change
            i += i & -i

    def find(self, offset: int) -> int:
        """Return the item that contains ``offset`` (0 <= offset < total) in the concatenation of all weights."""
        if not 0 <= offset < self.total:
            raise ValueError(f"{offset} is not within 0..{self.total - 1}")
        position, stride = 0, self._top
        while stride:
            next_position = position + stride
            if next_position < len(self._sums) and self._sums[next_position] <= offset:
                position = next_position
                offset -= self._sums[next_position]
            stride >>= 1
        return position
