"""Tests of the simulator and the experiment: `make test`."""

from __future__ import annotations

import unittest

import numpy as np
from myproject import STEPS, Field

from headway.config.load import load_file
from headway.config.simulation import SimulatorExperiment


class Simulator(unittest.TestCase):
    def test_equal_seeds_begin_alike(self) -> None:
        observations_b = Field(3, [1, 1, 2]).reset()
        assert (observations_b[0] == observations_b[1]).all()
        assert (observations_b[0] != observations_b[2]).any()

    def test_pushing_towards_the_target_reaches_it(self) -> None:
        field = Field(8, range(8))
        observations_b, successes = field.reset(), {}
        for _ in range(STEPS):
            step = field.step(np.clip(5 * observations_b[:, :2] - 30 * observations_b[:, 2:], -1, 1))
            observations_b, successes = step.observations_b, step.successes | successes
        assert all(successes[lane] for lane in range(8))

    def test_idle_lanes_are_cut_with_their_last_observation(self) -> None:
        field = Field(2, [1, 2])
        begun = field.reset()
        for _ in range(STEPS):
            step = field.step(np.zeros((2, 2)))
        assert step.truncated_b.all()
        assert not step.terminated_b.any()
        assert (step.final_observations[0] == begun[0]).all()
        assert (step.observations_b[0] != begun[0]).any()


class Configuration(unittest.TestCase):
    def test_experiment_is_valid(self) -> None:
        experiment = load_file("experiment.toml", [], SimulatorExperiment)
        assert experiment.simulator.environment == "myproject:Field"


if __name__ == "__main__":
    unittest.main()
