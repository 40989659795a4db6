"""Checks that hooks keep their contracts, on kinds of groups that are rare in a run.

A run would find violations group by group; `headway check` finds them before: each hook is called twice on made-up
groups of a real task. Cases: rewards above 1, negative, large, all equal; members that failed, were filtered or came
too late; one member; no member left.
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
from headway.runtime.hooks import Hook, shown

_Given = TypeVar("_Given")
Gone = str  # "failed", "filtered" or "discarded": a member that has no reward to learn from
_TOKENS = 3  # length of every made-up response

CASES: dict[str, tuple[float | Gone, ...]] = {
    "rewards above 1 and negative": (2.3, 0.5, -0.7, 1.0),
    "large rewards": (1e6, -1e6, 3.0, 0.0),
    "rewards all equal": (1.0, 1.0, 1.0, 1.0),
    "two failed members": (1.0, "failed", 0.0, "failed"),
    "a filtered member": (0.2, 0.9, "filtered", 0.4),
    "a member that came too late": (1.0, 0.0, 0.5, "discarded"),
    "one member": (2.0,),
    "one of two left": ("failed", 0.5),
    "nobody left": ("failed", "filtered", "discarded"),
}


def made_up_group(task: Task, members: Sequence[float | Gone], index: int = 0) -> FinishedGroup:
    """Make a finished group: for each member its reward, or the way it left."""
    group = Group(
        index=index, task=task, prompt_ids=TokenIds((7,)), size=len(members), admitted_version=0, admitted_s=0.0
    )
    return FinishedGroup(group=group, rollouts=tuple(_member(index, m, given) for m, given in enumerate(members)))


def _member(index: int, member: int, given: float | Gone) -> Rollout:
    plain = Rollout(
        group=index,
        member=member,
        prompt_ids=TokenIds((7,)),
        response_ids=TokenIds.filled(5, _TOKENS),
        response_logprobs=TokenLogprobs.filled(-0.5, _TOKENS),
        response_mask=TokenMask.filled(True, _TOKENS),
        versions=(VersionSpan(version=0, tokens=_TOKENS),),
    )
    if not isinstance(given, str):
        return msgspec.structs.replace(plain, reward=given, solved=given >= 1)
    if given == "failed":
        failure = Failure(boundary="reward", cause="made up", infrastructure=True)
        return msgspec.structs.replace(plain, failure=failure)
    left = "discarded" if given == "discarded" else "filtered"
    return msgspec.structs.replace(plain, left=left, left_reason="made up")


def hook_violations(hooks: GroupHooks, task: Task) -> Iterator[str]:
    """Yield the violations of their contracts by ``hooks``, at most one per hook (the first case); none if all hold."""
    for short in ARGUMENTS:
        hook: Hook = getattr(hooks, short)
        for name, members in CASES.items():
            finished = made_up_group(task, members)
            if found := _violation(hook, finished, lambda given, short=short: _calls(hooks, short, given)):
                yield f"{found} (case: {name})"
                break


def advantage_violations(hook: Hook) -> Iterator[str]:
    """Yield the first violation of its contract by a rule for the advantages of a group; nothing if it holds."""
    for name, members in CASES.items():
        rewards = [given for given in members if not isinstance(given, str)]
        if not rewards:
            continue
        if found := _violation(hook, rewards, lambda given: advantages_of(hook, np.array(given)).tolist()):
            yield f"{found} (case: {name})"
            return


def _calls(hooks: GroupHooks, short: str, finished: FinishedGroup) -> object:
    """Make every call of one hook that a run would make for this group; returns the results."""
    group, everyone, valid = finished.group, finished.rollouts, finished.valid
    if short == "reward":
        return [hooks.reward_of(group, rollout, "a response") for rollout in valid]
    if short == "group_meta":
        return hooks.meta_of(group, everyone)
    if short == "is_valid_group":
        return hooks.refuses_group(group, everyone)
    if short == "filter_item":
        return [hooks.refuses_item(group, rollout) for rollout in valid]
    if not valid:
        return None
    if short == "normalize_group":
        return hooks.normalized(group, valid, [rollout.reward for rollout in valid])
    return hooks.copies(group, valid)


def _violation(hook: Hook, given: _Given, calls: Callable[[_Given], object]) -> str:
    """The violation of its contract by ``hook`` when ``calls`` passes it ``given``, or ""."""
    before = copy.deepcopy(given)
    try:
        once, again = calls(given), calls(given)
    except HookFailed as error:
        return str(error)
    if once != again:
        replay = "a replay would train on something else"
        return str(hook.failed(f"returned {shown(once)}, then {shown(again)} of the same arguments: {replay}"))
    if given != before:
        return str(hook.failed("changed the group or rollouts it was given: return what is new"))
    return ""
