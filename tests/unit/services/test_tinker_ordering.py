"""The rules of order and of once, for any interleaving."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.services.tinker.ordering import (
    RETAINED_S,
    ModelOrder,
    ReplyMark,
    RequestAdmission,
    admit,
    releasable,
    released_prefix,
    stream_start,
)


@given(st.permutations(range(8)), st.lists(st.integers(0, 7), max_size=8), st.sets(st.integers(0, 7), max_size=3))
def test_every_number_runs_once_in_order_however_they_come(
    arrivals: list[int], repetitions: list[int], refused: set[int]
) -> None:
    order, ran = ModelOrder(0), list[int]()
    for sequence in arrivals + repetitions:
        if sequence in refused:
            order.resolve(sequence)
        else:
            order.add(sequence, 0.0)
        while (ready := order.ready()) is not None:
            ran.append(ready)
            order.resolve(ready)
    assert ran == [number for number in range(8) if number not in refused]
    assert (order.next_sequence, len(order)) == (8, 0)


@given(st.sets(st.integers(0, 9)), st.integers(0, 9))
def test_a_gap_is_the_first_number_that_did_not_come_and_hides_nothing_before_it(
    arrivals: set[int], next_sequence: int
) -> None:
    order = ModelOrder(next_sequence)
    for sequence in sorted(arrivals):
        order.add(sequence, float(sequence))
    waiting = {number for number in arrivals if number >= next_sequence}
    missing = next(number for number in range(next_sequence, 11) if number not in waiting)
    behind = sorted(number for number in waiting if number > missing)
    gap = order.gap(100.0)
    assert order.behind_gap() == behind
    if not behind:
        assert gap is None
    else:
        assert gap is not None
        assert (gap.sequence, gap.age_s, gap.waiting) == (missing, 100.0 - min(behind), len(behind))


@given(st.lists(st.none() | st.floats(0, 2 * RETAINED_S), max_size=8), st.floats(0, 3 * RETAINED_S))
def test_a_reply_is_kept_until_it_was_fetched_and_a_later_one_was_and_ten_minutes_passed(
    fetched: list[float | None], now_s: float
) -> None:
    marks = [ReplyMark(sequence=number, fetched_s=fetched_s) for number, fetched_s in enumerate(fetched)]
    due = releasable(marks, now_s)
    for number, fetched_s in enumerate(fetched):
        later = any(other is not None for other in fetched[number + 1 :])
        assert (number in due) == (fetched_s is not None and later and now_s - fetched_s >= RETAINED_S)


@given(st.lists(st.integers(0, 12)))
def test_the_prefix_of_released_replies_grows_without_gaps(released: list[int]) -> None:
    prefix = released_prefix(3, released)
    assert set(range(3, prefix)) <= set(released)
    assert prefix not in released


@pytest.mark.parametrize(
    ("logged", "released_below", "admission"),
    [
        (None, 5, RequestAdmission.NEW),
        (b"x", 0, RequestAdmission.REPEATED),
        (b"y", 0, RequestAdmission.CONFLICTING),
        (None, 6, RequestAdmission.RELEASED),
    ],
)
def test_a_request_is_new_repeated_another_or_released(
    logged: bytes | None, released_below: int, admission: RequestAdmission
) -> None:
    assert admit(5, b"x", logged, released_below) is admission


def test_a_clone_of_a_sampling_client_has_a_stream_of_its_own() -> None:
    assert [stream_start(number) for number in (0, 7, 2_000_000_003)] == [0, 0, 2_000_000_000]
