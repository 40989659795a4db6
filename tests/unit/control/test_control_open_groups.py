"""The index of open groups, after any history, chooses what a look at all of them chooses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.control.staleness import OpenGroup, OpenGroups, OverduePolicy, Selection, check_budget, select_batch
from headway.records.errors import BudgetExceeded

POLICIES: tuple[OverduePolicy, ...] = ("wait", "drop", "mask")


def scan(
    step: int, candidates: Sequence[OpenGroup], groups_per_step: int, budget: int, policy: OverduePolicy
) -> Selection | str:
    """The model: sorts and reads all groups. An error is given back as its text."""
    choose = {"wait": _select_waiting, "drop": _select_dropping, "mask": _select_masking}[policy]
    try:
        return choose(step, candidates, groups_per_step, budget)
    except BudgetExceeded as error:
        return str(error)


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


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, OpenGroup]]:
    """Groups open, finish (later than others, with first tokens newer than they were admitted under) and leave."""
    events: list[tuple[str, OpenGroup]] = []
    version = 0
    open_now: dict[int, OpenGroup] = {}
    for index in range(draw(st.integers(1, 40))):
        version += draw(st.integers(0, 1))
        state = draw(st.sampled_from(("running", "parked")))
        open_now[index] = OpenGroup(index=index, first_version=version, state=state)
        events.append(("add", open_now[index]))
        for number in draw(st.lists(st.sampled_from(sorted(open_now)), max_size=3)):
            group = open_now.get(number)
            if group is not None and group.state != "finished" and draw(st.booleans()):
                first = draw(st.integers(group.first_version, version))
                last = draw(st.none() | st.integers(first, version))
                open_now[number] = OpenGroup(index=number, first_version=first, state="finished", last_version=last)
                events.append(("add", open_now[number]))
            elif group is not None:
                events.append(("remove", open_now.pop(number)))
                if not open_now:
                    break
        if not open_now:
            break
    return events


@given(histories(), st.integers(1, 4), st.integers(0, 4), st.sampled_from(POLICIES), st.integers(0, 45))
def test_index_selects_what_a_scan_of_all_open_groups_selects(
    events: list[tuple[str, OpenGroup]], per_step: int, budget: int, policy: OverduePolicy, step: int
) -> None:
    index = OpenGroups(per_step, budget, policy)
    known: dict[int, OpenGroup] = {}
    for name, group in events:
        if name == "add":
            known[group.index] = group
            index.add(group)
        else:
            del known[group.index]
            index.remove(group.index)
        index.remove(10_000)  # unknown: nothing happens
        expected = scan(step, list(known.values()), per_step, budget, policy)
        if isinstance(expected, str):
            with pytest.raises(BudgetExceeded) as raised:
                index.select(step)
            assert str(raised.value) == expected
            assert index.due(step)
            continue
        for _ in range(2):  # selecting changes nothing
            found = index.select(step)
            assert (found.groups, found.overdue) == (expected.groups, expected.overdue)
            assert (found.missing, found.reason) == (expected.missing, expected.reason)
        assert index.due(step) or not (expected.groups or expected.overdue)
        assert select_batch(step, list(known.values()), per_step, budget, policy) == expected


def test_a_batch_out_of_ten_thousand_open_groups_looks_at_few_of_them() -> None:
    """Counted, not timed: versions and the groups that are taken, whatever is open."""
    index = OpenGroups(20, 499, "wait")
    for number in range(10_000):
        index.add(OpenGroup(index=number, first_version=number // 5000, state="finished" if number % 2 else "running"))
    looked: list[int] = []
    index._finished = {v: _Watched(groups, looked) for v, groups in index._finished.items()}
    assert index.select(1).groups == tuple(range(1, 41, 2))
    assert sum(looked) <= 20


class _Watched(list[int]):
    """Notes how many of its items were handed out."""

    def __init__(self, items: Iterable[int], looked: list[int]) -> None:
        super().__init__(items)
        self._looked = looked

    def __getitem__(self, at):  # type: ignore[no-untyped-def]
        found = super().__getitem__(at)
        self._looked.append(len(found) if isinstance(found, list) else 1)
        return found

    def __iter__(self):  # type: ignore[no-untyped-def]
        for item in super().__iter__():
            self._looked.append(1)
            yield item
