"""Lanes begin their next episodes by themselves: a reset's step is no transition, and a cut keeps its last state."""

from __future__ import annotations

import functools

import numpy as np
import pytest

pytest.importorskip("gymnasium")

import gymnasium
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_lanes import NoisyPolicy, Scripted, count_of, scripted_vector, settings_of

from headway.embodied.block import LaneBlock, seed_of
from headway.embodied.records import Fragment, LaneSimulator
from headway.embodied.simulators.gymnasium_lanes import SeparateLanes, VectorLanes
from headway.embodied.simulators.opening import open_simulator
from headway.records.errors import SimulatorFailed
from headway.runtime.stalls.watchdog import Watchdog

SEEDS = functools.partial(seed_of, 1, 0, 0)
SCRIPTS = st.lists(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from(["terminated", "truncated", "both"])), max_size=6),
    min_size=1,
    max_size=3,
)


def collected(simulator: LaneSimulator, steps: int, fragments: int) -> list[Fragment]:
    policy = NoisyPolicy(count_of(simulator.spaces))
    block = LaneBlock(simulator, policy, simulator.spaces, seed=1, number=0, steps=steps, watchdog=Watchdog(60.0))
    return [block.collect(version) for version in range(fragments)]


def transitions(fragments: list[Fragment], lane: int) -> list[tuple]:
    """Those of a lane that count: observation, reward, end, last observation of a cut episode."""
    rows = []
    for fragment in fragments:
        finals = dict(zip(map(tuple, fragment.final_at.tolist()), fragment.final_observations_n.tolist(), strict=True))
        for t in range(len(fragment.rewards_tb)):
            terminated, truncated = fragment.terminated_tb[t, lane], fragment.truncated_tb[t, lane]
            end = "terminated" if terminated else "truncated" if truncated else ""
            row = (fragment.observations_tb[t, lane].tolist(), fragment.rewards_tb[t, lane], end, finals.get((t, lane)))
            if fragment.counted_tb[t, lane]:
                rows.append(row)
            else:
                assert row[1:] == (0.0, "", None)
    return rows


def scripted(script: list[tuple[int, str]], count: int) -> list[tuple]:
    """The same of the script."""
    rows = []
    for episode, (length, kind) in enumerate([*script, (10**9, "")]):
        for step in range(length):
            if len(rows) == count:
                return rows
            end = "" if step < length - 1 else "truncated" if kind == "truncated" else "terminated"
            last = [episode, length] if end == "truncated" else None
            rows.append(([episode, step], 10 * episode + step + 1, end, last))
    return rows


@settings(max_examples=60, deadline=None)
@given(scripts=SCRIPTS, mode=st.sampled_from(["separate", "SameStep", "NextStep"]), steps=st.integers(1, 7))
def test_fragments_are_what_happened_in_the_episodes(scripts, mode: str, steps: int):
    lanes = len(scripts)
    if mode == "separate":
        simulator = SeparateLanes([Scripted(script) for script in scripts], SEEDS)
    else:
        simulator = VectorLanes(scripted_vector(lanes, mode, scripts), SEEDS)
    fragments = collected(simulator, steps, 4)
    for lane, script in enumerate(scripts):
        rows = transitions(fragments, lane)
        assert rows == scripted(script, len(rows))
        ends = [row for row in rows if row[2]]
        # a reset behind an end takes a step of its own, unless the last step was the end
        if mode == "NextStep":
            assert 0 <= len(rows) + len(ends) - 4 * steps <= 1
        else:
            assert len(rows) == 4 * steps
        reported = [episode for fragment in fragments for episode in fragment.episodes if episode.lane == lane]
        assert [episode.steps for episode in reported] == [length for length, _ in script[: len(ends)]]
        assert [episode.reward for episode in reported] == [
            sum(10 * number + step + 1 for step in range(length))
            for number, (length, _) in enumerate(script[: len(ends)])
        ]
    last = fragments[-1].last_observations_b
    assert all(last[lane, 0] <= len(scripts[lane]) for lane in range(lanes))


def test_a_vector_needs_last_observations_of_cut_episodes_alone():
    def without_last(end: str) -> VectorLanes:
        vector = scripted_vector(1, "SameStep", [[(2, end)]])
        step = vector.step
        vector.step = lambda actions: (*step(actions)[:4], {})
        return VectorLanes(vector, SEEDS)

    assert collected(without_last("terminated"), 3, 1)[0].terminated_tb.any()
    with pytest.raises(SimulatorFailed, match=r"lane 0, step 1 .*: the last observation of the truncated .* is None"):
        collected(without_last("truncated"), 3, 1)


def test_rewards_of_a_reset_are_no_rewards():
    vector = scripted_vector(1, "NextStep", [[(2, "terminated")]])
    step = vector.step

    def rewarded(actions: np.ndarray) -> tuple:
        observations, rewards, *others = step(actions)
        return observations, rewards + 0.5, *others

    vector.step = rewarded
    [fragment] = collected(VectorLanes(vector, SEEDS), 4, 1)
    assert fragment.rewards_tb[:, 0].tolist() == [1.5, 2.5, 0.0, 11.5]
    assert fragment.counted_tb[:, 0].tolist() == [True, True, False, True]


def test_every_episode_of_a_lane_has_a_seed_of_its_own():
    lanes = [Scripted([(2, "terminated")] * 3) for _ in range(2)]
    collected(SeparateLanes(lanes, SEEDS), 3, 2)
    assert [lane.seeds for lane in lanes] == [[SEEDS(lane, episode) for episode in range(4)] for lane in range(2)]


def test_a_reset_begins_again_where_seeds_belong_to_it():
    simulator = open_simulator(settings_of("CartPole-v1"), 2, SEEDS)
    first = simulator.reset()
    ends = [simulator.step(np.array([0, 1])).terminated_b for _ in range(30)]
    assert np.any(ends, axis=0).all()  # another reset begins with the seeds of first episodes again
    assert simulator.seeded_by_reset
    np.testing.assert_array_equal(simulator.reset(), first)


@pytest.mark.parametrize("mode", ["separate", "SameStep", "NextStep"])
def test_success_is_that_of_any_step_or_of_the_last(mode: str):
    def made(info: dict, step: int) -> Scripted:
        return Scripted([(3, "truncated")] * 9, info=(step, info))

    lanes = [made({"success": 1.0}, 2), made({"success": 0.0}, 2), made({"success": 1.0}, 3), made({}, 3)]
    last = [made({"is_success": True}, 3), made({"is_success": True}, 2)]
    for environments, first in ((lanes, [True, False, True, None]), (last, [True, False])):
        if mode == "separate":
            simulator = SeparateLanes(environments, SEEDS)
        else:
            makers = [lambda environment=environment: environment for environment in environments]
            simulator = VectorLanes(gymnasium.vector.SyncVectorEnv(makers, autoreset_mode=mode), SEEDS)
        [fragment] = collected(simulator, 7, 1)
        # a vector's infos have a number for every lane as soon as one lane has it
        expected = first if mode == "separate" else [success or False for success in first]
        later = [success and False for success in expected]
        assert [episode.success for episode in fragment.episodes] == expected + later


def test_cut_episodes_of_halfcheetah_keep_the_state_before_the_reset():
    pytest.importorskip("mujoco")
    arguments = {"max_episode_steps": 5}
    simulator = open_simulator(settings_of("HalfCheetah-v5", arguments=arguments), 2, SEEDS)
    [fragment] = collected(simulator, 12, 1)
    assert fragment.final_at.tolist() == [[4, 0], [4, 1], [9, 0], [9, 1]]
    assert not fragment.terminated_tb.any()
    assert [episode.steps for episode in fragment.episodes] == [5] * 4
    # a state of motion, and behind it the next episode's, nearly at rest
    assert (np.abs(fragment.final_observations_n).max(axis=1) > 1.0).all()
    assert (np.abs(fragment.observations_tb[5]).max(axis=1) < 0.6).all()
    replayed = gymnasium.make("HalfCheetah-v5")
    replayed.reset(seed=SEEDS(1, 0))
    actions = fragment.actions_tb[:5, 1].clip(-1, 1)
    np.testing.assert_array_equal(
        [replayed.step(action)[0] for action in actions][-1], fragment.final_observations_n[1]
    )


def test_cartpole_terminates_and_acts_by_numbers():
    [fragment] = collected(open_simulator(settings_of("CartPole-v1"), 2, SEEDS), 100, 1)
    assert fragment.actions_tb.dtype == np.int64
    assert set(np.unique(fragment.actions_tb)) == {0, 1}
    assert fragment.terminated_tb.sum() == len(fragment.episodes) > 2
    assert all(episode.reward == episode.steps for episode in fragment.episodes)


def test_envpool_resets_in_a_step_that_is_no_transition():
    pytest.importorskip("envpool")
    chosen = settings_of("HalfCheetah-v5", backend="envpool", arguments={"max_episode_steps": 5})
    simulator = open_simulator(chosen, 2, SEEDS)
    assert not simulator.seeded_by_reset
    assert simulator.constructions == 1
    [fragment] = collected(simulator, 12, 1)
    assert (~fragment.counted_tb).nonzero()[0].tolist() == [5, 5, 11, 11]
    assert fragment.transitions == 20
    assert fragment.final_at.tolist() == [[4, 0], [4, 1], [10, 0], [10, 1]]
    np.testing.assert_array_equal(fragment.final_observations_n[:2], fragment.observations_tb[5])
    assert [episode.steps for episode in fragment.episodes] == [5] * 4
    terminating = collected(open_simulator(settings_of("CartPole-v1", backend="envpool"), 2, SEEDS), 100, 1)[0]
    assert terminating.terminated_tb.any()
    assert (terminating.rewards_tb[~terminating.counted_tb] == 0).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_lane_of_an_envpool_is_the_same_in_pools_of_other_sizes(threads: int):
    pytest.importorskip("envpool")
    seen = []
    for lanes in (2, 4):
        chosen = settings_of(
            "HalfCheetah-v5", backend="envpool", arguments={"max_episode_steps": 4, "num_threads": threads}
        )
        simulator = open_simulator(chosen, lanes, SEEDS)
        observations = [simulator.reset()[:2].copy()]
        observations += [simulator.step(np.full((lanes, 6), 0.1 * step)).observations_b[:2].copy() for step in range(9)]
        seen.append(np.stack(observations))
    np.testing.assert_array_equal(*seen)


def test_metaworld_shows_its_goal_and_tells_success():
    pytest.importorskip("envpool")
    arguments = {"partially_observable": False, "max_episode_steps": 6}
    chosen = settings_of("MetaWorld/Reach-v3", backend="envpool", arguments=arguments)
    [fragment] = collected(open_simulator(chosen, 2, SEEDS), 8, 1)
    assert fragment.observations_tb[..., -3:].any(axis=-1).all()
    assert [(episode.success, episode.steps) for episode in fragment.episodes] == [(False, 6)] * 2
