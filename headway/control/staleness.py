"""Selects batches under the staleness budget (design.md, rule 2).

A group whose first token has version f may be trained at steps f .. f + budget; f + budget is its deadline.
It isn't sufficient that batch s contains every group due at step s: with two groups per step and budget 2,
six groups opened at version 0, and steps 0 and 1 that take newer finished groups, four old groups are due at
step 2, whose batch takes two. So a batch chosen at step s must leave, for every deadline d >= s,

    open groups with deadline <= d  <=  groups_per_step x (d - s)

(the feasibility test of earliest-deadline-first scheduling; for d = s it means that all due groups are in the batch).
A batch may be committed in parts, each of the oldest groups that have finished by then: the remaining slots of step s
are added to the right side, and groups in a committed part are no longer open.
Taking the oldest finished groups makes the left side smallest for every d at once, so if that choice
fails the test, every choice does, and only waiting for older unfinished groups helps. Admission (rule 1) makes
the test hold for each group that opens, so under ``wait`` waiting always ends: no deadlock.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Literal

import msgspec

from headway.records.errors import BudgetExceeded

OpenState = Literal["running", "parked", "finished"]
OverduePolicy = Literal["wait", "drop", "mask"]


class OpenGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group that could still be trained and is in no batch yet."""

    index: int  # admission index
    first_version: int  # of its oldest first token; of an unfinished group a lower bound (never decreases)
    state: OpenState
    last_version: int | None = None  # of its newest token; known of finished groups


class NextPart(msgspec.Struct, frozen=True, kw_only=True):
    """The next part of a batch that is committed in several."""

    groups: int  # size of the part
    remaining: int = 0  # slots of the batch for further parts


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Decision of ``select_batch``: a batch or the groups to wait for, and the groups that end as overdue."""

    groups: tuple[int, ...] = ()  # the batch: admission indices, ascending; empty: wait
    waiting_for: tuple[int, ...] = ()  # unfinished groups, ascending; parked ones among them should resume first
    missing: int = 0  # least number of waiting_for that have to finish (or leave) first
    reason: str = ""  # why there is no batch, one line
    overdue: tuple[int, ...] = ()  # policy drop: end these now, ascending (running ones are cancelled)


def check_budget(step: int, first_versions: Iterable[tuple[int, int]], budget: int) -> int:
    """Return the largest trajectory staleness of ``(group index, first version)`` pairs trained at ``step``.

    Raises BudgetExceeded when it is above the budget.
    """
    largest_staleness = 0
    for index, first_version in first_versions:
        staleness = step - first_version
        if staleness > budget:
            raise BudgetExceeded(
                f"group {index}, first token at version {first_version}, would be trained at step {step}: "
                f"staleness {staleness} > budget {budget}"
            )
        largest_staleness = max(largest_staleness, staleness)
    return largest_staleness


def select_batch(
    step: int,
    candidates: Sequence[OpenGroup],
    groups_per_step: int,
    budget: int,
    policy: OverduePolicy,
    part: NextPart | None = None,
) -> Selection:
    """Choose the batch of ``step`` (trainer version before it) among all open groups not yet in a batch.

    A batch has exactly ``groups_per_step`` finished groups, the oldest first (by first version, then index). With
    ``part`` only the batch's next part is chosen.
    ``wait``: no group is ever overdue; the batch waits for unfinished groups as long as the feasibility test
    fails. ``drop``: the batch never waits for an old group; groups that can no longer be trained in time
    are listed as overdue (also when there is no batch yet). ``mask``: the budget binds tokens, so no group is due; a
    group whose every token is over the budget has no token to train and is overdue.

    Raises BudgetExceeded under ``wait`` when finished groups alone can't meet their deadlines: the groups were
    not admitted under rule 1.
    """
    groups = OpenGroups(groups_per_step, budget, policy)
    for group in candidates:
        groups.add(group)
    return groups.select(step, part, named=True)


def resumption(environment_version: int, version: int, limit: int | None) -> Literal["continue", "restart"]:
    """Decide whether a parked member continues in its kept environment or restarts, at trainer version ``version``.

    It restarts when the environment's oldest effect, from ``environment_version`` (-1: there is none), is staler than
    ``limit`` versions (None: never).

    Environment-state staleness has a budget of its own: the tokens of a resumed rollout can be corrected for, but an
    environment state that an old policy produced can't be.
    """
    if limit is None or environment_version < 0 or version - environment_version <= limit:
        return "continue"
    return "restart"


def _check_all(step: int, version: int, groups: Iterable[int], budget: int) -> None:
    check_budget(step, ((index, version) for index in sorted(groups)), budget)


class OpenGroups:
    """Index of all open groups that are in no batch, by the version of their first token.

    It is updated as groups open, finish and leave (``add``, ``remove``: O(log n)), so that ``select`` visits versions,
    of which a budget allows few, and the groups that it takes, never all open groups.

    Invariant: ``select`` depends only on the groups that are open, not on their history.
    """

    def __init__(self, groups_per_step: int, budget: int, policy: OverduePolicy, *, in_order: bool = False) -> None:
        """Create an empty index. ``in_order``: under ``wait`` a part waits for unfinished groups older than its own.

        So parts don't depend on the order in which groups finish."""
        self._in_order = in_order
        self._per_step = groups_per_step
        self._budget = budget
        self._policy: OverduePolicy = policy
        self._version_of: dict[int, int] = {}  # group -> of its first token
        self._versions: list[int] = []  # ascending: those that a group has
        self._unfinished: dict[int, set[int]] = {}  # version -> groups
        self._finished: dict[int, list[int]] = {}  # version -> groups, ascending
        self._finished_count = 0
        self._newest: list[tuple[int, int]] = []  # a heap, policy mask: newest token's version and group, of finished

    def __contains__(self, index: int) -> bool:
        """Whether a group is open, and in no batch."""
        return index in self._version_of

    @property
    def finished(self) -> int:
        """Number of groups that have finished."""
        return self._finished_count

    def add(self, group: OpenGroup) -> None:
        """Add a group, or replace its earlier entry, as when it has finished."""
        index, version = group.index, group.first_version
        if index in self._version_of:
            self.remove(index)
        if version not in self._unfinished:
            insort(self._versions, version)
            self._unfinished[version], self._finished[version] = set(), []
        self._version_of[index] = version
        if group.state != "finished":
            self._unfinished[version].add(index)
            return
        insort(self._finished[version], index)
        self._finished_count += 1
        if self._policy == "mask" and group.last_version is not None:
            heappush(self._newest, (group.last_version, index))

    def remove(self, index: int) -> None:
        """Remove a group that has ended; no-op for an unknown one."""
        version = self._version_of.pop(index, None)
        if version is None:
            return
        unfinished, finished = self._unfinished[version], self._finished[version]
        if index in unfinished:
            unfinished.remove(index)
        else:
            del finished[bisect_left(finished, index)]
            self._finished_count -= 1
        if not unfinished and not finished:
            del self._unfinished[version], self._finished[version]
            self._versions.remove(version)

    def due(self, step: int, part: NextPart | None = None) -> bool:
        """Return whether ``select`` could do more than wait: a batch has finished, or a group is overdue. O(1)."""
        return self._finished_count >= (part.groups if part else self._per_step) or (
            bool(self._versions) and self._versions[0] + self._budget < step
        )

    def select(self, step: int, part: NextPart | None = None, *, named: bool = False) -> Selection:
        """Choose the batch of ``step``, see ``select_batch``; with ``part`` only this part of it.

        The groups of earlier parts have been removed. ``named``: fill ``waiting_for``, O(unfinished groups)."""
        selection, versions = self._select(step, part or NextPart(groups=self._per_step))
        return msgspec.structs.replace(selection, waiting_for=self.unfinished(versions)) if named else selection

    def unfinished(self, versions: Iterable[int]) -> tuple[int, ...]:
        """Return unfinished groups whose first tokens have these versions, ascending."""
        return tuple(sorted(index for version in versions for index in self._unfinished[version]))

    def _select(self, step: int, part: NextPart) -> tuple[Selection, list[int]]:
        """Return the selection, and the versions whose unfinished groups it waits for."""
        if self._policy == "drop":
            return self._select_dropping(step, part)
        if self._policy == "mask":
            return self._select_masking(step, part)
        return self._select_waiting(step, part)

    def _oldest(self, versions: Iterable[int], limit: int, without: Collection[int] = ()) -> dict[int, list[int]]:
        """Return at most ``limit`` of the oldest finished groups of these versions, by version."""
        chosen_by_version: dict[int, list[int]] = {}
        for version in versions:
            if not limit:
                break
            finished = self._finished[version]
            usable_groups = [index for index in finished if index not in without] if without else finished
            if usable_groups:
                chosen_by_version[version] = usable_groups[:limit]
                limit -= len(chosen_by_version[version])
        return chosen_by_version

    def _unfinished_first(self, count: int) -> int:
        """Count the unfinished groups among the ``count`` oldest open ones."""
        unfinished_count = 0
        for version in self._versions:
            oldest_groups = sorted([*self._unfinished[version], *self._finished[version]])[:count]
            unfinished_count += len(self._unfinished[version].intersection(oldest_groups))
            count -= len(oldest_groups)
        return unfinished_count

    def _select_waiting(self, step: int, part: NextPart) -> tuple[Selection, list[int]]:
        if self._in_order and (older := self._unfinished_first(part.groups)):
            reason = f"{older} of the {part.groups} oldest groups are unfinished, and parts keep the order of admission"
            return Selection(missing=older, reason=reason), self._versions
        chosen_by_version = self._oldest(self._versions, part.groups)
        remaining_groups = missing_groups = 0
        due_versions: list[int] = []
        for version_count, version in enumerate(self._versions, start=1):
            taken_count = len(chosen_by_version.get(version, ()))
            remaining_groups += len(self._unfinished[version]) + len(self._finished[version]) - taken_count
            excess_groups = remaining_groups - self._per_step * (version + self._budget - step) - part.remaining
            if excess_groups > 0:
                missing_groups, due_versions = max(missing_groups, excess_groups), self._versions[:version_count]
        if due_versions:
            return self._wait_for(step, due_versions, missing_groups), due_versions
        return self._selection(step, part, chosen_by_version, self._versions)

    def _wait_for(self, step: int, due: list[int], missing: int) -> Selection:
        """Return a selection that waits; raise BudgetExceeded where waiting can't help.

        ``due``: the versions up to the last deadline that the best choice would miss."""
        unfinished = sum(len(self._unfinished[version]) for version in due)
        deadline = due[-1] + self._budget
        if unfinished < missing:
            for version in due:
                _check_all(step, version, {*self._unfinished[version], *self._finished[version]}, self._budget)
            count = unfinished + sum(len(self._finished[version]) for version in due)
            raise BudgetExceeded(
                f"step {step}: {count} groups must be trained by step {deadline}, {self._per_step} fit into each: "
                f"more groups are open than admission allows"
            )
        return Selection(
            missing=missing,
            reason=f"at least {missing} of {unfinished} unfinished groups due by step {deadline} must finish first",
        )

    def _selection(
        self,
        step: int,
        part: NextPart,
        chosen: Mapping[int, list[int]],
        usable: list[int],
        overdue: Iterable[int] = (),
        *,
        checked: bool = True,
    ) -> tuple[Selection, list[int]]:
        """Make the selection of ``chosen``, or one that waits while these are fewer than a batch.

        ``usable``: versions whose groups may be waited for; ``checked``: check the batch against the budget."""
        overdue_groups, chosen_count = tuple(sorted(overdue)), sum(map(len, chosen.values()))
        if chosen_count < part.groups:
            waiting_selection = Selection(
                missing=part.groups - chosen_count,
                reason=f"{chosen_count} of {part.groups} groups are finished",
                overdue=overdue_groups,
            )
            return waiting_selection, usable
        for version, groups in chosen.items() if checked else ():
            _check_all(step, version, groups, self._budget)
        batch = tuple(sorted(index for groups in chosen.values() for index in groups))
        return Selection(groups=batch, overdue=overdue_groups), []

    def _select_dropping(self, step: int, part: NextPart) -> tuple[Selection, list[int]]:
        late_versions = [version for version in self._versions if version + self._budget < step]
        usable_versions = self._versions[len(late_versions) :]
        overdue = [i for version in late_versions for i in (*self._unfinished[version], *self._finished[version])]
        chosen_by_version = self._oldest(usable_versions, part.groups)
        if sum(map(len, chosen_by_version.values())) == part.groups:
            kept_count = 0
            for version in usable_versions:
                # A group that is kept is trained behind the older finished ones, from the next step on.
                capacity_groups = self._per_step * (version + self._budget - step) + part.remaining
                if not capacity_groups:  # due at this step, but not in its batch: no later step may train them
                    overdue += self._unfinished[version]
                rest_groups = self._finished[version][len(chosen_by_version.get(version, ())) :]
                fitting_count = max(0, min(len(rest_groups), capacity_groups - kept_count))
                overdue += rest_groups[fitting_count:]
                kept_count += fitting_count
        return self._selection(step, part, chosen_by_version, usable_versions, overdue)

    def _select_masking(self, step: int, part: NextPart) -> tuple[Selection, list[int]]:
        overdue_groups: set[int] = set()
        popped_entries: list[tuple[int, int]] = []
        while self._newest and self._newest[0][0] + self._budget < step:
            popped_entries.append(heappop(self._newest))
            if popped_entries[-1][1] in self._version_of:
                overdue_groups.add(popped_entries[-1][1])
        for popped_entry in popped_entries:
            if popped_entry[1] in overdue_groups:  # until it is removed
                heappush(self._newest, popped_entry)
        chosen_by_version = self._oldest(self._versions, part.groups, overdue_groups)
        return self._selection(step, part, chosen_by_version, self._versions, overdue_groups, checked=False)
