"""Evaluation: episodes with fixed seeds in simulators of their own, and a picture of one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from headway.config.simulation import SimulatorExperiment
from headway.embodied.block import LaneBlock, seed_of
from headway.embodied.policies import EvaluatedPolicy
from headway.embodied.records import Array, EpisodeEnd, LaneSimulator
from headway.embodied.tokens.lanes import open_lanes
from headway.records.errors import ConfigurationError
from headway.runtime.hooks import error_text
from headway.runtime.imports import import_extra
from headway.runtime.stalls.watchdog import Watchdog

MAX_STEPS = 20_000  # of an episode; a longer one is counted as failed
_HELD_OUT = 1 << 20  # the first number of evaluations' blocks, in their seeds: no run has so many
_MAX_FRAMES, _MAX_PIXELS, _FRAME_MS = 200, 200, 40  # of a video


class Evaluator:
    """The episodes of an evaluation that one of several workers runs, in blocks of lanes with an episode each.

    A simulator that is seeded by its reset is built once, any other for each evaluation: its seeds belong to its
    constructor."""

    def __init__(self, experiment: SimulatorExperiment, rank: int, workers: int) -> None:
        self._experiment, self._settings = experiment, experiment.simulator
        self._seed = experiment.run.seed
        episodes, lanes = experiment.evaluation.episodes, experiment.simulator.block_lanes
        self._lanes = {  # block -> lanes of it that count
            block: min(lanes, episodes - block * lanes) for block in range(rank, -(-episodes // lanes), workers)
        }
        self._simulators: dict[int, LaneSimulator] = {}

    def run(self, policy: EvaluatedPolicy, video: str, watchdog: Watchdog) -> tuple[list[EpisodeEnd], str]:
        """Run the episodes, to at most `MAX_STEPS`. ``video``: file for the first lane's; "": none. Returns those that
        have ended, and why there is no video where one was asked for."""
        episodes, problem, steps = list[EpisodeEnd](), "", self._settings.steps_per_fragment
        for block, lanes in self._lanes.items():
            frames = _Frames(video) if video and block == 0 else None
            simulator = self._simulators.pop(block, None) or self._open(block, draws=frames is not None)
            acting = _Evaluated(policy, simulator, frames)
            options: dict[str, Any] = {"seed": self._seed, "number": _HELD_OUT + block, "steps": steps}
            lane_block = LaneBlock(simulator, acting, simulator.spaces, watchdog=watchdog, **options)
            ended = dict[int, EpisodeEnd]()  # by lane, its first episode
            for _ in range(-(-MAX_STEPS // steps)):
                for episode in lane_block.collect(0).episodes:
                    ended.setdefault(episode.lane, episode)
                if len(ended) == simulator.lanes:
                    break
            if simulator.seeded_by_reset:
                self._simulators[block] = simulator
            else:
                simulator.close()
            episodes += [ended[lane] for lane in range(lanes) if lane in ended]
            if frames is not None:
                problem = frames.save(ended[0].steps if 0 in ended else MAX_STEPS)
        return episodes, problem

    def close(self) -> None:
        """Close the simulators."""
        for simulator in self._simulators.values():
            simulator.close()

    def _open(self, block: int, *, draws: bool) -> LaneSimulator:
        experiment, settings = self._experiment, self._settings
        # Gymnasium's environments draw only if they were made for it.
        if draws and settings.backend == "gymnasium" and ":" not in settings.environment:
            arguments = {"render_mode": "rgb_array", **settings.arguments}
            settings = settings.model_copy(update={"arguments": arguments})
            experiment = experiment.model_copy(update={"simulator": settings})
        return open_lanes(experiment, settings.block_lanes, partial(seed_of, self._seed, _HELD_OUT + block, 0))


class _Evaluated:
    """The policy as evaluations see it; ``frames`` get a picture of the first lane before each step."""

    def __init__(self, policy: EvaluatedPolicy, simulator: LaneSimulator, frames: _Frames | None) -> None:
        self._policy, self._simulator, self._frames = policy, simulator, frames

    def act(self, observations_b: Any, noise_b: Array) -> tuple[Any, Any, Any]:
        if self._frames is not None:
            self._frames.add(self._simulator)
        zeros_b = np.zeros(len(noise_b), np.float32)
        return self._policy.act_in_evaluation(observations_b, noise_b), zeros_b, zeros_b

    def take_tokens(self) -> None:
        """Return None: evaluations aren't trained on."""


class _Frames:
    """The frames of a video: the first ones of an episode, small."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._pictures: list[Any] = []  # of PIL
        self._problem = ""

    def add(self, simulator: LaneSimulator) -> None:
        """Add a picture of the first lane, unless there are enough."""
        if self._problem or len(self._pictures) == _MAX_FRAMES:
            return
        try:
            picture = simulator.render()
            scale = -(-max(picture.shape[:2]) // _MAX_PIXELS)
            small_picture = np.ascontiguousarray(picture[::scale, ::scale])
            image_module = import_extra("PIL.Image", "simulators", "evaluation.video = true")
            self._pictures.append(image_module.fromarray(small_picture))
        except Exception as error:  # the boundary to a simulator's code
            self._problem = str(error) if isinstance(error, ConfigurationError) else f"no picture: {error_text(error)}"

    def save(self, steps: int) -> str:
        """Write the GIF of the first ``steps`` steps; returns why there is none, or ""."""
        if self._problem:
            return self._problem
        self._path.parent.mkdir(exist_ok=True)
        first, *others = self._pictures[:steps]
        first.save(self._path, save_all=True, append_images=others, duration=_FRAME_MS, loop=0)
        return ""
