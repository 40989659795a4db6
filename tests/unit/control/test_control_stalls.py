"""Which waits are stalls: expected times learned from durations, causes before consequences, hysteresis."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.control.stalls import LOOPS, Expectations, StallLimits, StallTracker, find_stalls, workers_to_inspect
from headway.records.stalls import Stack, Stall, Wait, WorkerStatus

LIMITS = StallLimits()
DURATIONS = st.lists(st.floats(0.001, 1000.0), min_size=3, max_size=600)


def expecting(kind: str = "trainer.train_step", durations: tuple[float, ...] = (1.0,) * 10) -> Expectations:
    expectations = Expectations(LIMITS)
    expectations.learn((kind, seconds) for seconds in durations)
    return expectations


def wait(owner: str, kind: str = "trainer.train_step", since_s: float = 0.0) -> Wait:
    return Wait(kind=kind, owner=owner, waiter="the orchestrator", since_s=since_s)


def status(worker: str, frame: str = "headway/trainer/learner.py:118 update", **fields: object) -> WorkerStatus:
    given = {"call": "train_step", "call_s": 60.0} | fields
    return WorkerStatus(worker=worker, stacks=(Stack(of="main", frames=("a.py:1 main", frame)),), **given)  # type: ignore[arg-type]


def found(
    waits: list[Wait], statuses: list[WorkerStatus], now_s: float, silent: dict[str, float] | None = None
) -> list[Stall]:
    return find_stalls(waits, {one.worker: one for one in statuses}, silent or {}, expecting(), now_s, LIMITS)


@given(DURATIONS)
def test_expected_time_exceeds_floor_and_quantile(durations: list[float]) -> None:
    expectations = Expectations(LIMITS)
    expectations.learn(("kind", seconds) for seconds in durations)
    recent = sorted(durations[-LIMITS.window :])
    expected_s = expectations.expected_s("kind")
    assert expected_s >= LIMITS.floor_s
    assert expected_s >= LIMITS.factor * recent[(99 * len(recent) + 99) // 100 - 1]


@given(DURATIONS, st.floats(1.0, 10.0))
def test_expected_time_grows_with_all_durations(durations: list[float], factor: float) -> None:
    slow, fast = Expectations(LIMITS), Expectations(LIMITS)
    fast.learn(("kind", seconds) for seconds in durations)
    slow.learn(("kind", factor * seconds) for seconds in durations)
    assert slow.expected_s("kind") >= fast.expected_s("kind") * (1 - 1e-9)


def test_expected_time_is_long_before_enough_is_known() -> None:
    assert expecting(durations=(1.0, 1.0)).expected_s("trainer.train_step") == LIMITS.unknown_s
    assert expecting().expected_s("trainer.train_step") == LIMITS.floor_s


def test_expected_time_survives_one_outlier_among_many() -> None:
    assert expecting(durations=(*(10.0,) * 200, 500.0)).expected_s("trainer.train_step") == 40.0


def test_one_slow_start_among_quick_waits_does_not_hide_a_stall_for_hours():
    kind = "trainer.train_step"
    assert expecting(durations=(0.0005,) * 20 + (0.9,)).expected_s(kind) == LIMITS.unknown_s
    assert expecting(durations=(0.2,) * 98 + (6.0,) * 2).expected_s(kind) == pytest.approx(6.0 * 30)  # a true tail


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [0.3, 1.0, 1.5])
def test_long_tailed_durations_raise_no_false_alarm(sigma: float) -> None:
    draw, expectations, alarms = random.Random(7), Expectations(StallLimits(floor_s=0.0)), 0
    for number in range(20_000):
        seconds = draw.lognormvariate(3.0, sigma)
        alarms += number > 200 and seconds > expectations.expected_s("kind")
        expectations.learn([("kind", seconds)])
    assert alarms == 0


def test_overdue_call_is_named_with_the_worker_and_its_line() -> None:
    [stall] = found([wait("trainer-0")], [status("trainer-0")], 31.0)
    assert stall.sentence(31.0) == (
        "stalled 31 s: the orchestrator waits in trainer.train_step for trainer-0, which is in "
        "headway/trainer/learner.py:118 update"
    )
    assert not stall.hard
    assert not found([wait("trainer-0")], [status("trainer-0")], 19.0)


def test_call_behind_another_is_not_judged() -> None:
    waits = [wait("generator-0", "generator.update_weights", 0.0), wait("generator-0", "trainer.train_step", 1.0)]
    assert not found(waits, [status("generator-0")], 100.0)


def test_missing_rank_is_named_by_the_one_that_waits() -> None:
    waiting = status("trainer-1", collective="all_reduce", collectives=42, in_collective_s=9.0)
    ended = status("trainer-0", call="", collectives=41, collective="all_reduce")
    [stall] = found([wait("trainer-1")], [waiting, ended], 9.0)
    assert stall.hard
    waits = "trainer-1 waits in all_reduce 42 for trainer-0"
    assert stall.cause == f"{waits}, which has ended its call after 41 collectives"
    assert {worker for worker, _ in stall.stacks} == {"trainer-0", "trainer-1"}


def test_rank_that_still_computes_is_missing_only_beyond_the_expected_time() -> None:
    waiting = status("trainer-1", collective="all_reduce", collectives=42, in_collective_s=15.0)
    statuses = [waiting, status("trainer-0", collectives=41, collective="all_reduce")]
    waits = [wait("trainer-0"), wait("trainer-1")]
    assert not found(waits, statuses, 16.0)
    [stall] = found(waits, statuses, 21.0)
    assert stall.cause.endswith("all_reduce 42 for trainer-0, which is in headway/trainer/learner.py:118 update")


def test_the_rank_for_which_groups_wait_in_turn_is_named() -> None:
    """Rank 3 computes, rank 2 waits for it in their context group, and the other group for both in the next sum."""
    behind = status("trainer-3", collectives=9, collective="all_to_all")
    second = status("trainer-2", collective="all_to_all", collectives=10, in_collective_s=30.0)
    ahead = [
        status(f"trainer-{rank}", collective="all_gather", collectives=11, in_collective_s=29.0) for rank in (0, 1)
    ]
    waits = [wait(f"trainer-{rank}") for rank in range(4)]
    [stall] = found(waits, [*ahead, second, behind], 31.0)
    assert stall.owner == "trainer-3"
    assert not found(waits, [*ahead, second, behind], 16.0), "it may still compute"


def test_ranks_in_one_collective_are_no_stall() -> None:
    statuses = [
        status(f"trainer-{rank}", collective="all_reduce", collectives=7, in_collective_s=9.0) for rank in (0, 1)
    ]
    assert not found([wait("trainer-0"), wait("trainer-1")], statuses, 10.0)


def test_stopped_worker_explains_the_wait_and_the_loops() -> None:
    waits = [wait(LOOPS, "a batch"), wait("trainer-0")]
    [stall] = found(waits, [WorkerStatus(worker="trainer-0", condition="stopped")], 700.0, {"trainer-0": 690.0})
    assert stall.cause.endswith("for trainer-0, which is stopped by a signal or a debugger")
    assert stall.hard


def test_loop_is_named_only_when_nothing_else_is() -> None:
    [stall] = found([wait(LOOPS, "a batch")], [], 601.0)
    assert stall.cause == "the orchestrator waits for a batch, longer than the 600 s expected"


def test_silent_worker_is_looked_at_and_so_are_its_fellow_ranks() -> None:
    silent_s = {"trainer-0": 5.0, "trainer-1": 0.0, "verifier-0": 0.0}
    assert workers_to_inspect([], silent_s, expecting(), 0.0, LIMITS) == {"trainer-0", "trainer-1"}
    assert workers_to_inspect([wait("verifier-0")], dict.fromkeys(silent_s, 0.0), expecting(), 9.0, LIMITS) == {
        "verifier-0"
    }


def test_stall_is_reported_once_and_ends_once() -> None:
    tracker, stall = StallTracker(LIMITS), found([wait("trainer-0")], [], 31.0)[0]
    seen = [
        tracker.update(stalls, float(at)) for at, stalls in enumerate([[stall], [stall], [stall], [], [stall], [], []])
    ]
    assert [len(begun) for begun, _ in seen] == [0, 1, 0, 0, 0, 0, 0]
    assert [len(over) for _, over in seen] == [0, 0, 0, 0, 0, 0, 1]


def test_loops_are_not_judged_right_after_a_stall() -> None:
    tracker, stall = StallTracker(LIMITS), found([wait("trainer-0")], [], 31.0)[0]
    loop = found([wait(LOOPS, "a batch")], [], 601.0)[0]
    for at in (0.0, 1.0):
        tracker.update([stall], at)
    for at in (2.0, 3.0, 4.0, 30.0):
        assert tracker.update([loop], at)[0] == []
    tracker.update([loop], 40.0)
    assert tracker.update([loop], 41.0)[0] == [loop]


def test_worker_that_knows_what_is_wrong_is_quoted_instead_of_its_line() -> None:
    waits = [wait("environment-0", "environment.reply")]
    (stall,) = found(
        waits, [status("environment-0", trouble="sandbox host a can't start a process: pids 9 of 9")], 700.0
    )
    assert stall.cause.endswith("for environment-0, which reports: sandbox host a can't start a process: pids 9 of 9")
    assert not stall.hard


def test_loop_that_waits_for_too_long_has_every_worker_asked_for_its_trouble() -> None:
    waits, silent_s = [wait(LOOPS, "a batch")], {"environment-0": 0.0, "generator-0": 0.0}
    assert workers_to_inspect(waits, silent_s, expecting(), 599.0, LIMITS) == set()
    assert workers_to_inspect(waits, silent_s, expecting(), 601.0, LIMITS) == set(silent_s)
    statuses = [status("generator-0"), status("environment-0", trouble="sandbox host a can't start a process")]
    [stall] = found(waits, statuses, 601.0)
    assert stall.owner == "environment-0"
    assert stall.cause.endswith("a batch, while environment-0 reports: sandbox host a can't start a process")
