"""The lease book against a model: who may do what with which attempt, whatever the order of calls and the time."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headway.rollout.leases import LeaseBook, LeaseEnding, LeaseKey, LeaseRefused

LEASE_S = 10.0
MEMBERS = [("3", 0), ("3", 1), ("4", 0)]
ENDINGS = [
    LeaseEnding("finished", "reward = 1"),
    LeaseEnding("finished", "reward = 0"),
    LeaseEnding("failed", "no disk"),
]
keys = st.sampled_from(MEMBERS)


class LeasesAgainstModel(RuleBasedStateMachine):
    """The model: for each member the state of each of its attempts, when its lease expires, what ended each attempt."""

    def __init__(self) -> None:
        super().__init__()
        self.book = LeaseBook(LEASE_S)
        self.now = 0.0
        self.attempts: dict[LeaseKey, list[str]] = {key: [] for key in MEMBERS}
        self.until: dict[LeaseKey, float] = {}
        self.ended: dict[tuple[LeaseKey, int], LeaseEnding] = {}

    def newest(self, key: LeaseKey) -> str:
        return self.attempts[key][-1] if self.attempts[key] else ""

    def over(self, key: LeaseKey, ending: LeaseEnding) -> None:
        self.attempts[key][-1] = "over"
        attempt = key, len(self.attempts[key])
        assert attempt not in self.ended
        self.ended[attempt] = ending

    def refused(self, key: LeaseKey, attempt: int) -> bool:
        known = 1 <= attempt <= len(self.attempts[key])
        return not (known and attempt == len(self.attempts[key]) and self.newest(key) == "leased")

    @rule(key=keys)
    def offer(self, key: LeaseKey) -> None:
        if self.newest(key) in ("offered", "leased"):
            with pytest.raises(ValueError, match="is"):
                self.book.offer(key, (int(key[0]), key[1]))
            return
        self.attempts[key].append("offered")
        assert self.book.offer(key, (int(key[0]), key[1])) == len(self.attempts[key])

    @rule()
    def lease(self) -> None:
        offered = [key for key in MEMBERS if self.newest(key) == "offered"]
        key = self.book.lease(self.now)
        assert key == (offered[0] if offered else None)  # MEMBERS are in order
        if key is not None:
            self.attempts[key][-1] = "leased"
            self.until[key] = self.now + LEASE_S

    @rule(key=keys, attempt=st.integers(0, 4))
    def renew(self, key: LeaseKey, attempt: int) -> None:
        if self.refused(key, attempt):
            with pytest.raises(LeaseRefused):
                self.book.renew(key, attempt, self.now)
        else:
            self.until[key] = self.now + LEASE_S
            self.book.renew(key, attempt, self.now)

    @rule(key=keys, attempt=st.integers(0, 4), ending=st.sampled_from(ENDINGS))
    def end(self, key: LeaseKey, attempt: int, ending: LeaseEnding) -> None:
        before = self.ended.get((key, attempt))
        if not self.refused(key, attempt):
            assert self.book.require(key, attempt, ending)
            self.book.end(key, ending)
            self.over(key, ending)
        elif before == ending:
            assert not self.book.require(key, attempt, ending)
        else:
            with pytest.raises(LeaseRefused) as refusal:
                self.book.require(key, attempt, ending)
            otherwise = before is not None and before.how == ending.how == "finished"
            ended = "finished_otherwise" if otherwise else "lease_ended"
            assert refusal.value.code == ("lease_unknown" if before is None else ended)

    @rule(seconds=st.floats(0, 15))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for key in MEMBERS:
            due = self.newest(key) == "leased" and self.until[key] <= self.now
            assert self.book.expire(key, self.now) is due
            if due:
                self.over(key, LeaseEnding("expired", "10 s after the last heartbeat of its worker"))

    @rule(key=keys)
    def withdraw(self, key: LeaseKey) -> None:
        ending = LeaseEnding("withdrawn", "the group has ended")
        self.book.end(key, ending)
        if self.newest(key) in ("offered", "leased"):
            self.over(key, ending)

    @invariant()
    def counts(self) -> None:
        newest = [self.newest(key) for key in MEMBERS]
        assert (self.book.offered, self.book.leased) == (newest.count("offered"), newest.count("leased"))
        for how in ("finished", "failed", "expired", "withdrawn"):
            assert self.book.counts[how] == [ending.how for ending in self.ended.values()].count(how)
        for key in MEMBERS:
            left_s = max(0.0, self.until[key] - self.now) if self.newest(key) == "leased" else None
            assert self.book.left_s(key, self.now) == left_s


LeasesAgainstModel.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLeasesAgainstModel = LeasesAgainstModel.TestCase


def test_attempts_of_former_processes_are_refused_with_what_happened() -> None:
    book = LeaseBook(LEASE_S)
    book.restore(("7", 0), 2)
    assert book.offer(("7", 0), (7, 0)) == 3
    with pytest.raises(LeaseRefused, match=r"attempt 2 has ended: .*the process of the run .* attempt 3 is offered"):
        book.require(("7", 0), 2, ENDINGS[0])


def test_restored_finish_is_repeated_and_not_changed() -> None:
    book = LeaseBook(LEASE_S)
    for ending in ENDINGS:
        book.restore(("7", 0), 2, ending)  # the first alone: afterwards it is known
    assert not book.require(("7", 0), 2, ENDINGS[0])
    with pytest.raises(LeaseRefused) as refusal:
        book.require(("7", 0), 2, ENDINGS[1])
    assert refusal.value.code == "finished_otherwise"
    assert book.counts == {"repeated": 1}


def test_ended_members_are_forgotten_beyond_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.rollout.leases._MAX_ENDED", 2)
    book = LeaseBook(LEASE_S)
    for index in range(4):
        book.offer((str(index), 0), (index, 0))
        assert book.lease(0.0) == (str(index), 0)
        book.end((str(index), 0), ENDINGS[0])
    assert not book.require(("3", 0), 1, ENDINGS[0])
    with pytest.raises(LeaseRefused) as refusal:
        book.require(("1", 0), 1, ENDINGS[0])
    assert refusal.value.code == "lease_unknown"
