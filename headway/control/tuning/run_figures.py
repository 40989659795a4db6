"""Measures rates, waits, staleness, lengths and acceptance over some steps of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from headway.control.summaries import weighted_mean
from headway.records.ledger import StepRecord


class RunFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Rates, waits, staleness, length and acceptance over some steps of a run."""

    samples_per_s: float  # trained samples
    trainer_wait: float  # share of the time
    generator_wait: float  # share of the time the replicas had nothing to do
    staleness_mean: float  # of trained trajectories, versions
    length_mean: float  # response tokens of finished rollouts
    acceptance: float  # share of finished groups that entered the buffer


def figures(records: Sequence[StepRecord]) -> RunFigures | None:
    """Compute the figures of ``records``; None where no step trained."""
    steps = usable(records)
    if not steps:
        return None
    seconds, sample_count = sum(record.step_s for record in steps), sum(record.samples for record in steps)
    length_summaries = [record.lengths for record in steps if record.lengths]
    finished_groups = sum(record.flow.finished_groups for record in steps)
    return RunFigures(
        samples_per_s=sample_count / seconds,
        trainer_wait=sum(record.trainer_wait_s for record in steps) / seconds,
        generator_wait=sum(record.generator_wait_ratio * record.step_s for record in steps) / seconds,
        staleness_mean=sum(record.trajectory_staleness.mean * record.samples for record in steps) / sample_count,
        length_mean=weighted_mean(length_summaries, lambda summary: summary.mean, lambda summary: summary.responses),
        acceptance=sum(record.flow.accepted_groups for record in steps) / finished_groups if finished_groups else 1.0,
    )


def usable(records: Sequence[StepRecord]) -> list[StepRecord]:
    """Return the records with information about rates: trained, and not rebuilt after a kill."""
    return [r for r in records if not r.skipped and r.samples and r.step_s > 0 and r.flow.generator_s > 0]


def steady(records: Sequence[StepRecord], budget: int, steps: int) -> list[StepRecord]:
    """Return ``records`` without the steps in which the queue was filling or draining.

    It drains at the end of a run of ``steps``, when no further step needs groups."""
    return [record for record in usable(records) if budget < record.step < steps - budget - 1]


def rate_of(records: Sequence[StepRecord]) -> float:
    """Return the trained samples/s over these records; 0 without any."""
    return sum(record.samples for record in records) / max(1e-9, sum(record.step_s for record in records))


def relative_noise(steps: Sequence[StepRecord], rate: float) -> float:
    """Return the relative standard error of samples / seconds, as a ratio of sums over steps."""
    step_count = len(steps)
    residual_squares = sum((record.samples - rate * record.step_s) ** 2 for record in steps)
    sample_count = sum(record.samples for record in steps)
    return math.sqrt(residual_squares * step_count / max(1, step_count - 1)) / sample_count
