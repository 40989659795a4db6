"""Tests of the game and of its demonstrations: `make test`."""

from __future__ import annotations

import random
import unittest

import make_tasks
from myproject import ACTIONS, STEPS, Field, distance

from headway.api import load_experiment


class Game(unittest.TestCase):
    def test_a_seed_is_a_game(self) -> None:
        assert Field().reset(7) == Field().reset(7)
        assert len({Field().reset(seed)[0] for seed in range(50)}) > 30

    def test_goal_ends_it_with_a_reward(self) -> None:
        game = Field()
        game.reset(7)
        game.place, game.goal = (0, 0), (1, 1)
        assert game.step(ACTIONS.index("right")) == ("1 0 to 1 1", 0.0, False, False, {})
        assert game.step(ACTIONS.index("down")) == ("1 1 to 1 1", 1.0, True, False, {})

    def test_it_ends_after_its_steps(self) -> None:
        game = Field()
        game.reset(7)
        game.place, game.goal = (0, 0), (3, 3)
        ends = [game.step(ACTIONS.index("left"))[3] for _ in range(STEPS)]
        assert ends == [False] * (STEPS - 1) + [True]

    def test_goals_can_be_reached(self) -> None:
        for seed in range(100):
            game = Field()
            game.reset(seed)
            assert 2 <= distance(game.place, game.goal) <= STEPS


class Demonstrations(unittest.TestCase):
    def test_some_reach_the_goal(self) -> None:
        rng = random.Random(1)
        reached = [make_tasks.demonstrate(seed, rng)[1] for seed in range(500)]
        assert 0.2 < sum(reached) / len(reached) < 0.7


class Configuration(unittest.TestCase):
    def test_experiment_is_valid(self) -> None:
        experiment = load_experiment("experiment.toml")
        assert experiment.environment.parameters["actions"] == list(ACTIONS)
        assert experiment.environment.max_turns == STEPS
        assert experiment.tasks.train[0].parameters["prompt"] == make_tasks.PROMPT


if __name__ == "__main__":
    unittest.main()
