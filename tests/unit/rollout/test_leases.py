"""The lease book against a model: who may do what with which attempt, whatever the order of calls and the time."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headway.rollout.leases import LeaseBook, LeaseRefused

LEASE_S = 10.0
MEMBERS = [("3", 0), ("3", 1), ("4", 0)]
keys = st.sampled_from(MEMBERS)


class LeasesAgainstModel(RuleBasedStateMachine):
    """The model: for each member the state of each of its attempts, and the newest lease's time and open calls."""

    def __init__(self) -> None:
        super().__init__()
        self.book = LeaseBook(LEASE_S)
        self.now = 0.0
        self.attempts: dict[tuple[str, int], list[str]] = {key: [] for key in MEMBERS}
        self.until: dict[tuple[str, int], float] = {}
        self.calls: dict[tuple[str, int], int] = {}
        self.said: dict[tuple[tuple[str, int], int], int] = {}
        self.accepted: list[tuple[tuple[str, int], int]] = []

    def newest(self, key: tuple[str, int]) -> str:
        return self.attempts[key][-1] if self.attempts[key] else ""

    def refused(self, key: tuple[str, int], attempt: int) -> bool:
        known = 1 <= attempt <= len(self.attempts[key])
        return not (known and attempt == len(self.attempts[key]) and self.newest(key) == "leased")

    @rule(key=keys)
    def offer(self, key: tuple[str, int]) -> None:
        if self.newest(key) in ("offered", "leased"):
            with pytest.raises(ValueError, match="is"):
                self.book.offer(key, (int(key[0]), key[1]))
            return
        self.attempts[key].append("offered")
        assert self.book.offer(key, (int(key[0]), key[1])) == len(self.attempts[key])

    @rule()
    def lease(self) -> None:
        offered = [key for key in MEMBERS if self.newest(key) == "offered"]
        lease = self.book.lease(self.now)
        if not offered:
            assert lease is None
            return
        assert lease is not None
        assert (lease.key, lease.attempt) == (offered[0], len(self.attempts[offered[0]]))  # MEMBERS are in order
        self.attempts[lease.key][-1] = "leased"
        self.until[lease.key], self.calls[lease.key] = self.now + LEASE_S, 0

    @rule(key=keys, attempt=st.integers(0, 4))
    def renew(self, key: tuple[str, int], attempt: int) -> None:
        if self.refused(key, attempt):
            with pytest.raises(LeaseRefused):
                self.book.renew(key, attempt, self.now)
        else:
            self.until[key] = self.now + LEASE_S
            assert self.book.renew(key, attempt, self.now) == self.until[key]

    @rule(key=keys, change=st.sampled_from([1, -1]))
    def call(self, key: tuple[str, int], change: int) -> None:
        if self.newest(key) == "leased" and self.calls[key] + change >= 0:
            self.calls[key] += change
            self.until[key] = self.now + LEASE_S
            self.book.count_call(key, change, self.now)

    @rule(key=keys, attempt=st.integers(0, 4), said=st.integers(0, 1))
    def finish(self, key: tuple[str, int], attempt: int, said: int) -> None:
        if (key, attempt) in self.said and len(self.attempts[key]) == attempt:
            if self.said[key, attempt] == said:
                assert not self.book.require(key, attempt, str(said))
                return
        elif not self.refused(key, attempt):
            assert self.book.require(key, attempt, str(said))
            self.book.finish(key, attempt, str(said))
            self.attempts[key][-1], self.said[key, attempt] = "finished", said
            self.accepted.append((key, attempt))
            return
        with pytest.raises(LeaseRefused) as refusal:
            self.book.require(key, attempt, str(said))
        known = 1 <= attempt <= len(self.attempts[key]) and self.attempts[key][attempt - 1] != "offered"
        assert (refusal.value.code == "lease_unknown") is not known

    @rule(key=keys, attempt=st.integers(0, 4))
    def fail(self, key: tuple[str, int], attempt: int) -> None:
        if self.refused(key, attempt):
            with pytest.raises(LeaseRefused):
                self.book.fail(key, attempt, "no idea")
        else:
            self.book.fail(key, attempt, "no idea")
            self.attempts[key][-1] = "over"

    @rule(seconds=st.floats(0, 15))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for key in MEMBERS:
            if self.newest(key) == "leased":
                due = not self.calls[key] and self.until[key] <= self.now
                assert self.book.expire(key, self.now) is due
                if due:
                    self.attempts[key][-1] = "over"

    @precondition(lambda self: any(self.attempts.values()))
    @rule(key=keys)
    def withdraw(self, key: tuple[str, int]) -> None:
        if self.attempts[key]:
            self.book.withdraw(key, "the group has ended")
            if self.newest(key) in ("offered", "leased"):
                self.attempts[key][-1] = "over"

    @invariant()
    def counts(self) -> None:
        newest = [self.newest(key) for key in MEMBERS]
        assert (self.book.offered, self.book.leased) == (newest.count("offered"), newest.count("leased"))
        assert len(set(self.accepted)) == len(self.accepted) == self.book.counts["finished"]
        for key in MEMBERS:
            if self.newest(key) == "leased":
                left = self.book.left_s(key, self.now)
                assert left == (None if self.calls[key] else max(0.0, self.until[key] - self.now))


LeasesAgainstModel.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLeasesAgainstModel = LeasesAgainstModel.TestCase


def test_attempts_of_former_processes_are_refused_with_what_happened() -> None:
    book = LeaseBook(LEASE_S)
    assert book.offer(("7", 0), (7, 0), after=2) == 3
    with pytest.raises(LeaseRefused, match=r"attempt 2 has ended: the process of the run .* attempt 3 is offered"):
        book.require(("7", 0), 2, "said")


def test_restored_finish_is_repeated_and_not_changed() -> None:
    book = LeaseBook(LEASE_S)
    book.restore(("7", 0), 2, "said")
    assert not book.require(("7", 0), 2, "said")
    with pytest.raises(LeaseRefused) as refusal:
        book.require(("7", 0), 2, "something else")
    assert refusal.value.code == "finished_otherwise"
    assert book.counts == {"repeated": 1, "refused": 1}


def test_ended_members_are_forgotten_beyond_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.rollout.leases._KEPT", 2)
    book = LeaseBook(LEASE_S)
    for index in range(4):
        book.offer((str(index), 0), (index, 0))
        book.lease(0.0)
        book.finish((str(index), 0), 1, "said")
    assert not book.require(("3", 0), 1, "said")
    with pytest.raises(LeaseRefused) as refusal:
        book.require(("1", 0), 1, "said")
    assert refusal.value.code == "lease_unknown"
