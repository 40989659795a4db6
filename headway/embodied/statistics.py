"""Running statistics of observations and returns: part of the policy, updated by the learner in the order of blocks.

Shapes: n observations or steps, t steps of a fragment, b lanes of a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.algorithms.returns import FloatArray
from headway.algorithms.values import Moments
from headway.embodied.records import Fragment


@dataclass(frozen=True, kw_only=True, eq=False)
class RunningStatistics:
    """The statistics of all fragments so far.

    Lifecycle, step by step: ``with_returns_of`` its fragments, by which its rewards are normalised; once it has made a
    version, ``with_observations_of`` them: the policy that acts changes then alone."""

    observations: Moments
    returns: Moments  # of lanes' discounted returns so far, after each step
    # By block: its life, for in another one all episodes are new, and the discounted returns [b] of those under way.
    lanes: Mapping[int, tuple[int, FloatArray]]

    @classmethod
    def start(cls, observation_shape: tuple[int, ...]) -> RunningStatistics:
        """The statistics before the first step."""
        zeros = np.zeros(observation_shape)
        return cls(observations=Moments(mean=zeros, squares=zeros), returns=Moments(), lanes={})

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
            lanes[fragment.block] = fragment.life, returns_b
            returns = Moments.joined([returns, Moments.of(returns_tb[fragment.counted_tb])])
        return replace(self, returns=returns, lanes=lanes)

    def with_observations_of(self, fragments: Sequence[Fragment]) -> RunningStatistics:
        """Add the observations on which the policy acted."""
        observations = self.observations
        for fragment in fragments:
            counted = Moments.of(fragment.observations_tb[fragment.counted_tb])
            observations = Moments.joined([observations, counted])
        return replace(self, observations=observations)

    def state(self) -> dict[str, NDArray[np.float64]]:
        """All of it, by name."""
        arrays = {f"lanes.{block}": np.append(returns_b, life) for block, (life, returns_b) in self.lanes.items()}
        for name, moments in (("observations", self.observations), ("returns", self.returns)):
            arrays |= {f"{name}.{key}": np.asarray(array) for key, array in vars(moments).items()}
        return arrays

    @classmethod
    def restored(cls, arrays: Mapping[str, Any]) -> RunningStatistics:
        """The statistics whose `state` is among ``arrays``."""

        def moments(name: str) -> Moments:
            return Moments(**{key: arrays[f"{name}.{key}"][()] for key in ("count", "mean", "squares")})

        lanes = {
            int(name.removeprefix("lanes.")): (int(array[-1]), array[:-1])
            for name, array in arrays.items()
            if name.startswith("lanes.")
        }
        return cls(observations=moments("observations"), returns=moments("returns"), lanes=lanes)
