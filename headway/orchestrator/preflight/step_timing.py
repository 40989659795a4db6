"""Times training steps: real steps of the real trainer, on batches made up from responses that were seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headway.algorithms.teacher_scores import score_rows
from headway.config.schema import Experiment
from headway.control.lengths import LengthDistribution
from headway.control.summaries import quantile
from headway.records.clients import Trainer
from headway.records.generation import PromptLogprobs, VersionSpan
from headway.records.rollout import Rollout, Sample
from headway.records.tokens import TEACHER, TokenIds, TokenLogprobs, TokenMask, TokenRows
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
    rank_count = len(experiment.trainer.devices)
    full_count = experiment.queue.groups_per_step * experiment.rollout.group_size
    deadline_s = clock.now() + seconds
    times_by_count: dict[int, list[tuple[int, float]]] = {}  # samples -> (tokens, seconds) of each step
    group_size = experiment.rollout.group_size
    samples, version = min(full_count, 2 * rank_count), 0
    while True:
        batch = _batch(version, samples, experiment, seen, lengths)
        tokens = sum(sample.rollout.all_tokens for sample in batch.samples)
        started_s = clock.now()
        report = await trainer.train_step(batch)
        elapsed_s = clock.now() - started_s
        version = report.version
        times_by_count.setdefault(samples, []).append((tokens, elapsed_s))
        left_s = deadline_s - clock.now()
        if left_s < elapsed_s:
            break
        if samples < full_count and len(times_by_count[samples]) > 1:  # the first step of all pays for new memory
            samples = _larger(samples, int(samples * min(8.0, left_s / (2.0 * elapsed_s))), full_count, group_size)
    # A group's prompt is computed once: the times of partial groups don't predict those of complete ones.
    group_steps = {samples: steps for samples, steps in times_by_count.items() if samples % group_size == 0}
    return _fit(group_steps or times_by_count, version)


def _larger(count: int, affordable: int, full: int, size: int) -> int:
    """Choose the size of the next batch, more than ``count`` samples: complete groups where they are affordable. It
    isn't the full step before half of it was timed: two sizes separate fixed from growing time."""
    most_samples = full // 2 if count < size <= full // 2 else full
    chosen_count = min(affordable, most_samples)
    if max(count, chosen_count) < size:
        return min(size, max(count + 1, chosen_count))
    return max(chosen_count // size, count // size + 1) * size


def _fit(timed: dict[int, list[tuple[int, float]]], version: int) -> StepTimes:
    """Fit the times to the largest batches, and the next smaller ones for the part that doesn't grow with them. The
    first step of a size is left out where there are others: it pays for memory."""
    batch_counts = sorted(timed)
    points: list[tuple[float, float]] = []
    for batch_count in batch_counts[-2:]:
        timed_steps = timed[batch_count][1:] or timed[batch_count]
        points.append((quantile([t for t, _ in timed_steps], 0.5), quantile([s for _, s in timed_steps], 0.5)))
    tokens, step_s = points[-1]
    token_s = step_s / tokens
    if len(points) == 2 and tokens > points[0][0]:
        token_s = min(token_s, max(0.0, (step_s - points[0][1]) / (tokens - points[0][0])))
    return StepTimes(
        samples=batch_counts[-1],
        tokens_per_s=tokens / step_s,
        fixed_s=max(0.0, step_s - token_s * tokens),
        token_s=token_s,
        version=version,
    )


def _batch(
    step: int, count: int, experiment: Experiment, seen: Sequence[Rollout], lengths: LengthDistribution
) -> TrainBatch:
    """Make ``count`` samples whose lengths are evenly spread quantiles of the distribution."""
    group_size = experiment.rollout.group_size
    pool = [rollout for rollout in seen if rollout.response_ids]
    pooled_ids = TokenIds.joined(rollout.response_ids for rollout in pool).array if pool else np.ones(1, np.int32)
    samples: list[Sample] = []
    rules = experiment.rules
    for index in range(count):
        tokens = lengths.quantile((index + 0.5) / count)
        start_index = (index * 7919) % len(pooled_ids)
        response_ids = TokenIds.view(np.take(pooled_ids, np.arange(start_index, start_index + tokens), mode="wrap"))
        prompt = pool[(index // group_size) % len(pool)].prompt_ids if pool else (1,)  # a group's members share theirs
        rule = rules.used[index // group_size % len(rules.used)]
        teacher = experiment.teachers.get(rules.algorithms[rule].teacher)
        rollout = Rollout(
            group=step * count + index // group_size,
            member=index % group_size,
            prompt_ids=prompt,
            response_ids=response_ids,
            response_logprobs=TokenLogprobs.filled(_LOGPROB, tokens),
            response_mask=TokenMask.filled(True, tokens),
            versions=(VersionSpan(version=step, tokens=tokens),),
            token_rows=_made_up_scores(len(prompt), tokens, teacher.top_k or 0) if teacher and teacher.scores else {},
        )
        samples.append(Sample(rollout=rollout, advantage=1.0 if index % 2 else -1.0, rule=rule))
    return TrainBatch(step=step, samples=tuple(samples))


def _made_up_scores(prompt: int, response: int, top: int) -> dict[str, TokenRows]:
    """Rows of a teacher outside of the trainer for a sequence of ``prompt`` and ``response`` tokens."""
    tokens, ids = prompt + response, np.tile(np.arange(top, dtype=np.int32), (prompt + response, 1))
    logprobs = np.full(tokens, _LOGPROB, np.float32)
    scores = PromptLogprobs(version=0, logprobs=logprobs, top_ids=ids, top_logprobs=(-1 - ids).astype(np.float32))
    return {TEACHER: score_rows(scores, np.arange(tokens) >= prompt)}
