"""Checks that hooks keep their contracts, on kinds of groups that are rare in a run.

A run would find violations group by group; `headway check` finds them before it: each hook is called twice on synthetic
groups of a real task. Cases: rewards above 1, negative, large, all equal; members that failed, were filtered or
finished too late; one member; no valid member.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from headway.algorithms.advantages import advantages_of
from headway.algorithms.groups.hooks import ARGUMENTS, GroupHooks
from headway.records.errors import HookFailed
from headway.records.generation import VersionSpan
from headway.records.rollout import Failure, FinishedGroup, Group, Rollout
from headway.records.task import Task
from headway.records.tokens import TokenIds, TokenLogprobs, TokenMask
from headway.runtime.hooks import Hook, quoted

_Argument = TypeVar("_Argument")
Removal = str  # "failed", "filtered" or "discarded": a member without a reward
_TOKENS = 3  # length of every synthetic response

CASES: dict[str, tuple[float | Removal, ...]] = {
    "rewards above 1 and negative": (2.3, 0.5, -0.7, 1.0),
    "large rewards": (1e6, -1e6, 3.0, 0.0),
    "rewards all equal": (1.0, 1.0, 1.0, 1.0),
    "two failed members": (1.0, "failed", 0.0, "failed"),
    "a filtered member": (0.2, 0.9, "filtered", 0.4),
    "a member that came too late": (1.0, 0.0, 0.5, "discarded"),
    "one member": (2.0,),
    "one of two left": ("failed", 0.5),
    "no group left": ("failed", "filtered", "discarded"),
}


def synthetic_group(task: Task, members: Sequence[float | Removal], index: int = 0) -> FinishedGroup:
    """Make a finished group from each member's reward or removal."""
    group = Group(
        index=index, task=task, prompt_ids=TokenIds((7,)), size=len(members), admitted_version=0, admitted_s=0.0
    )
    return FinishedGroup(group=group, rollouts=tuple(_member(index, m, outcome) for m, outcome in enumerate(members)))


def _member(index: int, member: int, outcome: float | Removal) -> Rollout:
    plain_rollout = Rollout(
        group=index,
        member=member,
        prompt_ids=TokenIds((7,)),
        response_ids=TokenIds.filled(5, _TOKENS),
        response_logprobs=TokenLogprobs.filled(-0.5, _TOKENS),
        response_mask=TokenMask.filled(True, _TOKENS),
        versions=(VersionSpan(version=0, tokens=_TOKENS),),
    )
    if not isinstance(outcome, str):
        return msgspec.structs.replace(plain_rollout, reward=outcome, solved=outcome >= 1)
    if outcome == "failed":
        failure = Failure(boundary="reward", cause="made up", infrastructure=True)
        return msgspec.structs.replace(plain_rollout, failure=failure)
    removal = "discarded" if outcome == "discarded" else "filtered"
    return msgspec.structs.replace(plain_rollout, removal=removal, removal_reason="made up")


def hook_violations(hooks: GroupHooks, task: Task) -> Iterator[str]:
    """Yield contract violations of ``hooks``: for each hook at most one, of its first case."""
    for short_name in ARGUMENTS:
        hook: Hook = getattr(hooks, short_name)
        for case_name, members in CASES.items():
            finished = synthetic_group(task, members)
            if violation := _violation(hook, finished, lambda group, short=short_name: _calls(hooks, short, group)):
                yield f"{violation} (case: {case_name})"
                break


def advantage_violations(hook: Hook) -> Iterator[str]:
    """Yield the first contract violation of a rule for group advantages, if there is one."""
    for case_name, members in CASES.items():
        rewards = [reward for reward in members if not isinstance(reward, str)]
        if not rewards:
            continue
        if violation := _violation(hook, rewards, lambda values: advantages_of(hook, np.array(values)).tolist()):
            yield f"{violation} (case: {case_name})"
            return


def _calls(hooks: GroupHooks, short: str, finished: FinishedGroup) -> object:
    """Make every call of one hook that a run would make for this group; return the results."""
    group, all_members, valid_members = finished.group, finished.rollouts, finished.valid
    if short == "reward":
        return [hooks.reward_of(group, rollout, "a response") for rollout in valid_members]
    if short == "group_meta":
        return hooks.meta_of(group, all_members)
    if short == "is_valid_group":
        return hooks.group_refusal(group, all_members)
    if short == "filter_item":
        return [hooks.item_refusal(group, rollout) for rollout in valid_members]
    if not valid_members:
        return None
    if short == "normalize_group":
        return hooks.normalized(group, valid_members, [rollout.reward for rollout in valid_members])
    return hooks.copies(group, valid_members)


def _violation(hook: Hook, argument: _Argument, calls: Callable[[_Argument], object]) -> str:
    """Return the contract violation of ``hook`` when ``calls`` passes it ``argument``, or ""."""
    original_argument = copy.deepcopy(argument)
    try:
        first, second = calls(argument), calls(argument)
    except HookFailed as error:
        return str(error)
    if first != second:
        reason = "a replay would train on something else"
        return str(hook.failed(f"returned {quoted(first)}, then {quoted(second)} of the same arguments: {reason}"))
    if argument != original_argument:
        return str(hook.failed("changed its arguments: return new objects"))
    return ""
