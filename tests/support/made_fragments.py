"""Fragments of chance for the tests of the learner: with terminations, truncations and steps that only reset."""

from __future__ import annotations

from typing import Any

import numpy as np

from headway.config.simulation import SimulatorExperiment
from headway.embodied.policies import LanePolicy
from headway.embodied.records import Box, Discrete, Fragment, Spaces

VECTOR = Box(np.full(5, -np.inf), np.full(5, np.inf))
TORQUES = Box(np.array([-1.0, -2.0, 0.0], np.float32), np.array([1.0, 2.0, 4.0], np.float32))
PICTURE = Box(np.zeros((10, 12, 3), np.uint8), np.full((10, 12, 3), 255, np.uint8))
CONTINUOUS, DISCRETE = Spaces(VECTOR, TORQUES), Spaces(VECTOR, Discrete(4))


def experiment(**sections: dict[str, Any]) -> SimulatorExperiment:
    """An experiment with these keys; small networks and minibatches otherwise."""
    tables: dict[str, Any] = {"run": {"directory": "run", "seed": 3}, "simulator": {"environment": "any"}}
    tables |= {"policy": {"hidden": [8, 6]}, "trainer": {"passes": 2, "minibatch": 16}}
    return SimulatorExperiment.model_validate(
        {name: {**tables.get(name, {}), **sections.get(name, {})} for name in {**tables, **sections}}
    )


def observations(spaces: Spaces, shape: tuple[int, ...], chance: np.random.Generator) -> np.ndarray:
    """Observations [*shape, ...] in their space: vectors about (1, 2, 3, ...) with deviation 2, or pictures."""
    space = spaces.observations
    if space.is_picture:
        return chance.integers(0, 256, (*shape, *space.shape), np.uint8)
    return np.arange(1.0, space.low.size + 1) + 2.0 * chance.standard_normal((*shape, *space.shape))


def fragment(policy: LanePolicy, spaces: Spaces, seed: int = 0, *, steps: int = 12, lanes: int = 4, **fields: Any):
    """A fragment by ``policy`` with ends by chance, every third of which is followed by a step that only resets."""
    chance = np.random.default_rng(seed)
    seen = observations(spaces, (steps, lanes), chance)
    rows = []
    for observations_b in seen:
        is_box = isinstance(spaces.actions, Box)
        noise = chance.standard_normal((lanes, *spaces.actions.shape)) if is_box else chance.random(lanes)
        rows.append(policy.act(observations_b, noise.astype(np.float32)))
    actions, logprobs, values = (np.stack(column) for column in zip(*rows, strict=True))
    ends = chance.choice([0, 0, 0, 1, 2], (steps, lanes))
    terminated, truncated, counted = ends == 1, ends == 2, np.ones((steps, lanes), bool)
    counted[1:] = ~((ends[:-1] > 0) & (chance.random((steps - 1, lanes)) < 0.33))
    terminated &= counted
    truncated &= counted
    final_at = np.argwhere(truncated)
    rewards = np.where(counted, chance.standard_normal((steps, lanes)) + 1.0, 0.0)
    known = dict(
        block=0, number=0, version=0, observations_tb=seen, actions_tb=actions, logprobs_tb=logprobs, values_tb=values,
        rewards_tb=rewards, terminated_tb=terminated, truncated_tb=truncated, counted_tb=counted,
        last_observations_b=observations(spaces, (lanes,), chance), final_at=final_at,
        final_observations_n=observations(spaces, (len(final_at),), chance),
    )  # fmt: skip
    return Fragment(**{**known, **fields})
