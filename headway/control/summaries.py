"""Summarises a quantity over the samples of a step: quantiles, histograms, means."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from headway.records.ledger import Distribution

SOLVE_RATE_BINS = 11
_RESAMPLES, _SEED = 5_000, 0
Record = TypeVar("Record")


def quantile(values: Sequence[float], q: float) -> float:
    """Return the q-quantile (0 <= q <= 1) by linear interpolation between order statistics; 0.0 of no values.

    Equal to ``numpy.quantile`` with its default method.
    """
    if not 0.0 <= q <= 1.0:
        raise ValueError(f"quantile {q} is not within 0..1")
    if not values:
        return 0.0
    sorted_values = sorted(values)
    position = q * (len(sorted_values) - 1)
    low_index = math.floor(position)
    high_index = min(low_index + 1, len(sorted_values) - 1)
    return sorted_values[low_index] + (sorted_values[high_index] - sorted_values[low_index]) * (position - low_index)


def histogram_in_tenths(values: Iterable[float]) -> dict[str, int]:
    """Count values by tenth, each rounded down ("0.3")."""
    count_by_tenth = Counter(math.floor(10 * number + 1e-9) for number in values)
    return {f"{tenths / 10:.1f}": count for tenths, count in sorted(count_by_tenth.items())}


def weighted_mean(
    records: Iterable[Record], value: Callable[[Record], float], weight: Callable[[Record], float]
) -> float:
    """Return the weighted mean of the finite values of ``records``; 0.0 where their weight is 0."""
    weighted_pairs = [(value(record), weight(record)) for record in records]
    weighted_pairs = [(x, w) for x, w in weighted_pairs if math.isfinite(x) and w > 0]
    total_weight = sum(w for _, w in weighted_pairs)
    return sum(x * w for x, w in weighted_pairs) / total_weight if total_weight else 0.0


def mean_interval(values: Sequence[float]) -> tuple[float, ...]:
    """Return low and high of the 95 % interval of the mean, by a bootstrap with a fixed seed; () of no values."""
    if not values:
        return ()
    low, high = np.quantile(_resampling_weights(len(values)) @ np.asarray(values, np.float64), (0.025, 0.975))
    return float(low), float(high)


@lru_cache(maxsize=4)
def _resampling_weights(count: int) -> NDArray[np.float64]:
    """The shares of ``count`` values in each resample: [resamples, count]."""
    generator = np.random.default_rng([_SEED, count])
    return generator.multinomial(count, np.full(count, 1.0 / count), size=_RESAMPLES) / count


def distribution(weighted: Iterable[tuple[int, int]]) -> Distribution:
    """Compute mean, maximum and histogram of integers from (value, count) pairs.

    For the staleness of trajectories each count is 1, for that of tokens it is a span's number of tokens."""
    tally: Counter[int] = Counter()
    for number, count in weighted:
        tally[number] += count
    total_count = sum(tally.values())
    if not total_count:
        return Distribution()
    mean = sum(number * count for number, count in tally.items()) / total_count
    return Distribution(mean=mean, max=max(tally), histogram={str(v): tally[v] for v in sorted(tally)})


def pooled(histograms: Iterable[Mapping[str, int] | Mapping[int, int]]) -> Counter[int]:
    """Sum histograms (value -> count, values possibly as text from a ledger); the result ascends by value."""
    pooled_counts: Counter[int] = Counter()
    for histogram in histograms:
        pooled_counts.update({int(number): count for number, count in histogram.items()})
    return Counter(dict(sorted(pooled_counts.items())))


def length_histogram(lengths: Iterable[int]) -> dict[str, int]:
    """Count lengths by bucket: upper bound -> number of lengths.

    There are four buckets for every doubling (exact up to 8), so a bucket is at most a quarter as wide as its lower
    bound."""
    count_by_end = Counter(_bucket_end(length) for length in lengths)
    return {str(end): count_by_end[end] for end in sorted(count_by_end)}


def bucket_width(length: int) -> int:
    """Return the width of the bucket of ``length_histogram`` that contains ``length``."""
    return 1 << max(0, (length - 1).bit_length() - 3)


def bucket_middle(end: int) -> float:
    """Return the middle of the bucket of ``length_histogram`` that ends with ``end``."""
    return end - (bucket_width(end) - 1) / 2


def _bucket_end(length: int) -> int:
    width = bucket_width(length)
    return -(-length // width) * width


def solve_rate_bin(solved: int, valid: int) -> int:
    """Return the bin of one group: 0 for none solved, 10 for all, else ceil(10 x rate) capped at 9.

    The bins are 0, (0, .1], (.1, .2], ... (.7, .8], (.8, 1), 1. Raises ValueError for counts out of range.
    """
    if valid < 1 or not 0 <= solved <= valid:
        raise ValueError(f"{solved} solved of {valid}")
    if solved == valid:
        return SOLVE_RATE_BINS - 1
    return min(SOLVE_RATE_BINS - 2, -(-10 * solved // valid))


def solve_rate_histogram(groups: Iterable[tuple[int, int]]) -> list[int]:
    """Count groups by share solved, [11], from (solved, valid) pairs; groups without a valid member are left out."""
    histogram = [0] * SOLVE_RATE_BINS
    for solved, valid in groups:
        if valid:
            histogram[solve_rate_bin(solved, valid)] += 1
    return histogram
