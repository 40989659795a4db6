"""Decides the outcome of a finished group: timeout, too few valid members, zero variance, small advantages."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from headway.config.schema import QueueConfig
from headway.records.rollout import Ending, Rollout

GROUP_TIMEOUT = "group_timeout"  # reason of members that are discarded because they weren't finished in time


class GroupOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a group whose members have all finished: trained or not, and the reason if it isn't."""

    ending: Ending | None  # None: trainable; "failed", "filtered" or "pruned": it ends now
    # too_few_valid | group_timeout | too_few_kept | zero_variance | low_advantage | user:WHY | hook:NAME
    reason: str = ""
    valid: int = 0  # members that neither failed nor left
    zero_variance: bool = False  # valid members' rewards are all equal (also set when filtering is off)


def is_zero_variance(rewards: Sequence[float]) -> bool:
    """Return whether all rewards are equal up to rounding: every group-relative advantage is then 0."""
    if not rewards:
        return True
    low, high = min(rewards), max(rewards)
    return high - low <= 1e-12 * max(1.0, abs(low), abs(high))


def group_timeout(
    *, size: int, finished: Collection[int], open_s: float, timeout_s: float | None
) -> tuple[int, ...] | None:
    """Return the members to stop in a group open for ``open_s`` seconds; None while it may continue.

    They are the unfinished members of a group that has been generating for ``timeout_s`` or more. They leave as
    *discarded* with reason GROUP_TIMEOUT, and `group_outcome` decides about the others. finished: the members whose
    generation has ended, successfully or not.
    """
    if timeout_s is None or open_s < timeout_s or len(finished) >= size:
        return None
    return tuple(member for member in range(size) if member not in finished)


def failed_outcome(rollouts: Sequence[Rollout], *, size: int, limits: QueueConfig) -> GroupOutcome | None:
    """Return the outcome of a group with too few sound members, None if it has enough (design.md, rule 11).

    It is taken before any filter. Sound members neither failed nor were pruned or stopped. Too few are fewer than 2 (1
    in a group of one), or fewer than ``min_valid_group_ratio`` of its size; ``min_timeout_group_ratio`` replaces that
    ratio after a timeout. The group is *pruned* when it would have enough without the pruning, else *failed*.

    Example, size 4: ratio 0.5 tolerates two failures, not three; with one member stopped at the timeout and
    min_timeout_group_ratio 0.7 the other three must be sound.
    """
    has_timed_out = any(r.removal_reason == GROUP_TIMEOUT for r in rollouts)
    min_ratio = limits.min_timeout_group_ratio if has_timed_out else limits.min_valid_group_ratio
    sound_count = sum(r.failure is None and r.removal not in ("pruned", "discarded") for r in rollouts)
    if not _too_few(sound_count, size, min_ratio):
        return None
    pruned_count = sum(r.removal == "pruned" for r in rollouts)
    return GroupOutcome(
        ending="failed" if _too_few(sound_count + pruned_count, size, min_ratio) else "pruned",
        reason=GROUP_TIMEOUT if has_timed_out else "too_few_valid",
        valid=sum(r.valid for r in rollouts),
    )


def group_outcome(
    rollouts: Sequence[Rollout], *, size: int, limits: QueueConfig, signal: Sequence[float] | None = None
) -> GroupOutcome:
    """Decide the outcome of a group whose members have all finished or left.

    `failed_outcome` comes first. Then the group is *filtered* when fewer than 2 members (1 in a group of one) or fewer
    than ``min_valid_item_ratio`` of its size are valid, or when all values of ``signal`` are equal and
    ``filter_zero_variance`` is set; else it is trainable.

    rollouts: all members. signal: values to compare; by default the valid members' rewards. Raises ValueError when
    the number of rollouts is not ``size``.
    """
    if len(rollouts) != size:
        raise ValueError(f"{len(rollouts)} finished members of a group of {size}")
    early_outcome = failed_outcome(rollouts, size=size, limits=limits)
    if early_outcome is not None:
        return early_outcome
    valid_count = sum(r.valid for r in rollouts)
    if _too_few(valid_count, size, limits.min_valid_item_ratio):
        return GroupOutcome(ending="filtered", reason="too_few_kept", valid=valid_count)
    if signal is None:
        signal = [r.reward for r in rollouts if r.valid]
    is_flat = size > 1 and is_zero_variance(signal)
    if is_flat and limits.filter_zero_variance:
        return GroupOutcome(ending="filtered", reason="zero_variance", valid=valid_count, zero_variance=True)
    return GroupOutcome(ending=None, valid=valid_count, zero_variance=is_flat)


def advantage_outcome(outcome: GroupOutcome, advantages: Sequence[float], min_advantage: float) -> GroupOutcome:
    """Return ``outcome``, or *filtered* if no absolute value of ``advantages`` reaches ``min_advantage``.

    Groups are filtered, not members: a member of small advantage is part of the others' baseline."""
    if outcome.ending is not None or not min_advantage or max(map(abs, advantages), default=0.0) >= min_advantage:
        return outcome
    return GroupOutcome(
        ending="filtered", reason="low_advantage", valid=outcome.valid, zero_variance=outcome.zero_variance
    )


def _too_few(members: int, size: int, ratio: float) -> bool:
    return members < min(2, size) or members + 1e-9 < ratio * size  # rounding: 0.7 x 10 must not exceed 7
