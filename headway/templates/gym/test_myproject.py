"""Tests of the game, its tasks and its demonstrations: `make test`."""

from __future__ import annotations

import random
import unittest

import make_tasks
from myproject import PARTS, STEPS, Field, distance, games, tasks

from headway.api import load_experiment


def begin(place: tuple[int, int], goal: tuple[int, int]) -> Field:
    game = Field()
    game.reset(options={"begin": [place, goal]})
    return game


class Game(unittest.TestCase):
    def test_a_seed_is_a_game(self) -> None:
        assert Field().reset(7) == Field().reset(7)
        assert len({Field().reset(seed)[0] for seed in range(50)}) > 30

    def test_goal_ends_it_with_a_reward(self) -> None:
        game = begin((0, 0), (1, 1))
        assert game.step("right") == ("1 down", 0.0, False, False, {})
        assert game.step("down") == ("here", 1.0, True, False, {})

    def test_it_ends_after_its_steps(self) -> None:
        game = begin((0, 0), (3, 3))
        assert [game.step(word)[3] for word in ["left", "up", "?"] * 3] == [False] * (STEPS - 1) + [True]
        assert game.position == (0, 0)


class Tasks(unittest.TestCase):
    def test_no_game_is_in_two_parts(self) -> None:
        rows = [row["prompt"] for part in PARTS for row in tasks(part)]
        assert len(rows) == len(set(rows)) == sum(end - first for first, end in PARTS.values())

    def test_goals_can_be_reached(self) -> None:
        assert all(2 <= distance(place, goal) <= STEPS for place, goal in games())

    def test_some_demonstrations_reach_the_goal(self) -> None:
        rng = random.Random(1)
        reached = [make_tasks.demonstrate(task, rng)[1] for task in tasks("sft")]
        assert 0.2 < sum(reached) / len(reached) < 0.85


class Configuration(unittest.TestCase):
    def test_experiment_is_valid(self) -> None:
        experiment = load_experiment("experiment.toml")
        assert experiment.environment.parameters["env"] == "myproject:Field"
        assert experiment.environment.max_turns == STEPS


if __name__ == "__main__":
    unittest.main()
