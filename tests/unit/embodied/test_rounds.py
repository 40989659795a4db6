"""Rounds of fragments: admission, selection under the budget, accounting, and counts of a resumed run."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.embodied.rounds import FragmentCounts, Rounds
from headway.records.errors import AccountingError, BudgetExceeded


def begin(rounds: Rounds, version: int, count: int) -> None:
    for _ in range(count):
        rounds.begin(version, None, None)


@settings(deadline=None)
@given(blocks=st.integers(1, 5), budget=st.integers(0, 3), steps=st.integers(1, 12), data=st.data())
def test_rounds_stay_within_the_budget_and_none_is_left(blocks: int, budget: int, steps: int, data: st.DataObject):
    rounds, version, largest = Rounds(blocks, budget, FragmentCounts(lives=())), 0, 0
    numbers: list[int] = []
    while version < steps:
        begin(rounds, version, rounds.admissible(version, steps))
        assert len(rounds) == min(budget + 1, steps - version)
        taken = rounds.take(version)
        numbers.append(taken.number)
        largest = max(largest, version - taken.version)
        skipped = data.draw(st.booleans()) and len(numbers) < 30
        rounds.end(taken, skipped=skipped)
        version += not skipped
        rounds.check()
    assert largest <= budget
    assert numbers == list(range(len(numbers)))
    assert rounds.accounting.endings["trained"] == blocks * steps
    assert rounds.open_fragments == rounds.accounting.open_rollouts == 0


def test_no_round_begins_behind_the_last_step():
    assert Rounds(2, 1, FragmentCounts(lives=())).admissible(10, 5) == 0  # a resume with fewer run.steps


def test_too_many_rounds_at_one_version_break_the_budget():
    rounds = Rounds(2, 1, FragmentCounts(lives=()))
    begin(rounds, 0, 3)
    for step in range(2):
        with pytest.raises((BudgetExceeded, AccountingError)):
            rounds.take(step)


def test_accounting_that_was_tampered_with_doesnt_balance():
    rounds = Rounds(2, 0, FragmentCounts(lives=()))
    begin(rounds, 0, 1)
    rounds.accounting.end(1, 0, "failed", "elsewhere")
    with pytest.raises(AccountingError, match="1 rollouts are open in the accounting, 2 in the system"):
        rounds.check()


def test_counts_of_a_checkpoint_have_what_is_open_and_a_resume_ends_it_failed():
    rounds = Rounds(2, 1, FragmentCounts(lives=()))
    begin(rounds, 0, 2)
    rounds.end(rounds.take(0), skipped=False)
    counts = rounds.counts(lives=(0, 1))
    assert (counts.admitted, counts.rounds, counts.ended) == (4, 1, (("trained", "step", 2),))
    # Two further fragments began before the kill: four in all are lost.
    resumed = counts.resumed(admitted=6)
    assert (resumed.admitted, resumed.lives) == (6, (1, 2))
    later = Rounds(2, 1, resumed)
    assert later.accounting.endings == {"trained": 2, "failed": 4}
    assert later.next_number == 1
    begin(later, 1, later.admissible(1, 5))
    later.end(later.take(1), skipped=False)
    ended = later.counts((1, 2)).resumed(admitted=10).ended
    assert ended == (
        ("trained", "step", 4),
        ("failed", "lost with its process", 4),
        ("failed", "lost with its process", 2),
    )


def test_resume_without_a_checkpoint_loses_all_fragments():
    assert FragmentCounts(lives=()).resumed(admitted=4).ended == (("failed", "lost with its process", 4),)
    assert FragmentCounts(lives=()).resumed(admitted=0).ended == ()
