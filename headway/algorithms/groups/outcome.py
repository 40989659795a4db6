"""The outcome of a group whose members have finished: timeout, too few valid ones, zero variance, small advantages."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from headway.config.schema import QueueConfig
from headway.records.rollout import Ending, Rollout

GROUP_TIMEOUT = "group_timeout"  # why members are discarded that weren't finished in time


class GroupOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a group whose members have all finished goes on to training."""

    ending: Ending | None  # None: trainable; "failed", "filtered" or "pruned": it ends now
    # too_few_valid | group_timeout | too_few_kept | zero_variance | low_advantage | user:WHY | hook:NAME
    reason: str = ""
    valid: int = 0  # members that neither failed nor left
    zero_variance: bool = False  # valid members' rewards are all equal (also set when filtering is off)


def is_zero_variance(rewards: Sequence[float]) -> bool:
    """Whether all rewards are equal up to rounding: every group-relative advantage is then 0."""
    if not rewards:
        return True
    low, high = min(rewards), max(rewards)
    return high - low <= 1e-12 * max(1.0, abs(low), abs(high))


def group_timeout(
    *, size: int, finished: Collection[int], open_s: float, timeout_s: float | None
) -> tuple[int, ...] | None:
    """The members of a group to stop, because it has been generated for ``open_s`` seconds, ``timeout_s`` or more; None
    while it may go on. They leave it as *discarded*, with GROUP_TIMEOUT for a reason, and `group_outcome` decides what
    becomes of the others. finished: the members whose generation has ended, one way or the other.
    """
    if timeout_s is None or open_s < timeout_s or len(finished) >= size:
        return None
    return tuple(member for member in range(size) if member not in finished)


def failed_outcome(rollouts: Sequence[Rollout], *, size: int, limits: QueueConfig) -> GroupOutcome | None:
    """How a group ends, before any filter, that has too few sound members, those that neither failed nor were pruned or
    stopped (DESIGN rule 11): fewer than 2 (of a group of one: 1), or fewer than ``min_valid_group_ratio`` of its size,
    in whose place ``min_timeout_group_ratio`` stands where it timed out. It is *pruned* when there would be enough but
    for pruning, else *failed*. None: it has enough.

    Example, size 4: with ratio 0.5 two failures are borne and three are not; with one member stopped at the timeout
    and min_timeout_group_ratio 0.7 the other three must be sound.
    """
    timed_out = any(r.left_reason == GROUP_TIMEOUT for r in rollouts)
    ratio = limits.min_timeout_group_ratio if timed_out else limits.min_valid_group_ratio
    sound = sum(r.failure is None and r.left not in ("pruned", "discarded") for r in rollouts)
    if not _too_few(sound, size, ratio):
        return None
    pruned = sum(r.left == "pruned" for r in rollouts)
    return GroupOutcome(
        ending="failed" if _too_few(sound + pruned, size, ratio) else "pruned",
        reason=GROUP_TIMEOUT if timed_out else "too_few_valid",
        valid=sum(r.valid for r in rollouts),
    )


def group_outcome(
    rollouts: Sequence[Rollout], *, size: int, limits: QueueConfig, signal: Sequence[float] | None = None
) -> GroupOutcome:
    """Decide a group whose members have finished, or left it: `failed_outcome`; it is filtered when filters leave fewer
    than 2 valid members (of a group of one: 1) or fewer than ``min_valid_item_ratio`` of its size, and when all of
    ``signal`` is equal and ``filter_zero_variance`` asks for it.

    rollouts: all members. signal: what is compared; by default the valid members' rewards. Raises ValueError when the
    number of rollouts is not ``size``.
    """
    if len(rollouts) != size:
        raise ValueError(f"{len(rollouts)} finished members of a group of {size}")
    failed = failed_outcome(rollouts, size=size, limits=limits)
    if failed is not None:
        return failed
    valid = sum(r.valid for r in rollouts)
    if _too_few(valid, size, limits.min_valid_item_ratio):
        return GroupOutcome(ending="filtered", reason="too_few_kept", valid=valid)
    if signal is None:
        signal = [r.reward for r in rollouts if r.valid]
    flat = size > 1 and is_zero_variance(signal)
    if flat and limits.filter_zero_variance:
        return GroupOutcome(ending="filtered", reason="zero_variance", valid=valid, zero_variance=True)
    return GroupOutcome(ending=None, valid=valid, zero_variance=flat)


def advantage_outcome(outcome: GroupOutcome, advantages: Sequence[float], min_advantage: float) -> GroupOutcome:
    """``outcome``, or *filtered* where none of the group's ``advantages`` reaches ``min_advantage`` in size.

    Groups are judged, not members: one with a small advantage is what the others are compared with."""
    if outcome.ending is not None or not min_advantage or max(map(abs, advantages), default=0.0) >= min_advantage:
        return outcome
    return GroupOutcome(
        ending="filtered", reason="low_advantage", valid=outcome.valid, zero_variance=outcome.zero_variance
    )


def _too_few(members: int, size: int, ratio: float) -> bool:
    return members < min(2, size) or members + 1e-9 < ratio * size  # 0.7 x 10 is not to be more than 7
