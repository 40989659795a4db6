"""Choice of the next task's source, which keeps the sources' shares at every moment and not only on average."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm


class Mixture:
    """An endless sequence of source indices in which no source is ever a whole task ahead of or behind its share.

    With n choices made and shares p_i, source i was chosen n p_i times, give or take at most 1 - 1 / (2k - 2) for k
    sources: Tijdeman's rule for the chairman assignment problem (Discrete Mathematics 32, 1980). Of the sources whose
    deficit n p_i - count_i has reached 1 / (2k - 2), the one that would overrun its bound first is chosen. The
    arithmetic is in integers, so the sequence repeats exactly after ``period`` choices, and ``seek`` costs at most one
    period whatever the position.

    Example: weights (3, 1) give 0, 0, 1, 0, 0, 0, 1, 0, ...: one in four, evenly spread.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """``weights``: positive, not necessarily summing to 1; read as exact decimals. Raises ValueError otherwise."""
        exact_weights = [Fraction(str(weight)) for weight in weights]
        if not exact_weights or min(exact_weights) <= 0:
            raise ValueError(f"weights = {list(weights)}: must be positive")
        scale = lcm(*(weight.denominator for weight in exact_weights))
        integer_weights = [int(weight * scale) for weight in exact_weights]
        divisor = gcd(*integer_weights)
        self._weights = [weight // divisor for weight in integer_weights]
        self.period = sum(self._weights)
        self.counts = [0] * len(integer_weights)  # choices of each source so far

    def next(self) -> int:
        """Choose the next source; returns its index."""
        if len(self.counts) == 1:
            source_index = 0
        else:
            # everything times 2 (k - 1) x period: the threshold 1 / (2k - 2) becomes the period
            scale, choice_count = 2 * (len(self.counts) - 1), sum(self.counts) + 1
            deficits = [
                scale * (choice_count * weight - count * self.period)
                for weight, count in zip(self._weights, self.counts, strict=True)
            ]
            due_sources = [i for i, deficit in enumerate(deficits) if deficit >= self.period]
            bound = (scale - 1) * self.period
            source_index = min(due_sources, key=lambda i: (Fraction(bound - deficits[i], self._weights[i]), i))
        self.counts[source_index] += 1
        return source_index

    def seek(self, position: int) -> None:
        """Go to ``position`` (>= 0), as if that many choices had been made."""
        periods, remaining = divmod(position, self.period)
        self.counts = [periods * weight for weight in self._weights]
        for _ in range(remaining):
            self.next()
