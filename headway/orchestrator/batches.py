"""From finished groups to what the trainer consumes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from headway.algorithms.advantages import resolve
from headway.algorithms.rewards import overlong_penalty
from headway.config.schema import Experiment
from headway.records.rollout import FinishedGroup, Rollout, Sample
from headway.records.training import TrainBatch


def build_batch(step: int, groups: Sequence[FinishedGroup], experiment: Experiment) -> TrainBatch:
    """Samples of the valid members, in admission order, with their advantages.

    Responses cut at the length limit are scored as they are, masked (they count for their group's advantages and
    carry no loss) or penalised, as ``algorithm.overlong`` says. Pure: a replay after a crash builds the very same
    batch.
    """
    overlong = experiment.algorithm.overlong
    rollouts = [rollout for group in groups for rollout in group.valid]
    groups_s = np.array([rollout.group for rollout in rollouts], dtype=np.int64)
    rewards_s = np.array([shaped_reward(rollout, experiment) for rollout in rollouts], dtype=np.float64)
    advantages_s = resolve(experiment.algorithm.advantage)(rewards_s, groups_s)
    samples = [
        Sample(rollout=_unlearnt(r) if overlong == "mask" and r.truncated else r, advantage=float(a))
        for r, a in zip(rollouts, advantages_s, strict=True)
    ]
    return TrainBatch(step=step, samples=tuple(samples))


def shaped_reward(rollout: Rollout, experiment: Experiment) -> float:
    """The verifier's reward, less what the response's length costs."""
    algorithm, limit = experiment.algorithm, experiment.rollout.max_response_tokens
    if algorithm.overlong != "penalty":
        return rollout.reward
    buffer = algorithm.overlong_buffer_tokens or max(1, limit // 5)
    return rollout.reward + algorithm.overlong_penalty * overlong_penalty(len(rollout.response_ids), limit, buffer)


def _unlearnt(rollout: Rollout) -> Rollout:
    return msgspec.structs.replace(rollout, response_mask=(False,) * len(rollout.response_ids))
