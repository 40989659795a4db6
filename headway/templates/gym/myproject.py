"""The game: ``reset`` and ``step`` as gymnasium has them. The experiment names it as ``myproject:Field``.

A piece on a field of 6 x 6 has to reach a goal in nine steps. Whatever has these two methods can be played, gymnasium's
own games by their names too.
"""

from __future__ import annotations

import random
from typing import Any

SIDE, STEPS = 6, 9
ACTIONS = ("left", "right", "up", "down")
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))


class Field:
    """Observations are texts: where the piece is, and where the goal."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begin a game; the same seed begins the same one."""
        rng = random.Random(seed)
        self.steps, self.place = 0, (rng.randrange(SIDE), rng.randrange(SIDE))
        self.goal = self.place
        while not 2 <= distance(self.place, self.goal) <= 6:
            self.goal = rng.randrange(SIDE), rng.randrange(SIDE)
        return self.seen(), {}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Move; returns observation, reward, terminated, truncated and further information."""
        self.steps += 1
        x, y = (min(max(at + by, 0), SIDE - 1) for at, by in zip(self.place, MOVES[action], strict=True))
        self.place = (x, y)
        reached = self.place == self.goal
        return self.seen(), float(reached), reached, self.steps >= STEPS, {}

    def seen(self) -> str:
        return "{} {} to {} {}".format(*self.place, *self.goal)


def distance(a: tuple[int, int], b: tuple[int, int]) -> int:
    """Steps from one place to another."""
    return abs(a[0] - b[0]) + abs(a[1] - b[1])
