"""What a group's rewards can teach: valid members, zero variance, solve-rate histogram."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from headway.records.rollout import Ending, Rollout

SOLVE_RATE_BINS = 11


class GroupOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a group whose members have all finished goes on to training."""

    ending: Ending | None  # None: trainable; "failed", "filtered" or "pruned": it ends now
    reason: str = ""  # "too_few_valid" | "zero_variance"
    valid: int = 0  # members without a failure
    zero_variance: bool = False  # valid members' rewards are all equal (also set when filtering is off)


def is_zero_variance(rewards: Sequence[float]) -> bool:
    """Whether all rewards are equal up to rounding: every group-relative advantage is then 0."""
    if not rewards:
        return True
    low, high = min(rewards), max(rewards)
    return high - low <= 1e-12 * max(1.0, abs(low), abs(high))


def group_outcome(
    rollouts: Sequence[Rollout], *, size: int, min_valid_ratio: float, filter_zero_variance: bool
) -> GroupOutcome:
    """Decide a finished group (DESIGN rule 11): it fails with < 2 valid members (of a group of one: < 1) or
    with valid / size below ``min_valid_ratio``, or is pruned when enough would be valid but for pruning;
    zero-variance groups are filtered when asked for.

    rollouts: all members, those that left included. Raises ValueError when their number is not ``size``.
    """
    if len(rollouts) != size:
        raise ValueError(f"{len(rollouts)} finished members of a group of {size}")
    rewards = [r.reward for r in rollouts if r.valid]
    valid, least = len(rewards), max(min(2, size), min_valid_ratio * size)
    if valid < least:
        ending = "pruned" if valid + sum(r.left == "pruned" for r in rollouts) >= least else "failed"
        return GroupOutcome(ending=ending, reason="too_few_valid", valid=valid)
    flat = size > 1 and is_zero_variance(rewards)
    if flat and filter_zero_variance:
        return GroupOutcome(ending="filtered", reason="zero_variance", valid=valid, zero_variance=True)
    return GroupOutcome(ending=None, valid=valid, zero_variance=flat)


def solve_rate_bin(solved: int, valid: int) -> int:
    """Bin of one group: 0 for none solved, 10 for all, else ceil(10 x rate) capped at 9.

    So the bins are 0, (0, .1], (.1, .2], ... (.7, .8], (.8, 1), 1. Raises ValueError for counts out of range.
    """
    if valid < 1 or not 0 <= solved <= valid:
        raise ValueError(f"{solved} solved of {valid}")
    if solved == valid:
        return SOLVE_RATE_BINS - 1
    return min(SOLVE_RATE_BINS - 2, -(-10 * solved // valid))


def solve_rate_histogram(groups: Iterable[tuple[int, int]]) -> list[int]:
    """[11] groups by share solved, from (solved, valid) pairs; groups without a valid member are left out."""
    histogram = [0] * SOLVE_RATE_BINS
    for solved, valid in groups:
        if valid:
            histogram[solve_rate_bin(solved, valid)] += 1
    return histogram
