"""Classifies a run's bottleneck by its waits, for report, live view, watch page, doctor and forecast."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Literal

import msgspec

from headway.control.summaries import weighted_mean
from headway.records.ledger import StepRecord

Balance = Literal[
    "matched",
    "generation-bound",
    "training-bound",
    "synchronous",
    "time-shared",
    "teacher-bound",
    "environment-bound",
    "other-bound",
    "unknown",
]

BUSY = 0.10  # a side that waits less is busy
IDLE = 0.20  # a side that waits more isn't what the other waits for
CLEAR_DIFFERENCE = 0.10  # of the two waits, above which one side is the bottleneck
TEACHING_SHARE = 0.80  # of the time in which teachers score some group, above which they bind likewise
ENVIRONMENT_SHARE = 0.40  # of the rollouts' time in their environments, above which they bind where both sides are idle


class WaitShares(msgspec.Struct, frozen=True, kw_only=True):
    """Shares, 0 to 1, from which a run's bottleneck follows: of its time, and ``environment`` of its rollouts' time."""

    trainer: float  # the trainer waits
    generator: float  # the generator has nothing to do
    yielded: float = 0.0  # the trainer computes on the generator's devices
    environment: float = 0.0  # of the rollouts' time: in their environments, tools and sandboxes
    teaching: float = 0.0  # teachers score some group


def between_turns(records: Sequence[StepRecord]) -> float:
    """Return the share of the rollouts' time, from admission to the last token, between turns, without a slot."""
    return sum(r.flow.environment_s for r in records) / max(1e-9, sum(r.flow.generating_s for r in records))


def environment_share(records: Sequence[StepRecord]) -> float:
    """Return the share of the rollouts' time in their environments, tools and sandboxes.

    It is `between_turns` without the transfers there and back, which dominate where an environment is instant."""
    hops_s = sum(record.flow.environment_hop_s for record in records)
    return between_turns(records) - hops_s / max(1e-9, sum(record.flow.generating_s for record in records))


def teaching_share(records: Sequence[StepRecord]) -> float:
    """Return the share of the steps' time in which teachers outside of the trainer scored some group."""
    busy_s = sum(record.teaching.busy_s for record in records if record.teaching is not None)
    return min(1.0, busy_s / max(1e-9, sum(record.step_s for record in records)))


def waits_of(steps: Sequence[StepRecord]) -> WaitShares:
    """Average the waits over ``steps``, each step weighted by its time."""
    return WaitShares(
        trainer=weighted_mean(steps, attrgetter("trainer_wait_ratio"), attrgetter("step_s")),
        generator=weighted_mean(steps, attrgetter("generator_wait_ratio"), attrgetter("step_s")),
        yielded=weighted_mean(steps, attrgetter("generator_yielded_ratio"), attrgetter("step_s")),
        environment=environment_share(steps),
        teaching=teaching_share(steps),
    )


def balance_of(waits: WaitShares, budget: int | None) -> Balance:
    """Name the bottleneck of a run with these waits and staleness ``budget`` (None: not known).

    The rules, in order: shared devices -> time-shared (the trainer waits while they generate); budget 0 -> synchronous
    (both sides wait by design); both sides wait more than IDLE -> neither binds: teacher-bound where teachers score for
    more than TEACHING_SHARE of the time, else environment-bound where rollouts spend more than ENVIRONMENT_SHARE of
    their time there, else other-bound; one waits CLEAR_DIFFERENCE more -> the other side binds; both wait less than
    IDLE -> matched; else other-bound.
    """
    smaller_wait, larger_wait = sorted((waits.trainer, waits.generator))
    if waits.yielded > 0:
        return "time-shared"
    if budget == 0:
        return "synchronous"
    if smaller_wait > IDLE and waits.teaching > TEACHING_SHARE:
        return "teacher-bound"
    if smaller_wait > IDLE:
        return "environment-bound" if waits.environment > ENVIRONMENT_SHARE else "other-bound"
    if larger_wait - smaller_wait > CLEAR_DIFFERENCE:
        return "generation-bound" if waits.trainer > waits.generator else "training-bound"
    return "matched" if larger_wait < IDLE else "other-bound"


def measured_limits(steps: Sequence[StepRecord]) -> str:
    """Describe in a sentence what both sides waited for in ``steps``, the largest shares first."""

    def sum_of(name: str) -> float:
        return sum(attrgetter(name)(step) for step in steps)

    step_s, generating_s = max(1e-9, sum_of("step_s")), max(1e-9, sum_of("flow.generating_s"))
    share_by_text = {
        "rollouts spent {} of their time between processes": sum_of("flow.environment_hop_s") / generating_s,
        "rollouts spent {} of their time in their environments": environment_share(steps),
        "the orchestrator computed for {} of the time": sum_of("orchestrator_cpu_s") / step_s,
        "responses spent {} of the time in a verifier": sum_of("verify_s") / step_s,
        "teachers scored for {} of the time": teaching_share(steps),
        "the trainer waited {} for the oldest groups, at the budget's edge": sum_of("flow.straggler_wait_s") / step_s,
        "the trainer waited {} for its weights to be applied": sum_of("flow.update_wait_s") / step_s,
        "publishing took {}": sum_of("publish_s") / step_s,
    }
    largest_shares = sorted(((share, text) for text, share in share_by_text.items() if share > BUSY), reverse=True)[:3]
    if not largest_shares:
        return "None of what a step measures limits them: evaluations, or processes that share cores, are left."
    return "The steps measured: " + "; ".join(text.format(f"{share:.0%}") for share, text in largest_shares) + "."
