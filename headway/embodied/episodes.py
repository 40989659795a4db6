"""Statistics of episodes: means with bootstrapped intervals, over the last ones and over those of an evaluation."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from headway.embodied.records import EpisodeEnd
from headway.records.ledger import EpisodeStatistics

WINDOW = 100  # episodes over which returns are averaged
_RESAMPLES, _SEED = 1000, 0
Interval = tuple[float, ...]  # low and high; (): of nothing


def interval_of(values: Sequence[float]) -> Interval:
    """The 95 % interval of the mean of ``values``, by a bootstrap with a fixed seed; () for none."""
    if not values:
        return ()
    means = _weights(len(values)) @ np.asarray(values, np.float64)
    low, high = np.quantile(means, (0.025, 0.975))
    return (float(low), float(high))


@cache
def _weights(count: int) -> NDArray[np.float64]:
    """The shares of ``count`` values in each resample, [resamples, count]."""
    generator = np.random.default_rng([_SEED, count])
    return generator.multinomial(count, np.full(count, 1 / count), size=_RESAMPLES) / count


def mean_of(values: Sequence[float]) -> float:
    """The mean; nan for none."""
    return math.fsum(values) / len(values) if values else math.nan


def successes_of(episodes: Iterable[EpisodeEnd]) -> list[float]:
    """1.0 or 0.0 of each episode of which the simulator reports a success or its lack."""
    return [float(episode.success) for episode in episodes if episode.success is not None]


class EpisodeWindow:
    """The last episodes that ended in trained fragments."""

    def __init__(self) -> None:
        self._episodes: deque[EpisodeEnd] = deque(maxlen=WINDOW)

    def add(self, episodes: Sequence[EpisodeEnd], **counts: float) -> EpisodeStatistics:
        """Add those of a step; returns the statistics of the window, with the further ``counts`` of the step."""
        self._episodes.extend(episodes)
        returns, successes = [episode.reward for episode in self._episodes], successes_of(self._episodes)
        return EpisodeStatistics(
            episodes=len(episodes),
            return_mean=mean_of(returns),
            return_interval=interval_of(returns),
            success_rate=mean_of(successes),
            success_interval=interval_of(successes),
            length_mean=mean_of([float(episode.steps) for episode in self._episodes]),
            **counts,  # pyright: ignore[reportArgumentType]
        )
