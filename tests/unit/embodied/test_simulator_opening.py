"""Simulators by name: what can be opened, and how the rest is refused."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gymnasium")

from gymnasium import spaces
from scripted_lanes import ACTIONS, OBSERVATIONS, NoisyPolicy, Scripted, scripted_vector, settings_of

from headway.embodied.block import LaneBlock, seed_of
from headway.embodied.records import Box, Discrete
from headway.embodied.simulators.gymnasium_lanes import SeparateLanes, VectorLanes
from headway.embodied.simulators.opening import open_simulator
from headway.records.errors import ConfigurationError
from headway.runtime.stalls.watchdog import Watchdog

SEEDS = functools.partial(seed_of, 1, 0, 0)
SPACES = {
    "dict": spaces.Dict({"picture": spaces.Box(0, 1, (3,))}),
    "tuple": spaces.Tuple((spaces.Discrete(2), spaces.Discrete(3))),
    "text": spaces.Text(4),
    "bits": spaces.MultiBinary(3),
    "counts": spaces.MultiDiscrete([2, 3]),
    "from_one": spaces.Discrete(3, start=1),
    "integers": spaces.Box(0, 9, (2,), np.int64),
    "matrix": spaces.Box(-1, 1, (2, 2)),
}


def with_spaces(observations: str = "", actions: str = "") -> Scripted:
    return Scripted(spaces=(SPACES.get(observations, OBSERVATIONS), SPACES.get(actions, ACTIONS)))


def without_autoreset(num_envs: int) -> Any:
    return scripted_vector(num_envs, "Disabled")


def too_few(num_envs: int) -> Any:
    return scripted_vector(num_envs, lanes=num_envs - 1)


def opened(environment: str, **settings: Any) -> Any:
    return open_simulator(settings_of(environment, **settings), 2, SEEDS)


def test_ids_of_gymnasium_and_classes_of_ones_own_are_opened():
    cartpole = opened("CartPole-v1")
    assert isinstance(cartpole, SeparateLanes)
    assert cartpole.spaces.actions == Discrete(2)
    assert cartpole.constructions == 2
    by_module = opened("gymnasium.envs.classic_control:Pendulum-v1", arguments={"g": 1.5})
    assert by_module.spaces.actions == Box(low=np.float32([-2]), high=np.float32([2]))
    assert isinstance(opened("scripted_lanes:Scripted"), SeparateLanes)
    vector = opened("scripted_lanes:scripted_vector", arguments={"mode": "NextStep"})
    assert isinstance(vector, VectorLanes)
    assert (vector.constructions, vector.lanes, vector.seeded_by_reset) == (1, 2, True)


def test_a_simulator_of_ones_own_gets_lanes_and_seeds():
    pytest.importorskip("torch")
    points = opened("scripted_lanes:TorchLanes", arguments={"length": 5})
    assert (points.lanes, points.length) == (2, 5)
    assert points.seeds == [SEEDS(0, 0), SEEDS(1, 0)]


@pytest.mark.parametrize("name", ["dict", "tuple", "text", "bits"])
def test_spaces_without_a_network_are_refused_by_name(name: str):
    kind = type(SPACES[name]).__name__
    with pytest.raises(ConfigurationError, match=rf"observation space is {kind}\(.*valid: Box"):
        opened("test_simulator_opening:with_spaces", arguments={"observations": name})
    with pytest.raises(ConfigurationError, match=rf"action space is {kind}\(.*valid: Box .*or Discrete"):
        opened("test_simulator_opening:with_spaces", arguments={"actions": name})


@pytest.mark.parametrize("name", ["counts", "from_one", "integers", "matrix"])
def test_actions_without_a_distribution_are_refused(name: str):
    with pytest.raises(ConfigurationError, match=r"action space is .*valid: Box of numbers in one dimension"):
        opened("test_simulator_opening:with_spaces", arguments={"actions": name})


@pytest.mark.parametrize(
    ("environment", "settings", "message"),
    [
        (
            "HalfChetah-v5",
            {},
            "environment = 'HalfChetah-v5' .*HalfCheetah.*valid: an id of gymnasium, or module:Class",
        ),
        ("CartPole-v1", {"arguments": {"gravity": 3}}, r"arguments = \{'gravity': 3\}.*TypeError.*'gravity'"),
        ("scripted_lanes:Scriptd", {}, "has no 'Scriptd'; did you mean 'Scripted'"),
        ("no_such_module:Lanes", {}, "no_such_module can't be imported"),
        (
            "test_simulator_opening:without_autoreset",
            {},
            "autoreset_mode'] is .*DISABLED.*valid: .*NEXT_STEP, SAME_STEP",
        ),
        ("test_simulator_opening:too_few", {}, "it has 1 lanes; valid: the 2 of simulator.block_lanes"),
    ],
)
def test_what_cant_be_opened_names_key_and_what_would_be_valid(environment: str, settings: dict, message: str):
    with pytest.raises(ConfigurationError, match=f"simulator.*{message}"):
        opened(environment, **settings)


def test_envpool_names_the_nearest():
    pytest.importorskip("envpool")
    with pytest.raises(ConfigurationError, match=r"'HalfChetah-v5': EnvPool has no .*valid: .*HalfCheetah-v5"):
        opened("HalfChetah-v5", backend="envpool")
    with pytest.raises(ConfigurationError, match=r"arguments = \{'colour': 1\}.*'colour'"):
        opened("HalfCheetah-v5", backend="envpool", arguments={"colour": 1})


def test_lanes_of_different_spaces_are_refused():
    other = Scripted(spaces=(OBSERVATIONS, SPACES["from_one"].__class__(3)))
    with pytest.raises(ConfigurationError, match=r"lane 1 .*valid: lane 0's observations Box\(2,\)"):
        SeparateLanes([Scripted(), other], SEEDS)


def test_a_policy_for_other_spaces_is_refused():
    cartpole, points = opened("CartPole-v1"), opened("scripted_lanes:Scripted")
    with pytest.raises(ConfigurationError, match=r"block 3: .*Box\(4,\).*valid: observations Box\(2,\)"):
        LaneBlock(cartpole, NoisyPolicy(), points.spaces, seed=1, number=3, steps=2, watchdog=Watchdog(60.0))


def test_pictures_need_a_render_mode():
    blind = opened("CartPole-v1")
    blind.reset()
    with pytest.raises(ConfigurationError, match=r'valid: simulator\.arguments\.render_mode = "rgb_array"'):
        blind.render()
    pytest.importorskip("pygame")
    frame = opened("CartPole-v1", arguments={"render_mode": "rgb_array"})
    frame.reset()
    assert frame.render().shape[2:] == (3,)
