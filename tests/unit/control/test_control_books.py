"""Rule 7: books that can't be wrong silently."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.control.accounting import Accounting
from headway.records.errors import AccountingError
from headway.records.rollout import ENDINGS


def test_worked_example_of_the_docstring():
    books = Accounting()
    books.admit(0, 2)
    books.end(0, 0, "trained", "step")
    books.end(0, 1, "failed", "timeout", "engine")
    assert dict(books.endings) == {"trained": 1, "failed": 1}
    assert dict(books.failures) == {"engine": 1}
    assert books.open_rollouts == 0
    books.check(admitted=2, open_now=0)


def test_a_second_ending_is_refused_and_counts_nothing():
    books = Accounting()
    books.admit(0, 1)
    books.admit(1, 2)
    books.end(0, 0, "trained", "step 0")
    for call in (
        lambda: books.end(0, 0, "trained", "step 0"),
        lambda: books.end(1, 2, "trained", "step 0"),
        lambda: books.end_group(0, "overdue", "budget"),
    ):
        with pytest.raises(AccountingError):
            call()
    with pytest.raises(AccountingError, match="never admitted"):
        books.end(5, 0, "failed", "x")
    with pytest.raises(AccountingError, match="admitted again"):
        books.admit(0, 1)
    with pytest.raises(AccountingError, match="one of trained, filtered"):
        books.end(1, 0, "lost", "x")  # type: ignore[arg-type]
    assert books.endings.total() == 1
    books.check(admitted=3, open_now=2)


@pytest.mark.parametrize(("admitted", "open_now"), [(4, 2), (3, 1), (2, 2)])
def test_check_finds_any_difference(admitted, open_now):
    books = Accounting()
    books.admit(0, 3)
    books.end(0, 1, "filtered", "zero_variance")
    books.check(admitted=3, open_now=2)
    with pytest.raises(AccountingError, match=r"doesn.t balance"):
        books.check(admitted=admitted, open_now=open_now)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 4), max_size=12), st.randoms(use_true_random=False))
def test_any_order_of_endings_balances_and_restores(sizes, random):
    books = Accounting()
    for index, size in enumerate(sizes):
        books.admit(index, size)
    rollouts = [(g, m) for g, size in enumerate(sizes) for m in range(size)]
    random.shuffle(rollouts)
    cut = random.randint(0, len(rollouts))
    for g, m in rollouts[:cut]:
        ending = random.choice(ENDINGS)
        books.end(g, m, ending, "why", "engine" if ending == "failed" else None)
    books.check(admitted=len(rollouts), open_now=len(rollouts) - cut)
    recent, failures, filtered = books.take_recent()
    assert sum(recent.values()) == cut
    assert failures.get("engine", 0) == books.endings["failed"]
    assert sum(filtered.values()) == books.endings["filtered"]
    assert books.take_recent() == ({}, {}, {})

    left: dict[int, list[int]] = {}
    for g, m in rollouts[cut:]:
        left.setdefault(g, []).append(m)
    assert sorted(books.open_groups) == sorted(left)
    again = Accounting()
    again.restore(next_index=len(sizes), open_members=left, ended=dict(books.reasons), failures=books.failures)
    again.check(admitted=len(rollouts), open_now=len(rollouts) - cut)
    for g in left:
        again.end_group(g, "discarded", "end of run")
    again.check(admitted=len(rollouts), open_now=0)
    with pytest.raises(AccountingError):
        again.admit(len(sizes) - 1, 1) if sizes else again.end(0, 0, "failed", "x")
