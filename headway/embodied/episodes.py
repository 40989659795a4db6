"""Statistics of episodes: means, and their intervals."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from headway.control.summaries import mean_interval
from headway.embodied.records import EpisodeEnd
from headway.records.ledger import EpisodeStatistics

WINDOW = 100  # episodes over which a step's statistics are


def statistics_of(ends: Collection[EpisodeEnd], **counts: float) -> EpisodeStatistics:
    """The statistics of episodes, with the further ``counts``. Successes are over those episodes of which the
    simulator reports a success or its lack."""
    returns = [episode.reward for episode in ends]
    successes = [float(episode.success) for episode in ends if episode.success is not None]
    return EpisodeStatistics(
        return_mean=_mean(returns),
        return_interval=mean_interval(returns),
        success_rate=_mean(successes),
        success_interval=mean_interval(successes),
        length_mean=_mean([episode.steps for episode in ends]),
        **counts,  # pyright: ignore[reportArgumentType]
    )


def _mean(numbers: Sequence[float]) -> float:
    return math.fsum(numbers) / len(numbers) if numbers else math.nan
