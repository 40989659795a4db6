"""The simulator: a mass on a plane that is pushed to a target, in all lanes by one call. The experiment names it as
``myproject:Field``.

A class that takes ``lanes`` and ``seeds`` has the methods below; any environment of gymnasium's interface serves too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.embodied.records import Array, Box, LaneSteps, Spaces

STEPS, REACHED = 60, 0.1  # of an episode; distance at which the target is reached
PUSH, DRAG = 0.02, 0.9


class Field:
    """Observations: the way to the target and the speed, four numbers. Actions: the push, two numbers in -1..1."""

    constructions = 1  # one object for all lanes
    seeded_by_reset = True

    def __init__(self, lanes: int, seeds: Sequence[int]) -> None:
        wide, unit = np.full(4, np.inf, np.float32), np.ones(2, np.float32)
        self.spaces = Spaces(Box(-wide, wide), Box(-unit, unit))
        self.lanes, self._seeds = lanes, list(seeds)

    def reset(self) -> Array:
        """Begin an episode in every lane."""
        self._random = [np.random.default_rng(seed) for seed in self._seeds]
        self._way, self._speed, self._steps = np.zeros((self.lanes, 2)), np.zeros((self.lanes, 2)), np.zeros(self.lanes)
        for lane in range(self.lanes):
            self._begin(lane)
        return self._observations()

    def step(self, actions_b: Array) -> LaneSteps:
        """Push each mass, and begin the next episode where one has ended: the last observation comes beside."""
        distances_b = np.linalg.norm(self._way, axis=1)
        self._speed = DRAG * self._speed + PUSH * actions_b
        self._way = self._way - self._speed
        self._steps += 1
        new_distances_b = np.linalg.norm(self._way, axis=1)
        reached = new_distances_b < REACHED
        cut = (self._steps >= STEPS) & ~reached
        last, ended = self._observations(), np.flatnonzero(reached | cut).tolist()
        for lane in ended:
            self._begin(lane)
        return LaneSteps(
            observations_b=self._observations(),
            rewards_b=distances_b - new_distances_b + reached,
            terminated_b=reached,
            truncated_b=cut,
            counted_b=np.ones(self.lanes, np.bool_),
            final_observations={lane: last[lane] for lane in ended},
            successes={lane: bool(reached[lane]) for lane in ended},
        )

    def render(self) -> Array:
        """Draw lane 0: the mass in the middle, the target."""
        picture = np.full((96, 96, 3), 255, np.uint8)
        x, y = np.clip(48 + 24 * self._way[0], 3, 92).astype(int)
        picture[46:50, 46:50], picture[y - 3 : y + 3, x - 3 : x + 3] = (0, 0, 0), (220, 40, 40)
        return picture

    def close(self) -> None:
        """Nothing is open."""

    def _begin(self, lane: int) -> None:
        self._way[lane], self._speed[lane], self._steps[lane] = self._random[lane].uniform(-1.5, 1.5, 2), 0.0, 0

    def _observations(self) -> Array:
        return np.concatenate([self._way, self._speed], axis=1).astype(np.float32)
