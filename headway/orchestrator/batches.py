"""From finished groups to what the trainer consumes."""

from __future__ import annotations

from collections.abc import Sequence

from headway.algorithms.advantages import advantages_of, resolve
from headway.records.rollout import FinishedGroup, Sample
from headway.records.training import TrainBatch


def build_batch(step: int, groups: Sequence[FinishedGroup], advantage: str) -> TrainBatch:
    """Samples of the valid members, in admission order, with advantages computed inside each group.

    Pure: a replay after a crash builds the very same batch.
    """
    rule = resolve(advantage)
    samples: list[Sample] = []
    for group in groups:
        valid = group.valid
        advantages = advantages_of(rule, [rollout.reward for rollout in valid])
        samples.extend(Sample(rollout=r, advantage=a) for r, a in zip(valid, advantages, strict=True))
    return TrainBatch(step=step, samples=tuple(samples))
