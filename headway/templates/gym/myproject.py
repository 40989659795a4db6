"""The game: ``reset`` and ``step`` as gymnasium has them, and the tasks, which say where a game begins. The experiment
names them as ``myproject:Field`` and ``myproject:tasks``.

A piece on a field of 8 x 8 has to reach a goal in nine steps. Whatever has these two methods can be played, gymnasium's
own games by their names too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

SIDE, STEPS = 8, 9
MOVES = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
Place = tuple[int, int]
PARTS = {"train": (0, 1500), "validation": (1500, 1596), "test": (1596, 1788), "sft": (1788, 2388)}


class Field:
    """Observations are texts, which say where the goal is as seen from the piece: "3 right 2 up". So are actions."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin a game: where the options say, else anywhere."""
        place, goal = (options or {}).get("begin") or random.Random(seed).choice(games())
        self.steps, self.position, self.goal = 0, tuple(place), tuple(goal)
        return self.seen(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Move; returns observation, reward, terminated, truncated and further information."""
        self.steps += 1
        across, along = MOVES.get(action, (0, 0))  # any other word: the piece stays
        x, y = self.position[0] + across, self.position[1] + along
        if 0 <= x < SIDE and 0 <= y < SIDE:
            self.position = (x, y)
        reached = self.position == self.goal
        return self.seen(), float(reached), reached, self.steps >= STEPS, {}

    def seen(self) -> str:
        """Describe the moves that are left, for the model: easier to learn from than two places to compare."""
        across, along = self.goal[0] - self.position[0], self.goal[1] - self.position[1]
        steps = {name: x * across + y * along for name, (x, y) in MOVES.items()}
        return " ".join(f"{ahead} {name}" for name, ahead in steps.items() if ahead > 0) or "here"


def games() -> list[tuple[Place, Place]]:
    """Every pair of a place and a goal that are two to six steps apart."""
    places = [(x, y) for x in range(SIDE) for y in range(SIDE)]
    return [(place, goal) for place in places for goal in places if 2 <= distance(place, goal) <= 6]


def distance(a: Place, b: Place) -> int:
    """Steps from one place to another."""
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def tasks(part: str) -> Iterator[dict[str, Any]]:
    """Rows of a part of PARTS. No game is in two of them."""
    shuffled = games()
    random.Random(0).shuffle(shuffled)
    for place, goal in shuffled[slice(*PARTS[part])]:
        yield {"prompt": "{}{}-{}{}".format(*place, *goal), "gym": {"options": {"begin": [[*place], [*goal]]}}}
