"""Running statistics against two passes over all numbers, and VecNormalize's returns step by step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from made_fragments import CONTINUOUS, experiment, fragment

from headway.algorithms.values import Moments
from headway.embodied.learner import FragmentLearner
from headway.embodied.policies import LanePolicy
from headway.embodied.statistics import RunningStatistics


@pytest.fixture(scope="module")
def policy():
    acting = LanePolicy(CONTINUOUS, experiment().policy)
    acting.load(FragmentLearner(experiment(), CONTINUOUS, "cpu:0").weights())
    return acting


def rounds(policy, count: int, blocks: int = 2):
    return [
        [fragment(policy, CONTINUOUS, 10 * n + block, block=block) for block in range(blocks)] for n in range(count)
    ]


def all_after(parts, discount: float = 0.9) -> RunningStatistics:
    statistics = RunningStatistics.start((5,))
    for fragments in parts:
        statistics = statistics.with_returns_of(fragments, discount).with_observations_of(fragments)
    return statistics


def test_moments_of_parts_are_those_of_all_numbers():
    chance = np.random.default_rng(0)
    numbers = 1e4 + chance.standard_normal((103, 3)) * [1.0, 1e-3, 0.0]
    moments = Moments.joined([Moments.of(part) for part in np.split(numbers, [1, 1, 40, 41])])
    np.testing.assert_allclose(moments.mean, numbers.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.deviation[:2], numbers.std(0)[:2], rtol=1e-6)
    assert moments.deviation[2] == 1.0  # all are equal: nothing is divided by 0
    assert moments.count == 103
    np.testing.assert_array_equal(RunningStatistics.start((2,)).observations.deviation, [1.0, 1.0])


def test_moments_of_float32_are_summed_in_float64():
    numbers = np.full(100_000, 16_777_217.0).astype(np.float32) + np.arange(100_000, dtype=np.float32)
    moments = Moments.of(numbers)
    assert moments.mean == pytest.approx(numbers.astype(np.float64).mean(), rel=1e-12)


def test_returns_are_those_of_vecnormalize(policy):
    parts, discount = rounds(policy, 3), 0.9
    expected = []
    for block in range(2):
        running = np.zeros(4)
        for fragments in parts:
            one = fragments[block]
            for step in range(len(one.rewards_tb)):
                for lane in range(4):
                    if not one.counted_tb[step, lane]:
                        continue
                    running[lane] = discount * running[lane] + one.rewards_tb[step, lane]
                    expected.append(running[lane])
                    if one.terminated_tb[step, lane] or one.truncated_tb[step, lane]:
                        running[lane] = 0.0
    returns = all_after(parts, discount).returns
    assert returns.count == len(expected)
    assert float(returns.mean) == pytest.approx(np.mean(expected), rel=1e-12)
    assert float(returns.deviation) == pytest.approx(np.std(expected), rel=1e-12)


def test_observations_are_counted_once_and_without_those_of_resets(policy):
    parts = rounds(policy, 2)
    seen = np.concatenate([one.observations_tb[one.counted_tb] for fragments in parts for one in fragments])
    observations = all_after(parts).observations
    assert observations.count == len(seen) < sum(one.counted_tb.size for fragments in parts for one in fragments)
    np.testing.assert_allclose(observations.mean, seen.mean(0), rtol=1e-12)
    np.testing.assert_allclose(observations.deviation, seen.std(0), rtol=1e-12)


def test_rebuilt_block_begins_new_episodes(policy):
    first, second = (fragments[0] for fragments in rounds(policy, 2, blocks=1))
    rebuilt = replace(second, life=1)
    goes_on, is_new = all_after([[first], [second]]), all_after([[first], [rebuilt]])
    assert float(goes_on.returns.mean) != float(is_new.returns.mean)
    alone = all_after([[first]]).returns
    other = RunningStatistics.start((5,)).with_returns_of([second], 0.9).returns
    total = (alone.mean * alone.count + other.mean * other.count) / (alone.count + other.count)
    assert float(is_new.returns.mean) == pytest.approx(float(total), rel=1e-12)


def test_restored_statistics_go_on_to_the_same_bits(policy):
    parts = rounds(policy, 3)
    restored = RunningStatistics.restored({name: array.copy() for name, array in all_after(parts[:2]).state().items()})
    restored = restored.with_returns_of(parts[2], 0.9).with_observations_of(parts[2])
    expected, actual = all_after(parts).state(), restored.state()
    assert expected.keys() == actual.keys() >= {"lanes.0", "lanes.1"}
    assert all(expected[name].tobytes() == actual[name].tobytes() for name in expected)
