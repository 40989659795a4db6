"""Drawing by weight out of many: changing one weight and finding a draw cost O(log n)."""

from __future__ import annotations

from collections.abc import Sequence


class WeightTree:
    """Integer weights of n things (Fenwick 1994). Integers, so the sums are exact and don't depend on the order in
    which weights came to be what they are.

    Example: weights [2, 0, 3]: ``total`` is 5; ``find(0)`` and ``find(1)`` are 0, ``find(2)`` to ``find(4)`` are 2.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        """O(n). ``weights``: >= 0 each."""
        self._weights = list(weights)
        self._sums = [0, *self._weights]
        for i in range(1, len(self._sums)):
            above = i + (i & -i)
            if above < len(self._sums):
                self._sums[above] += self._sums[i]
        self.total = sum(self._weights)
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
        """The thing that ``at`` (0 <= at < total) falls on when the weights are laid end to end."""
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
