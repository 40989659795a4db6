"""Lanes of gymnasium's environments: an object for each lane, or a vector environment for all.

Shapes: b lanes of a block, then the dimensions of one observation or action.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headway.embodied.records import Array, Box, Discrete, LaneSteps, Seeds, Spaces, mismatch, to_host
from headway.records.errors import ConfigurationError, SimulatorFailed
from headway.runtime.hooks import error_text


class SeparateLanes:
    """An environment for each lane, stepped one after the other. A step that ends an episode also begins the next.

    An episode succeeded if any of its steps has ``info["success"]``, as in Meta-World, or its last one
    ``info["is_success"]``."""

    seeded_by_reset = True

    def __init__(self, environments: Sequence[Any], seeds: Seeds) -> None:
        """``environments``: gymnasium's, of equal spaces. Raises ConfigurationError for those without a policy."""
        self._environments = environments
        self._seeds = seeds
        self.spaces, *others = [spaces_of(env.observation_space, env.action_space) for env in environments]
        for lane, spaces in enumerate(others, start=1):
            if spaces != self.spaces:
                raise ConfigurationError(f"lane {lane} of the simulator has {spaces}; valid: lane 0's {self.spaces}")
        self.lanes = self.constructions = len(environments)

    def reset(self) -> Array:
        self._episodes, self._succeeded = [0] * self.lanes, dict[int, bool]()
        return np.stack([self._begin(lane) for lane in range(self.lanes)]).astype(
            self.spaces.observations.low.dtype, copy=False
        )

    def step(self, actions_b: Array) -> LaneSteps:
        low = self.spaces.observations.low
        observations_b, rewards_b = np.empty((self.lanes, *low.shape), low.dtype), np.empty(self.lanes)
        terminated_b, truncated_b = np.zeros((2, self.lanes), np.bool_)
        final_observations, successes = dict[int, Array](), dict[int, bool]()
        lane = 0
        try:
            for lane, environment in enumerate(self._environments):
                observation, rewards_b[lane], terminated, truncated, info = environment.step(actions_b[lane])
                observation = self._checked(lane, observation)
                if "success" in info:
                    self._succeeded[lane] = bool(info["success"]) or self._succeeded.get(lane, False)
                if terminated or truncated:
                    terminated_b[lane], truncated_b[lane] = terminated, truncated
                    final_observations[lane] = observation.copy()  # environments may fill one array again
                    if (success := self._succeeded.pop(lane, info.get("is_success"))) is not None:
                        successes[lane] = bool(success)
                    self._episodes[lane] += 1
                    observation = self._begin(lane)
                observations_b[lane] = observation
        except SimulatorFailed:
            raise
        except Exception as error:  # the boundary to a simulator's code
            raise SimulatorFailed(f"the simulator raised {error_text(error)}", lane) from error
        counted_b, succeeded_b = np.ones(self.lanes, np.bool_), np.zeros(self.lanes, np.bool_)
        succeeded_b[[lane for lane, succeeded in self._succeeded.items() if succeeded]] = True
        ends = terminated_b, truncated_b, counted_b, final_observations, successes
        return LaneSteps(observations_b, rewards_b, *ends, succeeded_b)

    def render(self) -> Array:
        return picture_of(self._environments[0])

    def close(self) -> None:
        for environment in self._environments:
            environment.close()

    def _begin(self, lane: int) -> Array:
        try:
            observation, _ = self._environments[lane].reset(seed=self._seeds(lane, self._episodes[lane]))
        except Exception as error:  # the boundary to a simulator's code
            raise SimulatorFailed(f"the simulator's reset raised {error_text(error)}", lane) from error
        return self._checked(lane, observation)

    def _checked(self, lane: int, observation: Any) -> Array:
        """Return the observation as an array of its space. Raises SimulatorFailed for one of another."""
        array = np.asarray(observation)
        if problem := mismatch(array, self.spaces.observations.low):
            raise SimulatorFailed(f"observation of {problem}", lane)
        return array


class VectorLanes:
    """A vector environment with gymnasium's interface, whose observations may be tensors on a device.

    Its autoreset is NextStep, where the step behind an end is no transition, or SameStep with ``infos["final_obs"]``.
    Successes are found as by `SeparateLanes`."""

    constructions = 1

    def __init__(self, vector: Any, seeds: Seeds | None) -> None:
        """``seeds``: None for a vector whose constructor had them. Raises ConfigurationError for spaces that no policy
        is made for, and another autoreset."""
        mode = vector.metadata.get("autoreset_mode")
        if (autoreset := getattr(mode, "value", mode)) not in ("NextStep", "SameStep"):
            raise ConfigurationError(
                f"the simulator's metadata['autoreset_mode'] is {mode!r}; valid: gymnasium's AutoresetMode.NEXT_STEP, "
                "SAME_STEP"
            )
        self._vector, self._seeds = vector, seeds
        self.spaces = spaces_of(vector.single_observation_space, vector.single_action_space)
        self.lanes = int(vector.num_envs)
        self.seeded_by_reset = seeds is not None
        self._next_step = autoreset == "NextStep"

    def reset(self) -> Array:
        self._ended_b, self._succeeded_b = np.zeros((2, self.lanes), np.bool_)
        if self._seeds is None:
            return self._vector.reset()[0]
        return self._vector.reset(seed=[self._seeds(lane, 0) for lane in range(self.lanes)])[0]

    def step(self, actions_b: Array) -> LaneSteps:
        if isinstance(actions_b, np.ndarray):
            actions_b = actions_b.astype(self._vector.single_action_space.dtype, copy=False)
        observations_b, *numbers, infos = self._vector.step(actions_b)
        rewards_b, terminated_b, truncated_b = map(to_host, numbers)
        counted_b = ~self._ended_b
        ended_b = terminated_b | truncated_b
        self._ended_b = ended_b if self._next_step else np.zeros_like(ended_b)
        final_observations, successes = dict[int, Array](), dict[int, bool]()
        if ended_b.any():
            final_infos = infos if self._next_step else infos.get("final_info", {})
            final_obs = observations_b if self._next_step else infos.get("final_obs")
            for lane in np.flatnonzero(ended_b).tolist():
                if final_obs is not None:
                    final_observations[lane] = final_obs[lane]
                if (success := self._success_of(lane, final_infos)) is not None:
                    successes[lane] = success
        if "success" in infos:
            self._succeeded_b |= counted_b & to_host(infos["success"]).astype(np.bool_)
        self._succeeded_b &= ~ended_b
        ends = terminated_b, truncated_b, counted_b, final_observations, successes
        return LaneSteps(observations_b, rewards_b, *ends, self._succeeded_b.copy())

    def render(self) -> Array:
        return picture_of(self._vector)

    def close(self) -> None:
        self._vector.close()

    def _success_of(self, lane: int, final_infos: dict[str, Any]) -> bool | None:
        """Return the success of the episode that ended, None where the infos of its last step don't have it."""
        if "success" in final_infos:
            return bool(self._succeeded_b[lane] or final_infos["success"][lane])
        return bool(final_infos["is_success"][lane]) if "is_success" in final_infos else None


def spaces_of(observation_space: Any, action_space: Any) -> Spaces:
    """Convert gymnasium's spaces of an environment. Raises ConfigurationError for those that no policy is made for."""
    if (observations := _box_of(observation_space)) is None:
        raise ConfigurationError(
            f"the simulator's observation space is {observation_space}; valid: Box (gymnasium.wrappers."
            "FlattenObservation makes one of Dict and Tuple, in a function given as simulator.environment)"
        )
    actions = _box_of(action_space)
    if actions is not None and len(actions.shape) == 1 and actions.low.dtype.kind == "f":
        return Spaces(observations, actions)
    if _is_a("Discrete", action_space) and int(action_space.start) == 0:
        return Spaces(observations, Discrete(int(action_space.n)))
    raise ConfigurationError(
        f"the simulator's action space is {action_space}; valid: Box of numbers in one dimension, or Discrete from 0"
    )


def picture_of(environment: Any) -> Array:
    """Render an environment, a vector's lane 0. Raises ConfigurationError where it can't."""
    try:
        rendered = environment.render()
    except Exception as error:  # the boundary to a simulator's code
        raise ConfigurationError(f"the simulator can't render: {error_text(error)}") from error
    frame = rendered[0] if isinstance(rendered, (tuple, list)) else rendered
    if not isinstance(frame, np.ndarray):
        raise ConfigurationError(
            'the simulator renders no pictures; valid: simulator.arguments.render_mode = "rgb_array", where it has that'
        )
    return frame[0] if frame.ndim == 4 else frame


def _box_of(space: Any) -> Box | None:
    return Box(low=space.low, high=space.high) if _is_a("Box", space) else None


def _is_a(class_name: str, space: Any) -> bool:
    """Whether a space is gymnasium's or of a class with that name: gymnasium isn't imported for it."""
    return any(parent.__name__ == class_name for parent in type(space).__mro__)
