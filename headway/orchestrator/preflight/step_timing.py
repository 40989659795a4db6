"""Times training steps: real steps of the real trainer, on batches made up from responses that were seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headway.config.schema import Experiment
from headway.control.lengths import LengthDistribution
from headway.control.summaries import quantile
from headway.records.clients import Trainer
from headway.records.generation import VersionSpan
from headway.records.rollout import Rollout, Sample
from headway.records.tokens import TokenIds, TokenLogprobs, TokenMask
from headway.records.training import TrainBatch
from headway.runtime.clock import Clock

_LOGPROB = -0.5  # of every made-up token, nats


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """A training step takes ``fixed_s`` + tokens x ``token_s``."""

    samples: int  # of the largest batch timed
    tokens_per_s: float  # of that batch, prompts and responses
    fixed_s: float
    token_s: float
    version: int  # of the trainer afterwards


async def time_steps(
    trainer: Trainer,
    experiment: Experiment,
    seen: Sequence[Rollout],
    lengths: LengthDistribution,
    clock: Clock,
    seconds: float,
) -> StepTimes:
    """Time steps of ever larger batches, up to a full one, for about ``seconds``.

    The weights change, in the trainer's memory alone. Responses of the expected lengths are put together from ``seen``
    ones; with none seen, from repeated ids.
    """
    ranks = len(experiment.trainer.devices)
    full = experiment.queue.groups_per_step * experiment.rollout.group_size
    deadline = clock.now() + seconds
    timed: dict[int, list[tuple[int, float]]] = {}  # samples -> (tokens, seconds) of each step
    size = experiment.rollout.group_size
    count, version = min(full, 2 * ranks), 0
    while True:
        batch = _batch(version, count, experiment, seen, lengths)
        tokens = sum(s.rollout.all_tokens for s in batch.samples)
        started = clock.now()
        report = await trainer.train_step(batch)
        elapsed_s = clock.now() - started
        version = report.version
        timed.setdefault(count, []).append((tokens, elapsed_s))
        left_s = deadline - clock.now()
        if left_s < elapsed_s:
            break
        if count < full and len(timed[count]) > 1:  # the first step of all pays for new memory
            count = _larger(count, int(count * min(8.0, left_s / (2.0 * elapsed_s))), full, size)
    # A group's prompt is computed once: the times of partial groups don't predict those of complete ones.
    group_steps = {count: steps for count, steps in timed.items() if count % size == 0}
    return _fit(group_steps or timed, version)


def _larger(count: int, affordable: int, full: int, size: int) -> int:
    """Choose the size of the next batch, more than ``count`` samples: complete groups where they are affordable. It
    isn't the full step before half of it was timed: two sizes separate fixed from growing time."""
    limit = full // 2 if count < size <= full // 2 else full
    chosen = min(affordable, limit)
    if max(count, chosen) < size:
        return min(size, max(count + 1, chosen))
    return max(chosen // size, count // size + 1) * size


def _fit(timed: dict[int, list[tuple[int, float]]], version: int) -> StepTimes:
    """Fit the times to the largest batches, and the next smaller ones for the part that doesn't grow with them. The
    first step of a size is left out where there are others: it pays for memory."""
    sizes = sorted(timed)
    points: list[tuple[float, float]] = []
    for size in sizes[-2:]:
        steps = timed[size][1:] or timed[size]
        points.append((quantile([t for t, _ in steps], 0.5), quantile([s for _, s in steps], 0.5)))
    tokens, step_s = points[-1]
    token_s = step_s / tokens
    if len(points) == 2 and tokens > points[0][0]:
        token_s = min(token_s, max(0.0, (step_s - points[0][1]) / (tokens - points[0][0])))
    return StepTimes(
        samples=sizes[-1],
        tokens_per_s=tokens / step_s,
        fixed_s=max(0.0, step_s - token_s * tokens),
        token_s=token_s,
        version=version,
    )


def _batch(
    step: int, count: int, experiment: Experiment, seen: Sequence[Rollout], lengths: LengthDistribution
) -> TrainBatch:
    """Make ``count`` samples whose lengths are evenly spread quantiles of the distribution."""
    size = experiment.rollout.group_size
    pool = [rollout for rollout in seen if rollout.response_ids]
    ids = TokenIds.joined(rollout.response_ids for rollout in pool).array if pool else np.ones(1, np.int32)
    samples: list[Sample] = []
    for index in range(count):
        tokens = lengths.quantile((index + 0.5) / count)
        start = (index * 7919) % len(ids)
        response = TokenIds.view(np.take(ids, np.arange(start, start + tokens), mode="wrap"))
        prompt = pool[(index // size) % len(pool)].prompt_ids if pool else (1,)  # a group's members share theirs
        rollout = Rollout(
            group=step * count + index // size,
            member=index % size,
            prompt_ids=prompt,
            response_ids=response,
            response_logprobs=TokenLogprobs.filled(_LOGPROB, tokens),
            response_mask=TokenMask.filled(True, tokens),
            versions=(VersionSpan(version=step, tokens=tokens),),
        )
        samples.append(Sample(rollout=rollout, advantage=1.0 if index % 2 else -1.0))
    return TrainBatch(step=step, samples=tuple(samples))
