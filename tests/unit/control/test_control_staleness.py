"""Rule 2: batch selection against brute force, worked cases, and the check at batch formation."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.control.staleness import NextPart, OpenGroup, OpenGroups, check_budget, resumption, select_batch
from headway.records.errors import BudgetExceeded


def group(index, first_version, state="finished"):
    return OpenGroup(index=index, first_version=first_version, state=state)


def schedulable(groups, step, per_step, budget, taken=0):
    """Whether all groups can be trained in time from ``step`` on, ``taken`` of whose places are, by placing them."""
    room = {step: taken}
    for g in sorted(groups, key=lambda g: g.first_version):
        places = (s for s in range(step, g.first_version + budget + 1) if room.get(s, 0) < per_step)
        place = next(places, None)
        if place is None:
            return False
        room[place] = room.get(place, 0) + 1
    return True


groups_strategy = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(["running", "parked", "finished", "finished"])), max_size=8
)


@settings(deadline=None, max_examples=400)
@given(groups_strategy, st.integers(1, 3), st.integers(0, 4), st.integers(0, 2), st.integers(1, 3))
def test_wait_finds_a_part_exactly_when_one_leaves_everything_schedulable(raw, per_step, budget, committed, taken):
    """A whole batch too: the part of all its groups."""
    step = 5
    committed = min(committed, per_step - 1)
    left = per_step - committed
    part = NextPart(groups=min(taken, left), remaining=left - min(taken, left))
    candidates = [group(i, max(v, step - budget), s) for i, (v, s) in enumerate(raw)]
    if not schedulable(candidates, step, per_step, budget, committed):
        return  # not admitted under rule 1
    finished = [g for g in candidates if g.state == "finished"]
    possible = [
        chosen
        for chosen in combinations(finished, part.groups)
        if schedulable([g for g in candidates if g not in chosen], step, per_step, budget, per_step - part.remaining)
    ]
    selection = select_batch(step, candidates, per_step, budget, "wait", part)
    assert selection.overdue == ()
    assert bool(selection.groups) == bool(possible)
    if possible:
        assert selection.groups in [tuple(sorted(g.index for g in chosen)) for chosen in possible]
        oldest = sorted(finished, key=lambda g: (g.first_version, g.index))[: part.groups]
        assert selection.groups == tuple(sorted(g.index for g in oldest))
        return
    unfinished = {g.index for g in candidates if g.state != "finished"}
    assert set(selection.waiting_for) <= unfinished
    assert selection.reason
    assert selection.missing >= 1
    # finishing the named ones is enough, unless the step simply lacks groups
    helped = [group(g.index, g.first_version) if g.index in selection.waiting_for else g for g in candidates]
    enough = sum(g.state == "finished" for g in helped) >= part.groups
    assert bool(select_batch(step, helped, per_step, budget, "wait", part).groups) == enough


def test_groups_that_fill_several_steps_are_waited_for_before_they_are_due():
    """Two a step, budget 2, four groups of version 0 running at step 1, two newer ones finished. None is due at
    step 1, but a batch of the newer ones would leave four groups for the two places of step 2."""
    running = [group(i, 0, "running") for i in range(4)]
    newer = [group(4, 1), group(5, 1)]
    selection = select_batch(1, [*running, *newer], 2, 2, "wait")
    assert selection.groups == ()
    assert selection.waiting_for == (0, 1, 2, 3)
    assert selection.missing == 2
    # with two of them finished, those are the batch and the other two still fit into step 2
    half = [group(0, 0), group(1, 0), *running[2:], *newer]
    assert select_batch(1, half, 2, 2, "wait").groups == (0, 1)
    # with room to spare, the newer ones may go first
    assert select_batch(1, [*running[:2], *newer], 2, 2, "wait").groups == (4, 5)


def test_wait_refuses_what_admission_can_not_have_let_in():
    with pytest.raises(BudgetExceeded, match="staleness 3 > budget 2"):
        select_batch(3, [group(0, 0), group(1, 3)], 1, 2, "wait")
    with pytest.raises(BudgetExceeded, match="more groups are open than admission allows"):
        select_batch(2, [group(i, 0) for i in range(3)], 1, 2, "wait")


def test_too_few_finished_groups_name_how_many_are_missing():
    selection = select_batch(0, [group(0, 0), group(1, 0, "parked"), group(2, 0, "running")], 3, 4, "wait")
    assert selection.groups == ()
    assert selection.waiting_for == (1, 2)
    assert selection.missing == 2
    assert selection.reason == "1 of 3 groups are finished"


def test_drop_ends_what_can_not_be_trained_any_more_and_never_waits_for_it():
    old_running, old_finished = group(0, 0, "running"), group(1, 0)
    due_running, due_finished = group(2, 1, "running"), group(3, 1)
    fresh = [group(4, 2), group(5, 3), group(6, 3, "running")]
    selection = select_batch(3, [*fresh, due_finished, due_running, old_finished, old_running], 2, 2, "drop")
    assert selection.groups == (3, 4)
    assert selection.overdue == (0, 1, 2)  # 2 is due at this very step and not in its batch


def test_drop_without_enough_groups_still_ends_overdue_ones_but_not_those_due_now():
    selection = select_batch(3, [group(0, 0, "running"), group(1, 1, "running"), group(2, 3)], 2, 2, "drop")
    assert selection.groups == ()
    assert selection.overdue == (0,)
    assert selection.waiting_for == (1,)


def test_drop_ends_finished_groups_that_older_ones_keep_out_for_good():
    # version 2, budget 1: last step 3. One a step: one group now, one at step 3, the third can't be trained
    selection = select_batch(2, [group(i, 2) for i in range(3)], 1, 1, "drop")
    assert selection.groups == (0,)
    assert selection.overdue == (2,)


@settings(deadline=None, max_examples=200)
@given(groups_strategy, st.integers(1, 3), st.integers(0, 4), st.integers(1, 3))
def test_drop_keeps_every_finished_group_trainable(raw, per_step, budget, taken):
    step = 4
    part = NextPart(groups=min(taken, per_step), remaining=per_step - min(taken, per_step))
    candidates = [group(i, v, s) for i, (v, s) in enumerate(raw) if v <= step]
    selection = select_batch(step, candidates, per_step, budget, "drop", part)
    gone = {*selection.groups, *selection.overdue}
    assert len(gone) == len(selection.groups) + len(selection.overdue)
    left = [g for g in candidates if g.index not in gone and g.state == "finished"]
    if selection.groups:
        assert schedulable(left, step, per_step, budget, per_step - part.remaining)
        if not part.remaining:
            assert all(g.first_version + budget > step for g in candidates if g.index not in gone)
    for g in candidates:
        if g.first_version + budget < step:
            assert g.index in selection.overdue


def test_check_budget_names_the_group_and_returns_the_worst():
    assert check_budget(5, [(0, 3), (1, 5)], 2) == 2
    with pytest.raises(BudgetExceeded, match="group 7, first token at version 1, would be trained at step 5"):
        check_budget(5, [(0, 3), (7, 1)], 2)


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_a_kept_environment_goes_on_up_to_its_limit_and_no_version_longer(made, age, limit):
    assert resumption(made, made + age, limit) == ("continue" if age in range(limit + 1) else "restart")
    assert resumption(made, made + limit, limit) == "continue"
    assert resumption(made, made + age, None) == "continue"
    assert resumption(-1, made + age, limit) == "continue"


@given(st.permutations(range(8)), st.integers(1, 8))
def test_in_order_parts_are_the_same_whoever_finishes_first(finishing: list[int], size: int):
    """Groups finish in any order; each part is taken as soon as it can be."""
    groups = OpenGroups(8, 0, "wait", in_order=True)
    for index in range(8):
        groups.add(OpenGroup(index=index, first_version=3, state="running"))
    parts: list[tuple[int, ...]] = []
    done: set[int] = set()
    for index in finishing:
        groups.add(OpenGroup(index=index, first_version=3, state="finished"))
        done.add(index)
        while left := 8 - sum(map(len, parts)):
            taken = min(size, left)
            chosen = groups.select(3, NextPart(groups=taken, remaining=left - taken)).groups
            expected = tuple(range(8 - left, 8 - left + taken))
            assert bool(chosen) == (done >= set(expected))  # never later than it must be
            if not chosen:
                break
            assert chosen == expected
            parts.append(chosen)
            for one in chosen:
                groups.remove(one)
    assert sum(map(len, parts)) == 8  # no deadlock
