"""Simulators whose episodes are written down: their observations are (episode, step), and policies for them."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import numpy as np

from headway.config.simulation import SimulatorConfig
from headway.embodied.records import Box, Discrete, LaneSteps, Spaces, to_host

OBSERVATIONS = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
ACTIONS = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)


class Scripted(gymnasium.Env[Any, Any]):
    """Its k-th episode has ``script[k]``: its steps and how it ends. A reward is 10 episode + step + 1."""

    def __init__(self, script: Any = (), spaces: tuple[Any, Any] = (OBSERVATIONS, ACTIONS), **faults: Any) -> None:
        """``faults``: "observation", "reward", "raises" or "info" -> (step of the first episode, value); keys
        of its info are else False. All observations are one array, filled again."""
        self.observation_space, self.action_space = spaces
        self.script, self.faults = script, faults
        self.episode, self.seeds, self.actions = -1, [], []
        self.observation = np.zeros(2, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.seeds.append(seed)
        self.episode, self.steps = self.episode + 1, 0
        self.observation[:] = self.episode, 0
        return self._with_fault("observation", self.observation), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._with_fault("raises", None)
        self.actions.append(action)
        self.steps += 1
        length, end = self.script[self.episode] if self.episode < len(self.script) else (10**9, "")
        ended = self.steps == length
        self.observation[:] = self.episode, self.steps
        observation = self._with_fault("observation", self.observation)
        reward = self._with_fault("reward", 10.0 * self.episode + self.steps)
        info = self._with_fault("info", dict.fromkeys(self.faults.get("info", (0, {}))[1] or {}, False))
        return (
            observation,
            reward,
            ended and end in ("terminated", "both"),
            ended and end in ("truncated", "both"),
            info,
        )

    def _with_fault(self, kind: str, usual: Any) -> Any:
        step, fault = self.faults.get(kind, (-1, None))
        if self.episode or self.steps != step:
            return usual
        if isinstance(fault, Exception):
            raise fault
        return fault


def scripted_vector(num_envs: int, mode: str = "SameStep", scripts: Any = (), lanes: int | None = None) -> Any:
    """Make gymnasium's vector of them, of another size if ``lanes`` says so."""

    # Its SameStep keeps a last observation without copying it.
    def make(lane: int) -> Any:
        lane_env = Scripted(scripts[lane] if scripts else ())
        return gymnasium.wrappers.TransformObservation(lane_env, np.copy, OBSERVATIONS)

    makers = [functools.partial(make, lane) for lane in range(lanes or num_envs)]
    return gymnasium.vector.SyncVectorEnv(makers, copy=False, autoreset_mode=mode)


class NoisyPolicy:
    """Acts by the noise alone, and keeps the observations that it was called with."""

    def __init__(self, count: int | None = None) -> None:
        self.count, self.seen = count, []

    def act(self, observations_b: Any, noise_b: Any) -> tuple[Any, Any, Any]:
        self.seen.append(observations_b)
        actions_b = noise_b if self.count is None else (noise_b * self.count).astype(np.int64)
        values_b = to_host(observations_b).reshape(len(noise_b), -1).sum(axis=1, dtype=np.float32)
        return actions_b, np.arange(len(noise_b), dtype=np.float32), values_b

    def take_tokens(self) -> None: ...


class TorchLanes:
    """A vector simulator in torch: points that move by their actions. Lane 0 is cut after ``length`` steps."""

    seeded_by_reset = True
    constructions = 1

    def __init__(self, lanes: int, seeds: list[int], length: int = 3) -> None:
        import torch

        self.torch, self.lanes, self.seeds, self.length = torch, lanes, seeds, length
        edge = np.ones(2, np.float32)
        self.spaces = Spaces(Box(low=-9 * edge, high=9 * edge), Box(low=np.float32([-1, -0.5]), high=edge))
        self.given: list[Any] = []

    def reset(self) -> Any:
        self.generator = self.torch.Generator().manual_seed(self.seeds[0])
        self.steps = 0
        self.points = self.torch.rand(self.lanes, 2, generator=self.generator)
        return self.points

    def step(self, actions_b: Any) -> LaneSteps:
        self.given.append(actions_b)
        self.steps += 1
        self.points = self.points + self.torch.as_tensor(actions_b)
        no_lane, rewards_b = self.torch.zeros(self.lanes, dtype=self.torch.bool), self.points.sum(-1)
        truncated_b, final_observations = no_lane.clone(), {}
        if self.steps % self.length == 0:
            final_observations[0] = self.points[0]
            truncated_b[0] = True
            self.points = self.points.clone()
            self.points[0] = self.torch.rand(2, generator=self.generator)
        return LaneSteps(self.points, rewards_b, no_lane, truncated_b, ~no_lane, final_observations, {})

    def close(self) -> None:
        pass


def settings_of(environment: str, **settings: Any) -> SimulatorConfig:
    return SimulatorConfig(environment=environment, **{"lanes": 2, "block_lanes": 2, **settings})


def count_of(spaces: Spaces) -> int | None:
    return spaces.actions.count if isinstance(spaces.actions, Discrete) else None
