"""Sums over one step that identify the queue's parameters (``records.ledger.QueueFlow``)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headway.control.lengths import mean_squares
from headway.records.control import Knobs
from headway.records.ledger import QueueFlow
from headway.records.rollout import FinishedGroup, Rollout


def flow_of(
    finished: Sequence[FinishedGroup],
    *,
    knobs: Knobs,
    configured: Knobs,
    accepted_groups: int,
    useful_samples: int,
    trained_tokens: int,
    straggler_wait_s: float,
    device_wait_s: float,
    update_wait_s: float,
) -> QueueFlow:
    """Compute a step's flow, without the engines' part, from ``finished`` groups and the train loop's measurements."""
    responses = [r for group in finished for r in group.rollouts if r.failure is None and r.response_ids]
    between_square, within_square = log_length_variances(finished)
    timed_responses = [r for r in responses if r.first_token_s > 0]
    return QueueFlow(
        open_groups=knobs.open_groups or 0,
        concurrent_rollouts=knobs.concurrent_rollouts,
        steps_per_publish=knobs.steps_per_publish,
        idle_replicas=len(knobs.idle_replicas),
        verifier_workers=knobs.verifier_workers,
        configured_concurrent_rollouts=configured.concurrent_rollouts,
        configured_steps_per_publish=configured.steps_per_publish,
        configured_verifier_workers=configured.verifier_workers,
        useful_samples=useful_samples,
        trained_tokens=trained_tokens,
        finished_groups=len(finished),
        accepted_groups=accepted_groups,
        responses=len(responses),
        prompt_tokens=sum(len(sequence.prompt_ids) for r in responses for sequence in r.sequences),
        generating_s=sum(max(0.0, r.generated_s - r.opened_s) for r in responses),
        decode_s=sum(_decode_s(r) for r in timed_responses),
        environment_s=sum(r.environment_s for r in timed_responses),
        environment_hop_s=sum(r.environment_hop_s for r in timed_responses),
        decode_tokens=sum(r.response_tokens - 1 for r in timed_responses),
        length_variance_between=between_square,
        length_variance_within=within_square,
        straggler_wait_s=straggler_wait_s,
        device_wait_s=device_wait_s,
        update_wait_s=update_wait_s,
    )


def _decode_s(rollout: Rollout) -> float:
    return max(0.0, rollout.generated_s - rollout.first_token_s)


def log_length_variances(groups: Sequence[FinishedGroup]) -> tuple[float, float]:
    """Mean squares of a one-way analysis of variance of log response lengths, between groups and within them. The
    groups are of about equal size. (0, 0) for fewer than two groups of two."""
    return mean_squares([_log_lengths(group) for group in groups])


def _log_lengths(group: FinishedGroup) -> list[float]:
    return [math.log(r.response_tokens) for r in group.rollouts if r.failure is None and r.response_ids]
