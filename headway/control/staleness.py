"""Batch selection under the staleness budget (DESIGN rule 2).

A group whose first token has version f may be trained at steps f .. f + budget; f + budget is its deadline.
It is not enough to have every group that is due at step s in batch s: with two groups per step and budget 2,
six groups opened at version 0, and steps 0 and 1 that take newer finished groups, four old groups are due at
step 2, which has room for two. So a batch chosen at step s must leave, for every deadline d >= s,

    open groups with deadline <= d  <=  groups_per_step x (d - s)

(the feasibility test of earliest-deadline-first scheduling; d = s says that all that is due is in the batch).
Taking the oldest finished groups makes the left side smallest for every d at once, so if that choice
fails the test, every choice does, and only waiting for older unfinished groups helps. Admission (rule 1) makes
the test hold for each group that opens, so under ``wait`` waiting always ends: no deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from headway.records.errors import BudgetExceeded

OpenState = Literal["running", "parked", "finished"]
OverduePolicy = Literal["wait", "drop", "mask"]
StaleEnvironment = Literal["restart", "fail"]


class OpenGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group that could still be trained and is in no batch yet."""

    index: int  # admission index
    first_version: int  # of its oldest first token; of an unfinished group a lower bound (never decreases)
    state: OpenState
    last_version: int | None = None  # of its newest token; known of finished groups


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """What ``select_batch`` decided: a batch, or what to wait for; and which groups end as overdue."""

    groups: tuple[int, ...] = ()  # the batch: admission indices, ascending; empty: wait
    waiting_for: tuple[int, ...] = ()  # unfinished groups, ascending; parked ones among them should resume first
    missing: int = 0  # how many of waiting_for have to finish (or leave) first, at least
    reason: str = ""  # why there is no batch, one line
    overdue: tuple[int, ...] = ()  # policy drop: end these now, ascending (running ones are cancelled)


def check_budget(step: int, first_versions: Iterable[tuple[int, int]], budget: int) -> int:
    """Largest trajectory staleness of ``(group index, first version)`` pairs trained at ``step``.

    Raises BudgetExceeded when it is above the budget.
    """
    worst = 0
    for index, first_version in first_versions:
        staleness = step - first_version
        if staleness > budget:
            raise BudgetExceeded(
                f"group {index}, first token at version {first_version}, would be trained at step {step}: "
                f"staleness {staleness} > budget {budget}"
            )
        worst = max(worst, staleness)
    return worst


def select_batch(
    step: int, candidates: Sequence[OpenGroup], groups_per_step: int, budget: int, policy: OverduePolicy
) -> Selection:
    """Choose the batch of ``step`` (trainer version before it) among all open groups not yet in a batch.

    A batch has exactly ``groups_per_step`` finished groups, the oldest first (by first version, then index).
    ``wait``: no group is ever overdue; the batch waits for unfinished groups as long as the feasibility test
    says so. ``drop``: the batch never waits for an old group; groups that can no longer be trained in time
    are listed as overdue (also when there is no batch yet). ``mask``: the budget binds tokens, so no group is due; one
    whose every token is over the budget has nothing left to train and is overdue.

    Raises BudgetExceeded under ``wait`` when finished groups alone can't meet their deadlines: the groups were
    not admitted under rule 1.
    """
    if policy == "drop":
        return _select_dropping(step, candidates, groups_per_step, budget)
    if policy == "mask":
        return _select_masking(step, candidates, groups_per_step, budget)
    return _select_waiting(step, candidates, groups_per_step, budget)


def resumption(
    environment_version: int, version: int, limit: int | None, policy: StaleEnvironment
) -> Literal["continue", "restart", "fail"]:
    """How a parked member goes on at trainer version ``version``: in the environment that waits for it, whose oldest
    effect is from ``environment_version`` (-1: it has none), unless that is staler than ``limit`` versions (None:
    never); then ``policy`` says.

    Environment-state staleness is a budget of its own: the tokens of a resumed rollout may be corrected for, but
    a situation that an old policy made can't be.
    """
    if limit is None or environment_version < 0 or version - environment_version <= limit:
        return "continue"
    return policy


def _age(group: OpenGroup) -> tuple[int, int]:
    return (group.first_version, group.index)


def _unfinished(groups: Iterable[OpenGroup]) -> tuple[int, ...]:
    return tuple(sorted(g.index for g in groups if g.state != "finished"))


def _batch(step: int, chosen: Sequence[OpenGroup], budget: int | None) -> tuple[int, ...]:
    if budget is not None:
        check_budget(step, ((g.index, g.first_version) for g in chosen), budget)
    return tuple(sorted(g.index for g in chosen))


def _select_waiting(step: int, candidates: Sequence[OpenGroup], groups_per_step: int, budget: int) -> Selection:
    by_age = sorted(candidates, key=_age)
    chosen = [g for g in by_age if g.state == "finished"][:groups_per_step]
    taken = {g.index for g in chosen}
    left = missing = 0
    due: list[OpenGroup] = []
    for position, group in enumerate(by_age, start=1):
        left += group.index not in taken
        deadline = group.first_version + budget
        if position < len(by_age) and by_age[position].first_version == group.first_version:
            continue  # count all of one deadline first
        excess = left - groups_per_step * (deadline - step)
        if excess > 0:
            missing, due = max(missing, excess), by_age[:position]
    if due:
        return _wait_for(step, due, missing, groups_per_step, budget)
    return _selection(step, chosen, by_age, groups_per_step, budget, ())


def _wait_for(step: int, due: Sequence[OpenGroup], missing: int, groups_per_step: int, budget: int) -> Selection:
    """``due``: the groups up to the last deadline that the best choice would overrun."""
    unfinished = _unfinished(due)
    deadline = due[-1].first_version + budget
    if len(unfinished) < missing:
        check_budget(step, ((g.index, g.first_version) for g in due), budget)
        raise BudgetExceeded(
            f"step {step}: {len(due)} groups must be trained by step {deadline}, {groups_per_step} fit into each: "
            f"more groups are open than admission allows"
        )
    return Selection(
        waiting_for=unfinished,
        missing=missing,
        reason=f"at least {missing} of {len(unfinished)} unfinished groups due by step {deadline} must finish first",
    )


def _selection(
    step: int,
    chosen: Sequence[OpenGroup],
    usable: Sequence[OpenGroup],
    groups_per_step: int,
    budget: int | None,
    overdue: Sequence[OpenGroup],
) -> Selection:
    """``budget``: what the first tokens of the batch are checked against; None: nothing."""
    ended = tuple(sorted(g.index for g in overdue))
    if len(chosen) < groups_per_step:
        return Selection(
            waiting_for=_unfinished(usable),
            missing=groups_per_step - len(chosen),
            reason=f"{len(chosen)} of {groups_per_step} groups are finished",
            overdue=ended,
        )
    return Selection(groups=_batch(step, chosen, budget), overdue=ended)


def _select_dropping(step: int, candidates: Sequence[OpenGroup], groups_per_step: int, budget: int) -> Selection:
    by_age = sorted(candidates, key=_age)
    overdue = [g for g in by_age if g.first_version + budget < step]
    usable = by_age[len(overdue) :]
    finished = [g for g in usable if g.state == "finished"]
    chosen = finished[:groups_per_step]
    if len(chosen) < groups_per_step:
        return _selection(step, chosen, usable, groups_per_step, budget, overdue)
    # Due at this very step, but not in its batch: there is no later step for them.
    overdue += [g for g in usable if g.state != "finished" and g.first_version + budget <= step]
    kept = 0
    for group in finished[groups_per_step:]:
        earliest = step + 1 + kept // groups_per_step  # behind the older finished groups
        if group.first_version + budget < earliest:
            overdue.append(group)
        else:
            kept += 1
    return _selection(step, chosen, usable, groups_per_step, budget, overdue)


def _select_masking(step: int, candidates: Sequence[OpenGroup], groups_per_step: int, budget: int) -> Selection:
    by_age = sorted(candidates, key=_age)
    overdue = [g for g in by_age if g.last_version is not None and g.last_version + budget < step]
    ended = {g.index for g in overdue}
    usable = [g for g in by_age if g.index not in ended]
    chosen = [g for g in usable if g.state == "finished"][:groups_per_step]
    return _selection(step, chosen, usable, groups_per_step, None, overdue)
