"""The two stages of a run in simulators: `Simulate`, where blocks are stepped by the policy, and `Learn`."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from headway.config.simulation import SimulatorExperiment
from headway.embodied.block import LaneBlock, seed_of
from headway.embodied.evaluation import Evaluator
from headway.embodied.policies import open_policy
from headway.embodied.records import EpisodeEnd, Fragment, PolicyWeights, Spaces
from headway.embodied.tokens.lanes import open_lanes
from headway.flow.channel import Channel
from headway.flow.worker import Worker
from headway.runtime.devices import resident_bytes


class LearnReport(NamedTuple):
    """The learner's report of a training step, for the driver, which sees no fragment."""

    metrics: dict[str, float]
    versions: tuple[int, ...]  # of the fragments, by block
    episodes: tuple[EpisodeEnd, ...]  # that ended in them
    lives: tuple[int, ...]  # of the blocks
    compute_s: float
    counts: dict[str, float]  # some of `EpisodeStatistics`, by their names
    weights: PolicyWeights  # of the next version


class Simulate(Worker):
    """Steps its blocks (those with number modulo workers = rank) with a policy that acts in this process.

    A successor builds the blocks again: ``lives``, a folder of the run, counts how often each was built."""

    stateless = True

    def __init__(self, experiment: SimulatorExperiment, lives: str, first_lives: Sequence[int]) -> None:
        """``first_lives``: of each block, at the session's first construction. Raises ConfigurationError."""
        settings, seed = experiment.simulator, experiment.run.seed
        self._idle_bytes, self._watchdog = resident_bytes(), self.limited(settings.step_timeout_s)
        self._evaluator = Evaluator(experiment, self.rank, self.world_size)
        self._blocks: list[LaneBlock] = []
        options: dict[str, Any] = {"seed": seed, "steps": settings.steps_per_fragment, "watchdog": self._watchdog}
        options["episodic"] = experiment.model is not None
        for number in range(self.rank, settings.blocks, self.world_size):
            life = _next_life(Path(lives), number, first_lives[number])
            seeds = partial(seed_of, seed, number, life)
            simulator = open_lanes(experiment, settings.block_lanes, seeds, in_groups=True)
            if not self._blocks:
                self._spaces = simulator.spaces
                self._policy = open_policy(experiment, simulator, self.context)
            block = LaneBlock(simulator, self._policy, self._spaces, number=number, life=life, **options)
            self._blocks.append(block)

    def spaces(self) -> tuple[Spaces, int, int]:
        """The spaces of a lane; the resident bytes of this process before its blocks were built, and now."""
        return self._spaces, self._idle_bytes, resident_bytes()

    async def collect(self, weights: PolicyWeights, number: int, blocks: Channel, fragments: Channel) -> None:
        """Make fragment ``number`` of each block whose number comes, with these weights, and put it."""
        self._policy.load(weights)
        async for block_number in blocks:
            block = self._blocks[block_number // self.world_size]
            block.fragments = number  # a successor continues those of the dead worker
            async with self.turn():
                fragment = block.collect(weights.version)
            await fragments.put(fragment)

    def evaluate(self, weights: PolicyWeights, video: str) -> tuple[list[EpisodeEnd], str]:
        """Run this worker's share of an evaluation's episodes, in simulators of their own. ``video``: a file; ""."""
        self._policy.load(weights)
        return self._evaluator.run(self._policy, video, self._watchdog)

    def close(self) -> None:
        """Close the simulators."""
        for block in self._blocks:
            block.close()
        self._evaluator.close()


class Learn(Worker):
    """Trains the policy on the fragments of one round a step, in the order of the blocks.

    The state behind each step is a folder of ``states``, which no other process writes: a successor takes up the one
    of the version that a call names, whether the dead worker had replied or not."""

    stateless = True

    def __init__(self, experiment: SimulatorExperiment, spaces: Spaces, states: str, checkpoint: str) -> None:
        """``checkpoint``: folder to resume from; "": none."""
        if experiment.model is None:
            from headway.embodied.learner import FragmentLearner

            self._learner = FragmentLearner(experiment, spaces, self.device)
        else:
            from headway.embodied.tokens.learner import TokenLearner

            self._learner = TokenLearner(experiment, spaces, self.context)
        self._states = Path(states)
        if checkpoint and Path(checkpoint).is_dir():  # it may be gone when a successor starts
            self._learner.read(Path(checkpoint))

    def weights(self) -> PolicyWeights:
        """The present weights, with their version."""
        return self._learner.weights()

    async def step(self, version: int, blocks: int, fragments: Channel) -> LearnReport:
        """Train version ``version`` on one fragment of each block."""
        taken: list[Fragment] = []
        async for chunk in fragments.chunks(order=lambda fragment: fragment.block):
            taken += chunk
        if len(taken) != blocks:
            raise RuntimeError(f"step {version}: {len(taken)} fragments of {blocks} blocks came")
        async with self.turn():
            computing_s = time.monotonic()
            self._take_up(version)
            metrics = self._learner.step(taken)
            if self._learner.version != version:  # the step wasn't skipped
                self._keep_state()
            weights = self._learner.weights()
            ended_s = time.monotonic()
        return LearnReport(
            metrics=metrics,
            versions=tuple(fragment.version for fragment in taken),
            episodes=tuple(episode for fragment in taken for episode in fragment.episodes),
            lives=tuple(fragment.life for fragment in taken),
            compute_s=ended_s - computing_s,
            counts={
                "transitions": sum(fragment.transitions for fragment in taken),
                "simulate_s": sum(fragment.seconds for fragment in taken),
                "worker_bytes": max(fragment.worker_bytes for fragment in taken),
                "learner_bytes": resident_bytes(),
                "constructions": sum(fragment.constructions for fragment in taken),
                "rebuilt": sum(fragment.life for fragment in taken),
            },
            weights=weights,
        )

    def save(self, version: int, folder: str) -> None:
        """Write all that a resumed run needs of the learner of this version into ``folder``."""
        self._take_up(version)
        self._learner.write(Path(folder))

    def close(self) -> None:
        """Remove the weights that were published."""
        self._learner.close()

    def _take_up(self, version: int) -> None:
        """Restore the state of this version, unless it is the present one."""
        if self._learner.version != version:
            self._learner.read(self._states / str(version))

    def _keep_state(self) -> None:
        """Write the present state beside the last one, from which the step would be repeated if its reply were lost."""
        version = self._learner.version
        self._learner.write(self._states / str(version))
        shutil.rmtree(self._states / str(version - 2), ignore_errors=True)


def _next_life(folder: Path, block: int, first_life: int) -> int:
    """Count one more construction of a block, also for the case that this process dies while it builds."""
    folder.mkdir(parents=True, exist_ok=True)
    life = next(life for life in itertools.count(first_life) if not (folder / f"{block}.{life}").exists())
    (folder / f"{block}.{life}").touch()
    return life
