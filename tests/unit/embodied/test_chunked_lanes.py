"""Lanes that are stepped by chunks: episodes, groups that begin alike, pools that are built again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from token_runs import token_experiment

from headway.embodied.block import seed_of
from headway.embodied.records import Array, Box, LaneSteps, Spaces
from headway.embodied.tokens.lanes import ChunkedLanes, GroupSeeds, open_lanes
from headway.records.errors import ConfigurationError

EDGE = np.ones(2, np.float32)


def chunks_of(actions: list[float]) -> Array:
    return np.array(actions, np.float32)[:, None]


def lanes_of(tmp_path: Path, *, in_groups: bool = True, **policy: Any) -> Any:
    experiment = token_experiment(tmp_path, "none", policy=policy)
    return open_lanes(experiment, 8, partial(seed_of, 3, 0, 0), in_groups=in_groups)


def test_lanes_of_a_group_begin_alike_and_otherwise_after_each_reset(tmp_path: Path):
    lanes = lanes_of(tmp_path)
    starts = [lanes.reset() for _ in range(2)]
    for start in starts:
        assert (start[:4] == start[0]).all()
        assert (start[4:] == start[4]).all()
        assert (start[0] != start[4]).any()
    assert (starts[0][0] != starts[1][0]).any()


def test_single_lanes_begin_otherwise_and_again_at_each_reset(tmp_path: Path):
    lanes = lanes_of(tmp_path, in_groups=False)
    first, second = lanes.reset(), lanes.reset()
    np.testing.assert_array_equal(first, second)
    assert len(np.unique(first, axis=0)) == 8


def test_an_episode_ends_at_its_first_success_and_the_lane_idles(tmp_path: Path):
    lanes = lanes_of(tmp_path)
    start = lanes.reset()
    ways = start[:, 1] - start[:, 0]
    ended, rewards = np.zeros(8, bool), np.zeros(8)
    for _ in range(4):
        steps = lanes.step(chunks_of(np.sign(ways).tolist()))
        assert (steps.counted_b == ~ended).all()
        assert {lane for lane in range(8) if steps.terminated_b[lane]} == {
            lane for lane, success in steps.successes.items() if success
        }
        ended |= steps.terminated_b | steps.truncated_b
        rewards += steps.rewards_b
    needed = np.maximum(0, np.abs(ways) - 0.2) / 0.15
    assert ended.all()
    np.testing.assert_array_equal(rewards, (needed <= 12).astype(float))
    last = lanes.step(chunks_of([0.0] * 8))
    assert not last.counted_b.any()


def test_an_action_lasts_for_its_steps_and_a_chunk_has_several(tmp_path: Path):
    lanes = lanes_of(tmp_path, chunk=2, repeat=1)
    start = lanes.reset()
    steps = lanes.step(np.tile(np.float32([1, -1]), (8, 1)))
    free = steps.counted_b & ~steps.terminated_b & (np.abs(start[:, 0]) < 0.8)
    assert free.any()
    np.testing.assert_allclose(steps.observations_b[free, 0], start[free, 0], atol=1e-6)


class Pool:
    """A vector with seeds of its constructor: lanes die at steps that their actions say."""

    seeded_by_reset, constructions = False, 1
    spaces = Spaces(Box(-EDGE, EDGE), Box(-EDGE[:1], EDGE[:1]))

    def __init__(self, seeds: Callable[[int, int], int]) -> None:
        self.seeds, self.lanes = [seeds(lane, 0) for lane in range(4)], 4

    def reset(self) -> Array:
        return np.tile(np.float32(self.seeds)[:, None] % 7, (1, 2))

    def step(self, actions_b: Array) -> LaneSteps:
        over_b = actions_b[:, 0] > 0.5
        zeros, none = np.zeros(4), np.zeros(4, bool)
        finals = {lane: np.zeros(2, np.float32) for lane in np.flatnonzero(over_b).tolist()}
        return LaneSteps(self.reset(), zeros, over_b, none, ~none, finals, dict.fromkeys(finals, True))

    def render(self) -> Array:
        raise NotImplementedError

    def close(self) -> None: ...


@pytest.mark.parametrize(("actions", "constructions"), [([1, 1, 0, 0], 1), ([1, 0, 0, 0], 2)])
def test_a_pool_is_built_again_where_lanes_of_a_group_have_begun_other_episodes(
    actions: list[float], constructions: int, tmp_path: Path
):
    groups = GroupSeeds(partial(seed_of, 3, 0, 0), 2)
    policy = token_experiment(tmp_path, "none", policy={"repeat": 1}).policy
    lanes = ChunkedLanes(lambda: Pool(groups), policy, groups)
    lanes.reset()
    lanes.step(chunks_of(actions))
    lanes.reset()
    assert lanes.constructions == constructions


def test_simulators_that_begin_every_episode_alike_are_refused_in_groups(tmp_path: Path):
    simulator = {"environment": "embodied_runs:Walk"}
    experiment = token_experiment(tmp_path, "none", simulator=simulator)
    with pytest.raises(ConfigurationError, match="begins again from the same seeds"):
        open_lanes(experiment, 8, partial(seed_of, 3, 0, 0), in_groups=True)
