"""The learner of a token policy: GRPO over the episodes of groups of lanes, by the trainer of language models.

Shapes: t decisions of an episode, b lanes of a block, s episodes of a round.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headway.algorithms.advantages import resolve
from headway.algorithms.groups.outcome import is_zero_variance
from headway.algorithms.samples import lay_out
from headway.config.simulation import SimulatorExperiment
from headway.embodied.records import Box, Fragment, PolicyWeights, Spaces
from headway.embodied.tokens.sections import token_sections
from headway.records.errors import ConfigurationError
from headway.records.generation import PublishedWeights, VersionSpan
from headway.records.rollout import Rollout, Sample
from headway.records.tokens import TokenIds, TokenLogprobs, TokenMask
from headway.records.training import TrainBatch
from headway.runtime.scratch import remove_unlocked
from headway.trainer.service import TrainerService
from headway.weights.slots import SHARED_MEMORY

_FOLDER = "trainer"  # of a state


class TokenLearner:
    """The model, its optimiser and its version, of which each `step` makes another one, with methods as those of
    `FragmentLearner`.

    The reward of an episode is its success, its advantage that among the episodes of its group. Groups of equal
    success are filtered; a round of such groups alone makes a version with the same weights. Without groups a critic's
    values are compared with it, over the tokens of an episode's decisions one after another."""

    def __init__(self, experiment: SimulatorExperiment, spaces: Spaces, context: Any) -> None:
        """``context``: the worker's. Raises ConfigurationError for a folder that isn't a model."""
        assert isinstance(spaces.actions, Box), "the chunks of `ChunkedLanes`"
        sections = token_sections(experiment, spaces.actions.low.size)
        run_id = f"{Path(experiment.run.directory).name}-{os.getpid()}"  # a successor's slots are others
        self._service = TrainerService(context, experiment=sections, run_id=run_id)
        self._group_lanes = experiment.simulator.group_lanes
        self._advantages = resolve(sections.algorithm.advantage)
        self._has_critic = self._service.policy.critic is not None
        self._published: PublishedWeights | None = None

    @property
    def version(self) -> int:
        """The number of completed steps."""
        return self._service.version

    def step(self, fragments: Sequence[Fragment]) -> dict[str, float]:
        """Train on a fragment of each block, by block number; returns the step's metrics. Raises ConfigurationError for
        simulators that don't tell success."""
        successes_s = np.concatenate([_successes(fragment) for fragment in fragments])
        groups_s = np.arange(len(successes_s)) // self._group_lanes
        advantages_s = self._advantages(successes_s, groups_s)
        members = successes_s.reshape(-1, self._group_lanes)
        trains_s = np.ones(len(groups_s), np.bool_)
        if not self._has_critic:
            trains_s = np.repeat([not is_zero_variance(group.tolist()) for group in members], self._group_lanes)
        samples = [
            sample
            for index, fragment in enumerate(fragments)
            for sample in self._samples(fragment, index * fragment.rewards_tb.shape[1], advantages_s, trains_s)
        ]
        filtered = {
            "groups": float(len(members)),
            "filtered_groups": float(len(members) - trains_s.sum() / self._group_lanes),
            "success": float(successes_s.mean()),
        }
        if not samples:
            self._service.version += 1
            return filtered
        report = self._service.train_step(lay_out(TrainBatch(step=self.version, samples=tuple(samples))))
        return {**report.metrics, **filtered, "loss_tokens": float(report.loss_tokens)}

    def _samples(
        self, fragment: Fragment, first: int, advantages_s: np.ndarray, trains_s: np.ndarray
    ) -> Iterator[Sample]:
        """The decisions of the episodes that are trained on, one after another by lane. ``first``: number of the first
        lane's episode."""
        tokens = fragment.tokens
        assert tokens is not None, "a token policy made it"
        starts_k = np.concatenate([[0], np.cumsum(tokens.prompts_k + tokens.responses_k)]).tolist()
        logprob_starts_k = np.concatenate([[0], np.cumsum(tokens.responses_k)]).tolist()
        steps, lanes = fragment.counted_tb.shape
        for lane in np.flatnonzero(trains_s[first : first + lanes]).tolist():
            for t in range(steps):
                if not fragment.counted_tb[t, lane]:
                    break
                k = t * lanes + lane
                behind_prompt = starts_k[k] + int(tokens.prompts_k[k])
                response, count = tokens.ids_n[behind_prompt : starts_k[k + 1]], int(tokens.responses_k[k])
                rollout = Rollout(
                    group=first + lane,
                    member=t,
                    prompt_ids=TokenIds(tokens.ids_n[starts_k[k] : behind_prompt]),
                    response_ids=TokenIds(response),
                    response_logprobs=TokenLogprobs(tokens.logprobs_r[logprob_starts_k[k] : logprob_starts_k[k + 1]]),
                    response_mask=TokenMask.filled(True, count),
                    versions=(VersionSpan(version=fragment.version, tokens=count),),
                    grammars={tokens.grammar: ((0, count),)},
                )
                rewards = (float(fragment.rewards_tb[t, lane]),) if self._has_critic else ()
                yield Sample(rollout=rollout, advantage=float(advantages_s[first + lane]), rewards=rewards)

    def weights(self) -> PolicyWeights:
        """The present weights, published once, with their version."""
        if self._published is None or self._published.version != self.version:
            self._published = self._service.publish(self.version)
        return PolicyWeights(self.version, np.empty(0, np.float32), np.zeros(()), np.ones(()), self._published)

    def write(self, folder: Path) -> None:
        """Write the state into ``folder``, where it is once it is whole. Raises StorageFailed."""
        folder.mkdir(parents=True, exist_ok=True)
        self._service.save_checkpoint(str(folder / _FOLDER), {})

    def read(self, folder: Path) -> None:
        """Go on from what ``write`` wrote. Raises CheckpointCorrupt."""
        self._service.load_checkpoint(str(folder / _FOLDER))

    def close(self) -> None:
        """Remove the published weights, those of learners that were killed too."""
        self._service.close()
        remove_unlocked(SHARED_MEMORY, "headway-*-*.weights")


def _successes(fragment: Fragment) -> np.ndarray:
    """The successes of a fragment's episodes, by lane: 1.0 or 0.0."""
    success_by_lane = {end.lane: end.success for end in fragment.episodes}
    successes = [success_by_lane[lane] for lane in sorted(success_by_lane)]
    if None in successes:
        raise ConfigurationError(
            'the simulator tells no success of its episodes; valid with [model]: one whose info has "success" or '
            '"is_success"'
        )
    return np.array(successes, np.float64)
