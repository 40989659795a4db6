"""Two orchestrators never both commit: any clocks within the drift, any delays, losses, crashes and partitions."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.runtime.epochs import lease as protocol
from headway.runtime.epochs.lease import DRIFT, EpochClaim, EpochLease, EpochRecord, successor

ORPHAN_S = 10.0


@dataclass
class Orchestrator:
    """A process with its own clock, which swaps and looks with arbitrary delays, or never gets an answer."""

    name: str
    rate: float  # seconds of its clock in one of the world's
    offset_s: float
    claim: EpochClaim
    lease: EpochLease | None = None
    busy_until_s: float = 0.0  # of the world's clock: it awaits an answer
    landing_s: float = 0.0  # when its operation reaches the register
    operation: tuple[str, EpochRecord, EpochRecord, float] | None = None
    answer: Any = None
    ended: bool = False
    takeovers: int = field(default=0)

    def now(self, world_s: float) -> float:
        return world_s * self.rate + self.offset_s


def act(one: Orchestrator, register: EpochRecord, world_s: float, random_: random.Random) -> EpochRecord:
    """One turn of an orchestrator; returns the register's new value."""
    if one.operation is not None:
        kind, expected, wanted, started_s = one.operation
        if one.answer is None and world_s >= one.landing_s:
            one.answer = ("look", register) if kind == "look" else ("swap", register == expected)
            if kind != "look" and register == expected:
                register = wanted
        if world_s >= one.busy_until_s and one.answer is not None:
            lost_reply = random_.random() < 0.1
            answer, one.operation, one.answer = one.answer, None, None
            if not lost_reply or kind == "look":
                receive(one, kind, answer[1], wanted, started_s, one.now(world_s))
            elif kind == "take":
                one.ended = True
            else:  # whether it was swapped isn't known: as the register's own record says, at the next attempt
                one.lease = reread(one, register, wanted, started_s)
        return register
    start(one, register, world_s, random_)
    return register


def reread(one: Orchestrator, register: EpochRecord, wanted: EpochRecord, started_s: float) -> EpochLease:
    assert one.lease is not None
    one.lease.renewed(register == wanted, wanted, started_s) if register in (wanted,) else None
    return one.lease


def start(one: Orchestrator, register: EpochRecord, world_s: float, random_: random.Random) -> None:
    now = one.now(world_s)
    delay_s = random_.choice([0.0, 0.1, 2.0, 15.0, 40.0]) if random_.random() < 0.3 else 0.0
    one.landing_s = world_s + delay_s * random_.random()
    one.busy_until_s = one.landing_s + delay_s * random_.random()
    one.answer = None
    if one.lease is None:
        one.operation = ("look", register, register, now)
    elif now >= one.lease.held_from_s + one.lease.renew_every_s:
        one.operation = ("renew", one.lease.record, one.lease.renewal(), now)


def receive(one: Orchestrator, kind: str, answer: Any, wanted: EpochRecord, started_s: float, now: float) -> None:
    if kind == "look":
        decision = one.claim.decide(answer, now)
        if decision == "refused":
            one.claim = EpochClaim(ORPHAN_S)  # the person tries again
        elif decision == "take":
            one.operation = ("take", answer, successor(answer, one.name), now)
            one.answer = None
    elif kind == "take":
        if answer:
            one.lease = EpochLease(record=wanted, orphan_s=ORPHAN_S, held_from_s=started_s)
            one.takeovers += 1
        else:
            one.claim = EpochClaim(ORPHAN_S)
    else:
        assert one.lease is not None
        one.lease.renewed(answer, wanted, started_s)
        one.ended = one.lease.lost


def history(seed: int, rates: list[float], turns: int) -> tuple[list[int], int]:
    """Epochs in the order in which commits of them stood, and the number of epochs taken."""
    random_ = random.Random(seed)
    register = EpochRecord()
    all_ = [
        Orchestrator(f"o{i}", rate, random_.uniform(-1e4, 1e4), EpochClaim(ORPHAN_S)) for i, rate in enumerate(rates)
    ]
    committed: list[int] = []
    world_s = 0.0
    for _ in range(turns):
        world_s += random_.choice([0.01, 0.3, 1.0]) if random_.random() < 0.98 else 30.0  # all stand still: suspended
        one = random_.choice(all_)
        if not one.ended:
            register = act(one, register, world_s, random_)
            if random_.random() < 0.002:
                one.ended = True  # kill -9
        for other in all_:
            if other.ended and random_.random() < 0.01:
                all_[all_.index(other)] = Orchestrator(
                    other.name + "'", other.rate, other.offset_s, EpochClaim(ORPHAN_S)
                )
            elif not other.ended and other.lease is not None and other.lease.may_commit(other.now(world_s)):
                committed.append(other.lease.record.epoch)
    return committed, register.epoch


@given(st.integers(0, 1 << 32), st.lists(st.floats(1.0, 1.0 + 0.9 * DRIFT), min_size=2, max_size=4))
@settings(deadline=None, max_examples=60)
def test_no_two_orchestrators_ever_commit_at_the_same_time(seed: int, rates: list[float]) -> None:
    committed, _ = history(seed, rates, turns=1500)
    assert committed == sorted(committed)


def test_epochs_are_taken_over_and_committed_in() -> None:
    """The histories above are worth something: epochs change hands, and commits stand in most of them."""
    found = [history(seed, [1.0, 1.05, 1.0], 3000) for seed in range(10)]
    assert sum(epoch for _, epoch in found) >= 30
    assert all(len(set(committed)) >= 2 for committed, _ in found)


def test_holder_that_renews_is_not_taken_from() -> None:
    claim = EpochClaim(ORPHAN_S)
    held = successor(EpochRecord(), "a")
    lease = EpochLease(record=held, orphan_s=ORPHAN_S, held_from_s=100.0)
    assert claim.decide(held, 5.0) == "wait"
    assert claim.decide(held, 15.9) == "wait"
    renewal = lease.renewal()
    lease.renewed(True, renewal, 102.0)
    assert claim.decide(renewal, 16.1) == "refused"
    assert lease.may_commit(111.9)
    assert not lease.may_commit(112.1)


def test_released_epoch_is_taken_at_once_and_a_failed_swap_loses_it() -> None:
    assert EpochClaim(ORPHAN_S).decide(EpochRecord(epoch=3, released=True), 0.0) == "take"
    lease = EpochLease(record=successor(EpochRecord(), "a"), orphan_s=ORPHAN_S, held_from_s=0.0)
    lease.renewed(False, lease.renewal(), 1.0)
    assert not lease.may_commit(1.0)
    assert protocol.RENEWALS_PER_LEASE * lease.renew_every_s == ORPHAN_S
