"""Running statistics of observations and returns: part of the policy, updated by the learner in the order of blocks.

Shapes: n observations or steps, t steps of a fragment, b lanes of a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway.algorithms.returns import FloatArray
from headway.algorithms.values import LEAST_DEVIATION
from headway.embodied.records import Array, Fragment


@dataclass(frozen=True, eq=False)
class RunningMoments:
    """Count, mean and sum of squared deviations of arrays of one shape, by dimension, in float64.

    Example: of (1, 7) and (3, 7): count 2, mean (2, 7), squares (2, 0), deviation (1, 1)."""

    count: float
    mean: FloatArray
    squares: FloatArray

    @classmethod
    def none_of(cls, shape: tuple[int, ...]) -> RunningMoments:
        """The moments of no arrays of this shape: mean 0, deviation 1."""
        return cls(0.0, np.zeros(shape), np.zeros(shape))

    def after(self, arrays_n: Array) -> RunningMoments:
        """These moments with those of further arrays [n, ...] (Chan et al., 1979)."""
        if not len(arrays_n):
            return self
        mean, variance = arrays_n.mean(axis=0, dtype=np.float64), arrays_n.var(axis=0, dtype=np.float64)
        added, count = len(arrays_n), self.count + len(arrays_n)
        shift = mean - self.mean
        squares = self.squares + variance * added + shift * shift * (self.count * added / count)
        return RunningMoments(count, self.mean + shift * (added / count), squares)

    @property
    def deviation(self) -> FloatArray:
        """Their population deviation; 1 where there are none, or all are equal."""
        deviation = np.sqrt(self.squares / max(self.count, 1.0))
        return np.where(deviation > LEAST_DEVIATION, deviation, 1.0)


class LaneReturns(NamedTuple):
    """The discounted returns of a block's episodes under way."""

    life: int  # of the block: in another one all episodes are new
    returns_b: FloatArray


@dataclass(frozen=True, kw_only=True, eq=False)
class RunningStatistics:
    """The statistics of all fragments so far.

    Lifecycle, step by step: ``with_returns_of`` its fragments, by which its rewards are normalised; once it has made a
    version, ``with_observations_of`` them: the policy that acts changes then alone."""

    observations: RunningMoments
    returns: RunningMoments  # of lanes' discounted returns so far, after each step
    lanes: Mapping[int, LaneReturns]  # by block

    @classmethod
    def start(cls, observation_shape: tuple[int, ...]) -> RunningStatistics:
        """The statistics before the first step."""
        return cls(observations=RunningMoments.none_of(observation_shape), returns=RunningMoments.none_of(()), lanes={})

    def with_returns_of(self, fragments: Sequence[Fragment], discount: float) -> RunningStatistics:
        """Add the returns R = r + discount · R after each counted step, as VecNormalize of stable-baselines3 does: from
        0 in each episode, over the fragments that it lasts. ``fragments``: one of each block, by block."""
        returns, lanes = self.returns, dict(self.lanes)
        for fragment in fragments:
            life, returns_b = lanes.get(fragment.block, (None, np.empty(0)))
            if life != fragment.life:
                returns_b = np.zeros(fragment.rewards_tb.shape[1])
            returns_tb = np.empty(fragment.rewards_tb.shape)
            ended_tb = fragment.terminated_tb | fragment.truncated_tb
            for step, rewards_b in enumerate(fragment.rewards_tb):
                returns_tb[step] = returns_b = discount * returns_b + rewards_b
                returns_b = np.where(ended_tb[step] | ~fragment.counted_tb[step], 0.0, returns_b)
            lanes[fragment.block] = LaneReturns(fragment.life, returns_b)
            returns = returns.after(returns_tb[fragment.counted_tb])
        return replace(self, returns=returns, lanes=lanes)

    def with_observations_of(self, fragments: Sequence[Fragment]) -> RunningStatistics:
        """Add the observations on which the policy acted."""
        observations = self.observations
        for fragment in fragments:
            observations = observations.after(fragment.observations_tb[fragment.counted_tb])
        return replace(self, observations=observations)

    def state(self) -> dict[str, NDArray[np.float64]]:
        """All of it, by name."""
        arrays = dict[str, NDArray[np.float64]]()
        for name, moments in (("observations", self.observations), ("returns", self.returns)):
            arrays |= {f"{name}.{key}": np.asarray(array) for key, array in vars(moments).items()}
        for block, lane in self.lanes.items():
            arrays[f"lanes.{block}"] = np.append(lane.returns_b, float(lane.life))
        return arrays

    @classmethod
    def restored(cls, arrays: Mapping[str, Array]) -> RunningStatistics:
        """The statistics whose `state` is among ``arrays``."""
        observations, returns = (
            RunningMoments(float(arrays[f"{name}.count"]), arrays[f"{name}.mean"], arrays[f"{name}.squares"])
            for name in ("observations", "returns")
        )
        lanes = {
            int(name.removeprefix("lanes.")): LaneReturns(int(array[-1]), array[:-1])
            for name, array in arrays.items()
            if name.startswith("lanes.")
        }
        return cls(observations=observations, returns=returns, lanes=lanes)
