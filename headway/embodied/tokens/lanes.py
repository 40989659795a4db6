"""Lanes that are stepped by chunks of actions, an episode each until the next reset.

Shapes: b lanes of a block, d numbers of a chunk: its actions one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from headway.config.simulation import PolicyConfig, SimulatorExperiment
from headway.embodied.records import Array, Discrete, LaneSimulator, LaneSteps, Seeds, Spaces, to_host
from headway.embodied.simulators.gymnasium_lanes import SeparateLanes, VectorLanes
from headway.embodied.simulators.opening import open_simulator
from headway.embodied.tokens.codes import ActionCode
from headway.records.errors import ConfigurationError


class GroupSeeds:
    """The seeds of groups of lanes, which are those of single lanes with a group's number in the place of a lane's, and
    others after each reset."""

    def __init__(self, seeds: Seeds, group_lanes: int) -> None:
        self._seeds, self.group_lanes = seeds, group_lanes
        self.resets = 0

    def __call__(self, lane: int, episode: int) -> int:
        return self._seeds(lane // self.group_lanes, (self.resets << 20) + episode)


class ChunkedLanes:
    """A `LaneSimulator` whose step is a chunk of actions of another one's.

    A lane has one episode between two resets. It ends as the simulator ends it, or at its first success; from then on
    the lane's action is 0, or the bound that is next to it, and nothing of it counts. The reward is 1 for a success.

    Invariant: lanes of a group begin their episode alike at every reset. Where seeds belong to the constructor, twins
    begin each k-th episode alike, so that a pool whose lanes have begun different numbers of them is built again."""

    seeded_by_reset: bool

    def __init__(self, make: Callable[[], LaneSimulator], settings: PolicyConfig, groups: GroupSeeds | None) -> None:
        """``make``: builds the simulator. ``groups``: its seeds; None: each reset begins again from the same ones, in
        simulators that can. Raises ConfigurationError for spaces without a code."""
        self._make, self._groups = make, groups
        self._simulator = make()
        observations, actions = self._simulator.spaces
        self.code = ActionCode(settings, actions)
        self.spaces = Spaces(observations, self.code.chunk)
        self.lanes, self.constructions = self._simulator.lanes, self._simulator.constructions
        self.seeded_by_reset = self._simulator.seeded_by_reset
        if groups is not None and self.seeded_by_reset and not isinstance(self._simulator, SeparateLanes | VectorLanes):
            raise ConfigurationError(
                f"simulator.environment: {type(self._simulator).__name__} begins again from the same seeds at each "
                "reset; valid with [model]: an environment, a vector (num_envs), or EnvPool's"
            )
        self._settings, self._discrete = settings, isinstance(actions, Discrete)
        self._idle = np.clip(0.0, self.code.chunk.low, self.code.chunk.high).reshape(settings.chunk, -1)[0]
        self._ended_b, self._ends_b = np.zeros(self.lanes, np.bool_), np.zeros(self.lanes, np.int64)
        self._observations_b: Any = None

    def reset(self) -> Array:
        if self._groups is not None:
            self._groups.resets += 1
            if not self.seeded_by_reset and np.ptp(self._ends_b.reshape(-1, self._groups.group_lanes), axis=1).any():
                self._simulator.close()
                self._simulator = self._make()
                self.constructions += self._simulator.constructions
        self._ended_b, self._ends_b = np.zeros(self.lanes, np.bool_), np.zeros(self.lanes, np.int64)
        self._observations_b = self._simulator.reset()
        return self._observations_b

    def step(self, actions_b: Array) -> LaneSteps:
        counted_b, finals, successes = ~self._ended_b, dict[int, Array](), dict[int, bool]()
        rewards_b, (terminated_b, truncated_b) = np.zeros(self.lanes), np.zeros((2, self.lanes), np.bool_)
        chunks = to_host(actions_b).reshape(self.lanes, self._settings.chunk, -1)
        for number in np.repeat(np.arange(self._settings.chunk), self._settings.repeat).tolist():
            if self._ended_b.all():
                break
            single_b = np.where(self._ended_b[:, None], self._idle, chunks[:, number]).astype(np.float32)
            steps = self._simulator.step(np.rint(single_b[:, 0]).astype(np.int64) if self._discrete else single_b)
            live_b = ~self._ended_b & steps.counted_b
            over_b = to_host(steps.terminated_b) | to_host(steps.truncated_b)
            reached_b = np.zeros(self.lanes, np.bool_) if steps.succeeded_b is None else steps.succeeded_b
            self._ends_b += over_b
            for lane in np.flatnonzero(live_b & (over_b | reached_b)).tolist():
                terminated_b[lane] = not over_b[lane] or steps.terminated_b[lane]
                truncated_b[lane] = not terminated_b[lane]
                observation = steps.final_observations.get(lane, steps.observations_b[lane])
                finals[lane] = np.array(to_host(observation))
                success = steps.successes.get(lane) if over_b[lane] else True
                if success is not None:
                    successes[lane], rewards_b[lane] = success, float(success)
                self._ended_b[lane] = True
            self._observations_b = steps.observations_b
        return LaneSteps(self._observations_b, rewards_b, terminated_b, truncated_b, counted_b, finals, successes)

    def render(self) -> Array:
        return self._simulator.render()

    def close(self) -> None:
        self._simulator.close()


def open_lanes(experiment: SimulatorExperiment, lanes: int, seeds: Seeds, *, in_groups: bool = False) -> LaneSimulator:
    """Build the simulator of a block, as the experiment's policy steps it. ``in_groups``: its groups of lanes begin
    alike. Raises as `open_simulator`."""
    settings = experiment.simulator
    if experiment.model is None:
        return open_simulator(settings, lanes, seeds)
    groups = GroupSeeds(seeds, settings.group_lanes) if in_groups else None
    return ChunkedLanes(lambda: open_simulator(settings, lanes, groups or seeds), experiment.policy, groups)
