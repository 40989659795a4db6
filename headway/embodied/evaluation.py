"""Evaluation: episodes with fixed seeds and without noise, in simulators of their own, and a picture of one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headway.config.simulation import SimulatorConfig, SimulatorExperiment
from headway.embodied.block import seed_of
from headway.embodied.records import Array, Box, EpisodeEnd, LaneSimulator
from headway.embodied.simulators.opening import open_simulator
from headway.records.errors import ConfigurationError

MAX_STEPS = 20_000  # of an episode; a longer one is counted as failed
_HELD_OUT = 1 << 20  # the first number of evaluations' blocks, in their seeds: no run has so many
_MAX_FRAMES, _MAX_PIXELS, _FRAME_MS = 200, 200, 40  # of a video


class Evaluated(NamedTuple):
    """A worker's share of an evaluation."""

    episodes: tuple[EpisodeEnd, ...]
    unfinished: int = 0  # episodes longer than MAX_STEPS
    problem: str = ""  # why there is no video; "": there is one, or none was asked for


class Evaluator:
    """The episodes of an evaluation that one of several workers runs, in blocks of lanes with an episode each.

    A simulator that is seeded by its reset is built once, any other for each evaluation: its seeds belong to its
    constructor."""

    def __init__(self, experiment: SimulatorExperiment, rank: int, workers: int) -> None:
        self._settings = experiment.simulator
        self._seed = experiment.run.seed
        episodes, lanes = experiment.evaluation.episodes, experiment.simulator.block_lanes
        self._lanes = {  # block -> lanes of it that count
            block: min(lanes, episodes - block * lanes) for block in range(rank, -(-episodes // lanes), workers)
        }
        self._simulators: dict[int, LaneSimulator] = {}

    def run(self, policy: Any, video: str, begin_step: Callable[[], None]) -> Evaluated:
        """Run the episodes. ``video``: file for the first lane's episode; "": none. ``begin_step``: called before each
        step of a simulator."""
        episodes, unfinished, problem = list[EpisodeEnd](), 0, ""
        for block, lanes in self._lanes.items():
            frames = _Frames(video) if video and block == 0 else None
            simulator = self._simulators.pop(block, None) or self._open(block, draws=frames is not None)
            ended = _first_episodes(simulator, policy, lanes, frames, begin_step)
            if simulator.seeded_by_reset:
                self._simulators[block] = simulator
            else:
                simulator.close()
            episodes += ended
            unfinished += lanes - len(ended)
            problem = problem or (frames.save() if frames is not None else "")
        return Evaluated(tuple(episodes), unfinished, problem)

    def close(self) -> None:
        """Close the simulators."""
        for simulator in self._simulators.values():
            simulator.close()

    def _open(self, block: int, *, draws: bool) -> LaneSimulator:
        settings = self._settings
        if draws and _takes_render_mode(settings):
            arguments = {"render_mode": "rgb_array", **settings.arguments}
            settings = settings.model_copy(update={"arguments": arguments})
        return open_simulator(settings, settings.block_lanes, partial(seed_of, self._seed, _HELD_OUT + block, 0))


def _takes_render_mode(settings: SimulatorConfig) -> bool:
    """Whether the environment is gymnasium's, which draws only if it was made for it."""
    return settings.backend == "gymnasium" and ":" not in settings.environment


def _first_episodes(
    simulator: LaneSimulator, policy: Any, lanes: int, frames: _Frames | None, begin_step: Callable[[], None]
) -> list[EpisodeEnd]:
    """Run each lane to the end of its first episode, by the policy's mean or mode; returns those of the first
    ``lanes`` lanes that have ended."""
    observations_b, actions = simulator.reset(), simulator.spaces.actions
    rewards_b, steps_b = np.zeros(simulator.lanes), np.zeros(simulator.lanes, np.int64)
    ended: dict[int, EpisodeEnd] = {}
    for _ in range(MAX_STEPS):
        begin_step()
        if frames is not None and 0 not in ended:
            frames.add(simulator)
        actions_b = policy.act_greedily(observations_b)
        step = simulator.step(np.clip(actions_b, actions.low, actions.high) if isinstance(actions, Box) else actions_b)
        rewards_b += step.rewards_b
        steps_b += 1
        for lane in np.flatnonzero(step.terminated_b | step.truncated_b).tolist():
            if lane < lanes and lane not in ended:
                reward, success = float(rewards_b[lane]), step.successes.get(lane)
                ended[lane] = EpisodeEnd(lane=lane, reward=reward, steps=int(steps_b[lane]), success=success)
        if len(ended) == lanes:
            break
        observations_b = step.observations_b
    return [ended[lane] for lane in sorted(ended)]


class _Frames:
    """The frames of a video: at most some hundred small ones, at equal distances in the episode."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._pictures: list[Array] = []
        self._stride, self._steps = 1, 0
        self._problem = ""

    def add(self, simulator: LaneSimulator) -> None:
        """Add a picture of the first lane, every so many steps."""
        self._steps += 1
        if self._problem or (self._steps - 1) % self._stride:
            return
        try:
            picture = simulator.render()
        except ConfigurationError as error:
            self._problem = str(error)
            return
        scale = -(-max(picture.shape[:2]) // _MAX_PIXELS)
        self._pictures.append(np.ascontiguousarray(picture[::scale, ::scale]))
        if len(self._pictures) > _MAX_FRAMES:
            self._pictures, self._stride = self._pictures[::2], 2 * self._stride

    def save(self) -> str:
        """Write the GIF; returns why there is none, or ""."""
        if self._problem or not self._pictures:
            return self._problem
        try:
            from PIL import Image
        except ImportError:
            return "videos need the package pillow: pip install 'headway[simulators]'"
        self._path.parent.mkdir(exist_ok=True)
        first, *others = [Image.fromarray(picture) for picture in self._pictures]
        first.save(self._path, save_all=True, append_images=others, duration=_FRAME_MS * self._stride, loop=0)
        return ""
