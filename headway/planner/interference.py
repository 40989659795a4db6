"""Interference of generator and trainer on one machine, estimated from two runs in which they overlap differently.

In a run's steady state the overlap is about equal in all steps, so one run doesn't identify the rates of generator and
trainer alone: they are used as measured. A second run of the same load on the same machine, say a synchronous one
beside an asynchronous one, identifies them. Work that takes the time T, while the other computes during a share o of
it, takes T (1 - o (1 - 1 / beside)) alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headway.control.tuning.ledger_model import Line, decode_line, training_line, training_s
from headway.records.errors import ConfigurationError
from headway.records.ledger import StepRecord

LEAST_DIFFERENCE = 0.25  # between the overlaps of the two runs
_MAX_SLOWDOWN = 10.0


class PhaseOverlap(msgspec.Struct, frozen=True, kw_only=True):
    """Overlap of generator and trainer over some steps of a run, as shares of time (0 to 1)."""

    of_generator: float  # share of the generator's compute time in which the trainer computed too
    of_trainer: float  # share of the trainer's compute time in which the generator computed too


class InterferenceCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of generator and trainer alone, and the factor (1 or more) by which they slow down while both compute."""

    decode: Line  # seconds of a decode step over a replica's requests, the engine's work between steps included
    train: Line  # seconds of a training step over its tokens
    generator_beside: float = 1.0
    trainer_beside: float = 1.0
    unknown: tuple[str, ...] = ()  # of both, those whose overlap is about equal in both runs: as measured, factor 1


def costs(steps: Sequence[StepRecord], replicas: int, even: float) -> InterferenceCosts:
    """Costs as measured in ``steps``, interference included. ``even``: as in ``decode_line``."""
    decode, busy_s = decode_line(steps, even)[0], sum(step.flow.generator_busy_s for step in steps)
    slowdown = _at_work_s(steps, replicas) / busy_s if busy_s else 1.0
    return InterferenceCosts(decode=_times(decode, slowdown), train=training_line(steps))


def separated_costs(
    steps: Sequence[StepRecord], others: Sequence[StepRecord], replicas: int, even: float
) -> InterferenceCosts:
    """Costs in the run of ``steps``, with interference separated by means of the run of ``others``, whose generator has
    as many replicas. Growth of costs with load is taken from the run with less overlap. Raises ConfigurationError where
    both overlap about equally."""
    overlap_a, overlap_b = overlap(steps), overlap(others)
    identifiable = {
        "the generator": abs(overlap_a.of_generator - overlap_b.of_generator) >= LEAST_DIFFERENCE,
        "the trainer": abs(overlap_a.of_trainer - overlap_b.of_trainer) >= LEAST_DIFFERENCE,
    }
    if not any(identifiable.values()):
        raise ConfigurationError(
            f"the generator computes for {overlap_a.of_trainer:.0%} of the trainer's time in one run and for "
            f"{overlap_b.of_trainer:.0%} in the other: estimating interference takes two runs that differ by at least "
            f"{LEAST_DIFFERENCE:.0%}, say one with queue.budget = 0"
        )
    alone_costs = costs(steps if overlap_a.of_trainer < overlap_b.of_trainer else others, replicas, even)
    decode, train = alone_costs.decode, alone_costs.train

    def decoding(run: Sequence[StepRecord]) -> float:
        return _at_work_s(run, replicas) / max(1e-9, _expected_decode_s(run, decode))

    def training(run: Sequence[StepRecord]) -> float:
        return sum(map(training_s, run)) / max(1e-9, _expected_training_s(run, train))

    generator_factors = _separate(decoding(steps), decoding(others), overlap_a.of_generator, overlap_b.of_generator)
    trainer_factors = _separate(training(steps), training(others), overlap_a.of_trainer, overlap_b.of_trainer)
    return InterferenceCosts(
        decode=_times(decode, generator_factors[0]),
        train=_times(train, trainer_factors[0]),
        generator_beside=generator_factors[1],
        trainer_beside=trainer_factors[1],
        unknown=tuple(side for side, is_known in identifiable.items() if not is_known),
    )


def overlap(steps: Sequence[StepRecord]) -> PhaseOverlap:
    """Overlap estimated from the waits: where neither waits, both compute. They seldom wait at the same time."""
    seconds = sum(r.step_s for r in steps)
    trainer_share = sum(r.step_s - r.trainer_wait_s - r.flow.update_wait_s for r in steps) / seconds
    generator = sum(r.step_s * (1.0 - r.generator_wait_ratio - r.generator_yielded_ratio) for r in steps) / seconds
    both_share = max(0.0, trainer_share + generator - 1.0)
    return PhaseOverlap(
        of_generator=min(1.0, both_share / generator) if generator > 0 else 0.0,
        of_trainer=min(1.0, both_share / trainer_share) if trainer_share > 0 else 0.0,
    )


def _at_work_s(steps: Sequence[StepRecord], replicas: int) -> float:
    """Seconds in which replicas had work and could compute: neither yielded nor paused by an update."""
    unyielded_s = sum(r.flow.generator_s * (1.0 - r.generator_wait_ratio - r.generator_yielded_ratio) for r in steps)
    busy_s = sum(r.flow.generator_busy_s for r in steps)
    return max(busy_s, unyielded_s - replicas * sum(r.apply_pause_s for r in steps))


def _expected_decode_s(steps: Sequence[StepRecord], line: Line) -> float:
    return sum(line.fixed * step.flow.decode_steps + line.slope * step.flow.generated_tokens for step in steps)


def _expected_training_s(steps: Sequence[StepRecord], line: Line) -> float:
    return sum(line.fixed + line.slope * step.flow.trained_tokens for step in steps)


def _separate(here: float, there: float, overlap_here: float, overlap_there: float) -> tuple[float, float]:
    """Return (time alone, slowdown beside the other) of generator or trainer, which took ``here`` and ``there`` times
    as long as expected at those overlaps, such that its time alone is equal in both. Where the overlaps hardly differ,
    noise would look like an effect: then return (``here``, 1)."""
    if abs(overlap_here - overlap_there) < LEAST_DIFFERENCE:
        return here, 1.0
    overlap_difference = here * overlap_here - there * overlap_there
    share = (here - there) / overlap_difference if overlap_difference else 0.0
    share = min(1.0 - 1.0 / _MAX_SLOWDOWN, max(0.0, share))  # 0: the run in which they met more wasn't slower
    return here * (1.0 - share * overlap_here), 1.0 / (1.0 - share)


def _times(line: Line, factor: float) -> Line:
    return msgspec.structs.replace(line, fixed=line.fixed * factor, slope=line.slope * factor)
