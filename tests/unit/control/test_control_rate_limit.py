"""Rate limit and back-pressure: nobody is overtaken, forgotten or kept waiting for ever."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config.router import RouterConfig
from headway.control.routing.rate_limit import LONGEST_RETRY_S, RateLimit, RateLimited, TokenBucket


def limit(now: float = 0.0, **changed) -> RateLimit:
    return RateLimit(RouterConfig(**changed), now)


def test_a_bucket_refills_up_to_its_size_and_may_be_in_debt():
    bucket = TokenBucket(rate_per_s=2.0, burst_s=3.0, now=10.0)
    assert bucket.level(10.0) == 6.0
    bucket.take(5.0, 10.0)
    assert bucket.wait_s(2.0, 10.0) == 0.5
    assert bucket.level(99.0) == 6.0
    assert bucket.wait_s(100.0, 99.0) == 0.0  # more than it ever holds: out of a full one ...
    bucket.take(100.0, 99.0)
    assert bucket.level(99.0) == -94.0  # ... which is in debt then
    assert bucket.refill_s(1.0, 99.0) == 47.5
    bucket.give_back(1000.0, 99.0)
    assert bucket.level(99.0) == 6.0


def test_requests_wait_in_order_and_are_admitted_when_others_finish():
    one = limit()
    one.open_limit_tokens = 100
    assert one.offer("a", 60, 0, 0.0) == "admitted"
    assert one.offer("large", 60, 0, 1.0) == "waiting"
    assert one.offer("small", 10, 0, 2.0) == "waiting"  # there is room, but large goes before it
    assert one.offer("older", 10, -1, 3.0) == "waiting"
    assert (one.waiting, one.waiting_tokens, one.oldest_age_s(4.0)) == (3, 80, 3.0)
    assert one.decide(4.0) == [("older", None)]
    one.finish("a", 60, 5.0)
    assert one.decide(5.0) == [("large", None), ("small", None)]
    assert one.open_tokens == 80
    with pytest.raises(ValueError, match="already queued"):
        one.offer("small", 1, 0, 5.0)
    for name, tokens in (("large", 60), ("small", 10), ("older", 10)):
        one.finish(name, tokens, 6.0)
    assert (one.open_tokens, one.waiting, one.next_event_s(6.0)) == (0, 0, math.inf)


def test_one_that_is_larger_than_everything_goes_alone():
    one = limit()
    one.open_limit_tokens = 10
    assert one.offer("huge", 1000, 0, 0.0) == "admitted"
    assert one.offer("next", 1, 0, 0.0) == "waiting"
    one.finish("huge", 1000, 1.0)
    assert one.decide(1.0) == [("next", None)]


def test_rates_of_requests_and_tokens():
    one = limit(requests_per_s=2.0, burst_s=1.0)
    assert [one.offer(name, 1, 0, 0.0) for name in "abc"] == ["admitted", "admitted", "waiting"]
    assert one.next_event_s(0.0) == 0.5
    assert one.decide(0.4) == []
    assert one.decide(0.5) == [("c", None)]
    one = limit(tokens_per_s=10.0, burst_s=1.0)
    assert one.offer("a", 10, 0, 0.0) == "admitted"
    assert one.offer("b", 5, 0, 0.0) == "waiting"
    assert one.next_event_s(0.0) == 0.5
    one.finish("a", 2, 0.0)  # 8 weren't used
    assert one.decide(0.0) == [("b", None)]


def test_what_doesnt_fit_is_refused_with_a_time_to_come_again():
    one = limit(queue_requests=1, queue_s=10.0, requests_per_s=0.5, burst_s=2.0)
    assert one.offer("a", 1, 0, 0.0) == "admitted"
    assert one.offer("b", 1, 0, 0.0) == "waiting"
    refused = one.offer("c", 1, 0, 0.0)
    assert isinstance(refused, RateLimited)
    assert (refused.reason, refused.retry_after_s) == ("1 requests wait already", 4)  # two places of 2 s each
    one = limit(queue_s=10.0)
    one.open_limit_tokens = 100
    one.offer("a", 100, 0, 0.0)
    assert one.offer("b", 100, 0, 1.0) == "waiting"
    assert one.next_event_s(1.0) == 11.0
    ((name, refused),) = one.decide(11.0)
    assert name == "b"
    assert refused is not None
    assert refused.reason == "no capacity within 10 s"
    assert (one.refusals, one.waiting) == (1, 0)


def test_the_time_to_come_again_follows_the_measured_rate():
    one = limit(queue_requests=0)
    one.open_limit_tokens = 1000
    for second in range(1, 41):  # 100 tokens/s
        assert one.offer(str(second), 100, 0, float(second)) == "admitted"
        one.finish(str(second), 100, float(second))
    one.offer("long", 1000, 0, 40.0)
    refused = one.offer("next", 1000, 0, 40.0)
    assert isinstance(refused, RateLimited)
    assert 9 <= refused.retry_after_s <= 11
    refused = one.offer("endless", 10**9, 0, 40.0)
    assert isinstance(refused, RateLimited)
    assert refused.retry_after_s == LONGEST_RETRY_S


def test_a_name_that_left_the_queue_may_come_back_at_its_end():
    one = limit()
    one.open_limit_tokens = 10
    one.offer("a", 10, 0, 0.0)
    for name in ("b", "c"):
        one.offer(name, 10, 0, 0.0)
    one.withdraw("b")
    one.withdraw("unknown")
    one.offer("b", 10, 0, 1.0)
    one.finish("a", 10, 2.0)
    assert one.decide(2.0) == [("c", None)]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["offer", "offer", "offer", "finish", "withdraw", "decide"]),
        st.floats(0, 4, allow_nan=False),
        st.integers(1, 50),
        st.integers(0, 30),
    ),
    max_size=80,
)


class Books:
    """What a limiter should hold, kept by hand; every method drives it and compares."""

    def __init__(self, one: RateLimit, places: int, queue_s: float) -> None:
        self.one = one
        self.places = places
        self.queue_s = queue_s
        self.now = 0.0
        self.serial = 0
        self.waiting: dict[str, tuple[int, int, float, int]] = {}  # name -> (priority, serial, since, tokens)
        self.opened: dict[str, int] = {}
        self.admitted = 0

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while (due_s := self.one.next_event_s(self.now)) <= end:  # as whoever drives it does
            self.now = max(self.now, due_s) + 1e-6
            self.settle()
        self.now = max(self.now, end)

    def offer(self, tokens: int, priority: int) -> None:
        name = f"r{self.serial}"
        decision = self.one.offer(name, tokens, priority, self.now)
        if decision == "admitted":
            assert not self.waiting
            self._admit(name, tokens)
        elif decision == "waiting":
            self.waiting[name] = (priority, self.serial, self.now, tokens)
        else:
            assert len(self.waiting) == self.places
        self.serial += 1

    def finish(self, name: str, used_tokens: int) -> None:
        self.one.finish(name, used_tokens, self.now)
        del self.opened[name]

    def withdraw(self, name: str) -> None:
        self.one.withdraw(name)
        del self.waiting[name]

    def settle(self) -> None:
        for name, refused in self.one.decide(self.now):
            priority, number, since, tokens = self.waiting.pop(name)
            if refused is None:
                assert all((priority, number) < other[:2] for other in self.waiting.values())
                self._admit(name, tokens)
            else:
                assert self.now >= since + self.queue_s
                assert 1 <= refused.retry_after_s <= LONGEST_RETRY_S
        assert all(self.now < since + self.queue_s for _, _, since, _ in self.waiting.values())
        assert self.one.waiting == len(self.waiting) <= self.places
        assert self.one.open_tokens == sum(self.opened.values())
        assert self.one.waiting_tokens == sum(entry[3] for entry in self.waiting.values())

    def _admit(self, name: str, tokens: int) -> None:
        limit = self.one.open_limit_tokens
        assert name not in self.opened
        assert limit is None or not self.opened or sum(self.opened.values()) + tokens <= limit
        self.opened[name] = tokens
        self.admitted += 1


@given(
    steps=STEPS,
    places=st.integers(0, 5),
    queue_s=st.floats(1, 10),
    requests_per_s=st.none() | st.floats(0.6, 5),
    tokens_per_s=st.none() | st.floats(5, 50),
    open_limit=st.none() | st.integers(1, 120),
)
@settings(deadline=None, max_examples=300)
def test_everyone_is_admitted_or_refused_in_time_and_in_order(
    steps, places, queue_s, requests_per_s, tokens_per_s, open_limit
):
    """The queue stays within its bound, who waits is decided on at the latest after ``queue_s``, nobody with the same
    priority is overtaken, and nothing is left open in the end."""
    rates = {"requests_per_s": requests_per_s, "tokens_per_s": tokens_per_s}
    one = limit(queue_requests=places, queue_s=queue_s, burst_s=2.0, **rates)
    one.open_limit_tokens = open_limit
    books = Books(one, places, queue_s)
    for what, wait_s, tokens, priority in steps:
        books.pass_time(wait_s)
        if what == "offer":
            books.offer(tokens, priority // 10)
        elif what == "finish" and books.opened:
            books.finish(sorted(books.opened)[tokens % len(books.opened)], tokens)
        elif what == "withdraw" and books.waiting:
            books.withdraw(sorted(books.waiting)[tokens % len(books.waiting)])
        books.settle()
    if requests_per_s is not None:  # no more than the rate and one burst
        assert books.admitted <= requests_per_s * (books.now + 2.0) + 1 + 1e-6
    while books.waiting or books.opened:
        for name in list(books.opened):
            books.finish(name, 1)
        books.settle()
        if books.waiting:
            assert one.next_event_s(books.now) < math.inf
            books.pass_time(max(0.0, one.next_event_s(books.now) - books.now))
    assert one.open_tokens == one.waiting == 0
