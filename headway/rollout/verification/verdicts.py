"""Verdicts: conversion of verifiers' return values, and application to rollouts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, SupportsFloat, cast

import msgspec

from headway.records.rollout import Failure, Rollout, Verdict
from headway.runtime.hooks import finite_number, quoted


def to_verdict(result: object, judge: str = "the verifier") -> Verdict:
    """Convert a verifier's return value to a Verdict. An unusable one becomes a Verdict with ``failure``, which names
    ``judge`` as its source.

    A number counts as solved from 1 upwards; a mapping or a Verdict may say otherwise. Rewards by turn come in a
    mapping's "turn_rewards" (its reward is their sum, unless it gives one) or in a Verdict.
    """
    solved: object = None
    detail: object = {}
    turn_values: object = ()
    if isinstance(result, Verdict):
        if result.failure is not None:
            return msgspec.structs.replace(result, reward=0.0, solved=False)
        raw_reward, solved, detail, turn_values = result.reward, result.solved, result.detail, result.turn_rewards
    elif isinstance(result, Mapping):
        fields = {str(key): field for key, field in cast("Mapping[Any, Any]", result).items()}
        turn_values = fields.pop("turn_rewards", ())
        raw_reward, solved, detail = fields.pop("reward", None), fields.pop("solved", None), fields
    else:
        raw_reward = result
    if solved is not None and solved not in (True, False):  # NumPy's booleans, 0 and 1 are equal to these
        return failed_verdict(f"{judge} returned solved = {quoted(solved)}: valid: true, false")
    turn_rewards = _numbers(turn_values)
    if turn_rewards is None:
        return failed_verdict(f"{judge}: turn_rewards are {quoted(turn_values)}: a list of finite numbers is expected")
    reward = sum(turn_rewards) if raw_reward is None and turn_rewards else _number(raw_reward)
    if reward is None:
        return failed_verdict(
            f"{judge} returned {quoted(result)}: expected a number, a Verdict or a dictionary with 'reward'"
        )
    if not math.isfinite(reward):
        return failed_verdict(f"the reward is {reward}, not a finite number")
    try:
        plain_detail = msgspec.to_builtins(detail, str_keys=True, enc_hook=_plain)
        msgspec.msgpack.encode(plain_detail)  # as it will be: no integers beyond 64 bits, no halves of surrogate pairs
    except (TypeError, ValueError, OverflowError) as error:
        return failed_verdict(f"the verdict's detail can't be stored: {error}")
    verdict = result if isinstance(result, Verdict) else Verdict(reward=reward, solved=False)
    return msgspec.structs.replace(
        verdict,
        reward=reward,
        solved=reward >= 1 if solved is None else bool(solved),
        turn_rewards=turn_rewards,
        detail=plain_detail,
    )


def failed_verdict(cause: str, *, infrastructure: bool = False, detail: str = "", verify_s: float = 0.0) -> Verdict:
    """Return a Verdict without a valid reward, failed at the boundary "reward"."""
    failure = Failure(boundary="reward", cause=cause, infrastructure=infrastructure, detail=detail)
    return Verdict(reward=0.0, solved=False, verify_s=verify_s, failure=failure)


def _number(value: object) -> float | None:
    # all types with a float form are accepted (NumPy scalars, 0-d tensors); text doesn't have one
    if not hasattr(value, "__float__"):
        return None
    try:
        return float(cast("SupportsFloat", value))
    except (TypeError, ValueError, OverflowError, RuntimeError):  # an array of several, a huge integer
        return None


def _numbers(values: Any) -> tuple[float, ...] | None:
    """Return the finite numbers of a list, a tuple or an array; None for other values."""
    plain_values: object = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(plain_values, (list, tuple)):
        return None
    numbers = [finite_number(value) for value in cast("list[object]", plain_values)]
    finite_numbers = [number for number in numbers if number is not None]
    return tuple(finite_numbers) if len(finite_numbers) == len(numbers) else None


def _plain(value: Any) -> Any:
    """Convert NumPy scalars and arrays to plain numbers and lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} has no JSON form")


def apply_verdict(rollout: Rollout, verdict: Verdict, now: float) -> Rollout:
    """Return ``rollout`` with ``verdict``, finished at ``now`` (clock seconds). A failed rollout keeps its failure.

    Rewards by turn are the verdict's, one for each turn. Where only the rollout has them, the verdict's reward is added
    to the last."""
    if rollout.failure is not None:
        return msgspec.structs.replace(rollout, finished_s=now)
    turn_ends = rollout.turn_ends or (len(rollout.response_ids),)
    turn_rewards = verdict.turn_rewards
    if not turn_rewards and rollout.turn_rewards and verdict.failure is None:
        turn_rewards = (*rollout.turn_rewards[:-1], rollout.turn_rewards[-1] + float(verdict.reward))
    if turn_rewards and (len(turn_rewards) != len(turn_ends) or rollout.branches):
        cause = f"the verifier gave rewards of {len(turn_rewards)} turns to a response of {len(turn_ends)}"
        if rollout.branches:
            cause = "the verifier gave rewards by turn to a rollout with branches, whose turns have no one order"
        failure = Failure(boundary="reward", cause=cause, infrastructure=False)
        verdict, turn_rewards = msgspec.structs.replace(verdict, failure=failure), ()
    return msgspec.structs.replace(
        rollout,
        reward=float(verdict.reward) if verdict.failure is None else 0.0,
        solved=verdict.solved and verdict.failure is None,
        turn_ends=turn_ends if turn_rewards else rollout.turn_ends,
        turn_rewards=turn_rewards,
        verdict=verdict.detail | rollout.verdict,  # an outside worker's report is kept too
        failure=verdict.failure,
        verify_s=verdict.verify_s,
        judge_tokens=verdict.judge_tokens,
        judge_cost=verdict.judge_cost,
        finished_s=now,
    )
