"""A block's fragments: noise and seeds by number, episodes over fragments, faults with block, lane and step."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium")

from scripted_lanes import ACTIONS, NoisyPolicy, Scripted, scripted_vector, settings_of

from headway.embodied.block import LaneBlock, seed_of
from headway.embodied.records import Fragment
from headway.embodied.simulators.gymnasium_lanes import SeparateLanes, VectorLanes
from headway.embodied.simulators.opening import open_simulator
from headway.records.errors import SimulatorFailed
from headway.runtime.stalls.watchdog import Watchdog

SEEDS = functools.partial(seed_of, 1, 0, 0)


def block_of(simulator: Any, policy: Any = None, **settings: Any) -> LaneBlock:
    defaults = {"seed": 1, "number": 3, "steps": 4, "watchdog": Watchdog(60.0)}
    fragments = settings.pop("fragments", 0)
    block = LaneBlock(simulator, policy or NoisyPolicy(), simulator.spaces, **{**defaults, **settings})
    block.fragments = fragments
    return block


def scripted_block(*faults: dict, **settings: Any) -> LaneBlock:
    return block_of(SeparateLanes([Scripted((), **lane_faults) for lane_faults in faults], SEEDS), **settings)


def same(first: Fragment, second: Fragment) -> bool:
    names = [name for name in Fragment.__dataclass_fields__ if isinstance(getattr(first, name), np.ndarray)]
    return all(np.array_equal(getattr(first, name), getattr(second, name)) for name in names)


def test_seeds_differ_in_all_that_they_are_of():
    seeds = {seed_of(*numbers) for numbers in np.ndindex(3, 3, 3, 3, 3)}
    assert len(seeds) == 3**5
    assert all(0 <= seed < 1 << 31 for seed in seeds)
    assert seed_of(1, 2, 0, 3, 4) == 734352852


def test_noise_follows_from_seed_block_and_fragment_alone():
    def actions(**settings: Any) -> list[np.ndarray]:
        block = scripted_block({}, {}, **settings)
        return [block.collect(0).actions_tb for _ in range(2)]

    first, second = actions()
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(actions(life=1, fragments=1)[0], second)
    assert not np.array_equal(actions(seed=2)[0], first)
    assert not np.array_equal(actions(seed=-1)[0], actions(seed=-2)[0])
    assert not np.array_equal(actions(number=4)[0], first)
    generator = np.random.Generator(np.random.Philox(key=[1, 3], counter=[0, 0, 0, 1]))
    np.testing.assert_array_equal(second, generator.standard_normal((4, 2, 1), dtype=np.float32))


@pytest.mark.parametrize("backend", ["gymnasium", "envpool"])
def test_blocks_are_the_same_beside_any_others(backend: str):
    pytest.importorskip("envpool" if backend == "envpool" else "mujoco")

    def collected(numbers: list[int]) -> dict[int, list[Fragment]]:
        blocks = []
        for number in numbers:
            chosen = settings_of("HalfCheetah-v5", backend=backend, arguments={"max_episode_steps": 6})
            simulator = open_simulator(chosen, 2, functools.partial(seed_of, 1, number, 0))
            blocks.append(block_of(simulator, number=number))
        rounds = [[block.collect(version) for block in blocks] for version in range(3)]
        return {number: list(fragments) for number, fragments in zip(numbers, zip(*rounds, strict=True), strict=True)}

    together, alone = collected([0, 1, 2]), collected([1])
    assert all(map(same, together[1], alone[1]))
    assert not same(together[0][0], together[1][0])
    assert len(alone[1][1].final_at) == 2


def test_a_fragment_names_its_version_life_and_constructions():
    block = scripted_block({}, {}, life=2, fragments=7)
    fragment = block.collect(11)
    assert (fragment.block, fragment.number, fragment.version, fragment.life) == (3, 7, 11, 2)
    assert fragment.constructions == 6
    assert block.collect(12).number == 8
    assert fragment.logprobs_tb.tolist() == [[0.0, 1.0]] * 4
    assert fragment.values_tb[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert fragment.last_observations_b.tolist() == [[0.0, 4.0]] * 2


def test_actions_are_recorded_before_they_are_clipped():
    block = scripted_block({}, steps=40)
    fragment = block.collect(0)
    [lane] = block._simulator._environments
    assert np.abs(fragment.actions_tb).max() > 1.5
    np.testing.assert_array_equal(lane.actions, fragment.actions_tb[:, 0].clip(-1, 1))


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"observation": (0, np.float32([0, np.nan]))}, r"lane 1, step 0 of fragment 0: the observation\[1\] is nan"),
        ({"observation": (2, np.float32([-np.inf, 0]))}, r"lane 1, step 2 of fragment 0: the observation\[0\] is -inf"),
        ({"observation": (4, np.float32([np.nan, 0]))}, r"lane 1, step 4 of fragment 0: the observation\[0\] is nan"),
        ({"observation": (2, np.zeros(1, np.float32))}, r"lane 1, step 1 .*shape \(1,\), float32; valid: \(2,\)"),
        ({"observation": (0, np.zeros(2, np.complex64))}, r"lane 1, step 0 .*complex64; valid: \(2,\), float32"),
        ({"reward": (3, np.nan)}, r"lane 1, step 2 of fragment 0: the reward is nan"),
        ({"reward": (1, "much")}, r"lane 1, step 0 .*the simulator raised ValueError: .*'much'"),
        ({"raises": (2, RuntimeError("no contact"))}, r"lane 1, step 2 .*simulator raised RuntimeError: no contact"),
        (
            {"observation": (0, RuntimeError("no map"))},
            r"lane 1, step 0 .*simulator's reset raised RuntimeError: no map",
        ),
        ({"info": (1, None)}, r"lane 1, step 0 .*the simulator raised TypeError"),
    ],
)
def test_faults_name_block_lane_step_and_number(faults: dict, message: str):
    with pytest.raises(SimulatorFailed, match=rf"^block 3, {message}") as caught:
        scripted_block({}, faults).collect(0)
    assert caught.value.lane == 1


def test_an_error_behind_a_number_that_isnt_finite_is_reported_as_that():
    faults = {"observation": (1, np.float32([np.nan, 0])), "raises": (2, RuntimeError("unstable"))}
    with pytest.raises(SimulatorFailed, match=r"lane 0, step 1 of fragment 0: the observation\[0\] is nan"):
        scripted_block(faults).collect(0)


def test_a_policy_without_numbers_isnt_the_simulators_fault():
    class Broken(NoisyPolicy):
        def act(self, observations_b: Any, noise_b: Any) -> Any:
            return super().act(observations_b, np.full_like(noise_b, np.nan))

    with pytest.raises(SimulatorFailed, match=r"lane 0, step 0 .*: the action of the policy\[0\] is nan"):
        scripted_block({}, policy=Broken()).collect(0)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"observations_b": np.zeros((2, 3), np.float32)}, r"step 1 .*: observations of shape \(2, 3\), .*\(2, 2\)"),
        ({"rewards_b": np.zeros(1)}, r"step 0 .*: rewards of shape \(1,\), float64; valid: \(2,\)"),
        ({"truncated_b": np.ones(2)}, r"step 0 .*: truncated of shape \(2,\), float64; valid: \(2,\), bool"),
        ({"truncated_b": np.ones(2, bool)}, r"lane 0, step 0 .*: the last observation .* is None"),
        ({"rewards_b": None}, r"step 0 .*: rewards of shape"),
    ],
)
def test_a_vector_that_answers_otherwise_than_its_spaces_is_named(answer: dict, message: str):
    simulator = VectorLanes(scripted_vector(2), SEEDS)
    step = simulator.step
    simulator.step = lambda actions_b: step(actions_b)._replace(**answer)
    with pytest.raises(SimulatorFailed, match=rf"^block 3, {message}"):
        block_of(simulator).collect(0)


def test_a_step_that_returns_what_gymnasium_does_is_refused():
    simulator = VectorLanes(scripted_vector(2), SEEDS)
    step = simulator.step
    simulator.step = lambda actions_b: tuple(step(actions_b))
    with pytest.raises(SimulatorFailed, match=r"^block 3, step 0 .*: the simulator's step returned tuple; .*LaneSteps"):
        block_of(simulator).collect(0)


def test_pictures_that_turn_into_fractions_are_refused():
    from gymnasium.spaces import Box

    picture = Box(0, 255, (2,), np.uint8)
    lanes = [Scripted((), (picture, ACTIONS), observation=(0, np.array([1, 2], np.uint8)))]
    with pytest.raises(SimulatorFailed, match=r"step 0 .*float32; valid: \(2,\), uint8"):
        block_of(SeparateLanes(lanes, SEEDS)).collect(0)


def test_a_policy_of_torch_gets_the_simulators_tensors_themselves():
    torch = pytest.importorskip("torch")

    class TensorPolicy:
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def act(self, observations_b: Any, noise_b: Any) -> Any:
            points = torch.from_dlpack(observations_b)
            self.seen.append((observations_b, points.data_ptr()))
            return points + torch.from_numpy(noise_b), points.sum(-1), points[:, 0]

        def take_tokens(self) -> None: ...

    simulator = open_simulator(settings_of("scripted_lanes:TorchLanes"), 2, SEEDS)
    policy = TensorPolicy()
    block = block_of(simulator, policy)
    fragments = [block.collect(0), block.collect(0)]
    assert all(isinstance(seen, torch.Tensor) and seen.data_ptr() == address for seen, address in policy.seen)
    observations = np.concatenate([fragment.observations_tb for fragment in fragments])
    np.testing.assert_array_equal(observations, np.stack([seen.numpy() for seen, _ in policy.seen]))
    actions = np.concatenate([fragment.actions_tb for fragment in fragments])
    low, high = simulator.spaces.actions.low, simulator.spaces.actions.high
    assert all(isinstance(given, torch.Tensor) for given in simulator.given)
    np.testing.assert_array_equal(actions.clip(low, high), torch.stack(simulator.given).numpy())
    assert (actions < low).any()
    assert [fragment.final_at.tolist() for fragment in fragments] == [[[2, 0]], [[1, 0]]]
    expected = observations[2, 0] + actions[2, 0].clip(low, high)
    np.testing.assert_array_equal(fragments[0].final_observations_n, [expected])
    assert [episode.steps for fragment in fragments for episode in fragment.episodes] == [3, 3]


def test_every_step_has_the_time_limit_to_itself():
    events: list[Any] = []

    class Noted(Scripted):
        def reset(self, **options: Any) -> Any:
            events.append("reset")
            return super().reset(**options)

        def step(self, action: Any) -> Any:
            events.append("step")
            return super().step(action)

    class Timer:
        def __enter__(self) -> Timer:
            events.append("on")
            return self

        def restart(self) -> None:
            events.append("restart")

        def __exit__(self, *_: object) -> None:
            events.append("off")

    block = block_of(SeparateLanes([Noted()], SEEDS), watchdog=Timer(), steps=2)
    block.collect(0)
    assert events == ["on", "reset", *["restart", "step"] * 2, "off"]
    block.collect(0)
    assert events[7:] == ["on", *["restart", "step"] * 2, "off"]
