"""What generator and trainer cost each other on one machine, out of two runs in which they met more and less.

In one run in steady state they meet about equally in all of its steps, and how slow each is alone is not to be seen: its
rates are taken as they were. A second run of the same load on the same machine, say a synchronous one beside an
asynchronous one, tells them apart: where one side computes for a share o of the other's time, the other takes
1 + (beside - 1) o times as long.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headway.control.ledger_model import Line, training_s
from headway.records.errors import ConfigurationError
from headway.records.ledger import StepRecord

LEAST_DIFFERENCE = 0.25  # of the overlap in the two runs
_MOST = 10.0


class Overlap(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the time, 0 to 1, of some steps of a run."""

    of_generator: float  # of the time it computed: the trainer did so too
    of_trainer: float  # of the time it didn't wait: the generator computed


class Interference(msgspec.Struct, frozen=True, kw_only=True):
    """Factors of time, 1 or more, while the other side computes."""

    generator: float = 1.0
    trainer: float = 1.0


def overlap(steps: Sequence[StepRecord]) -> Overlap:
    """From the waits: where neither side waits, both compute. A side seldom waits while the other does."""
    seconds = sum(r.step_s for r in steps)
    trainer = sum(r.step_s - r.trainer_wait_s - r.flow.update_wait_s for r in steps) / seconds
    generator = sum(r.step_s * (1.0 - r.generator_wait_ratio - r.generator_lent_ratio) for r in steps) / seconds
    both = max(0.0, trainer + generator - 1.0)
    return Overlap(
        of_generator=min(1.0, both / generator) if generator > 0 else 0.0,
        of_trainer=min(1.0, both / trainer) if trainer > 0 else 0.0,
    )


def decode_seconds(steps: Sequence[StepRecord], replicas: int) -> tuple[float, float]:
    """(requests of a replica, seconds of its decode step with what the engine does between two of them), means."""
    decode_steps = sum(r.flow.decode_steps for r in steps)
    if not decode_steps:
        return 0.0, 0.0
    return sum(r.flow.generated_tokens for r in steps) / decode_steps, at_work_s(steps, replicas) / decode_steps


def at_work_s(steps: Sequence[StepRecord], replicas: int) -> float:
    """Seconds in which replicas had something to do and could: neither lent nor standing still for an update."""
    seconds = sum(r.flow.generator_s * (1.0 - r.generator_wait_ratio - r.generator_lent_ratio) for r in steps)
    busy = sum(r.flow.generator_busy_s for r in steps)
    return max(busy, seconds - replicas * sum(r.apply_pause_s for r in steps))


def interference(
    steps: Sequence[StepRecord], others: Sequence[StepRecord], decode: Line, train: Line, replicas: int
) -> Interference:
    """From two runs. ``decode``, ``train``: how the times of the first grow with requests and tokens, which the other
    may have had more or less of. Raises ConfigurationError where the sides met about equally in both."""
    here, there = overlap(steps), overlap(others)
    requests, other_requests = decode_seconds(steps, replicas), decode_seconds(others, replicas)
    tokens = sum(r.flow.trained_tokens for r in steps) / len(steps)
    other_tokens = sum(r.flow.trained_tokens for r in others) / len(others)
    if abs(here.of_trainer - there.of_trainer) < LEAST_DIFFERENCE:
        raise ConfigurationError(
            f"the generator computes for {here.of_trainer:.0%} of the trainer's time in one run and for "
            f"{there.of_trainer:.0%} in the other: what they cost each other is seen in two runs that differ by at "
            f"least {LEAST_DIFFERENCE:.0%}, say one with queue.budget = 0"
        )
    generator = trainer = 1.0
    if requests[1] and other_requests[1]:
        expected = _at(decode, requests[0]) / _at(decode, other_requests[0])
        ratio = requests[1] / other_requests[1] / expected
        generator = _factor(ratio, here.of_generator, there.of_generator)
    train_s, other_s = sum(map(training_s, steps)) / len(steps), sum(map(training_s, others)) / len(others)
    if train_s and other_s:
        ratio = train_s / other_s / (_at(train, tokens) / _at(train, other_tokens))
        trainer = _factor(ratio, here.of_trainer, there.of_trainer)
    return Interference(generator=generator, trainer=trainer)


def alone(line: Line, factor: float, share: float) -> Line:
    """``line`` without what the other side cost, which computed for ``share`` of the time."""
    slower = 1.0 + (factor - 1.0) * share
    return msgspec.structs.replace(line, fixed=line.fixed / slower, slope=line.slope / slower)


def _at(line: Line, load: float) -> float:
    return max(1e-12, line.fixed + line.slope * load)


def _factor(ratio: float, here: float, there: float) -> float:
    """The factor with which (1 + (factor - 1) here) / (1 + (factor - 1) there) = ratio."""
    below = here - ratio * there
    if below * (ratio - 1.0) <= 0:
        return 1.0  # the side that met the other more wasn't slower
    return min(_MOST, 1.0 + (ratio - 1.0) / below)
