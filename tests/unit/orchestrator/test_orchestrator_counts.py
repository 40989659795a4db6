"""The counts that the orchestrator keeps of its open groups are those that a look at all of them gives."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st
from simulated_run import experiment_of

from headway.config.router import RouterConfig
from headway.control.routing.replicas import standing_of
from headway.control.staleness import OpenGroups
from headway.generator.routing.replica import Replica
from headway.orchestrator.state import RunningGroup, RunState, Signal
from headway.records.control import Knobs
from headway.records.rollout import FinishedGroup, Group
from headway.records.task import Task
from headway.runtime.clock import RealClock, VirtualClock
from headway.runtime.worker_slots import WorkerSlot
from headway.runtime.workers import WorkerSpec

SIZE = 3


def run_state() -> RunState:
    knobs = Knobs(open_groups=None, concurrent_rollouts=8, steps_per_publish=1)
    return RunState(clock=RealClock(), knobs=knobs, selectable=OpenGroups(2, 3, "wait"))


def group(index: int) -> Group:
    task = Task(task_id="t", prompt="p")
    return Group(index=index, task=task, prompt_ids=(1,), size=SIZE, admitted_version=0, admitted_s=0.0)


@given(st.lists(st.tuples(st.sampled_from(("open", "done", "park", "resume", "finish", "close")), st.integers(0, 5))))
def test_counts_of_rollouts_and_parked_groups_equal_a_scan(events: list[tuple[str, int]]) -> None:
    state, entries, index = run_state(), list[RunningGroup](), 0
    for now_s, (event, which) in enumerate(events):
        entry = entries[which % len(entries)] if entries else None
        if event == "open" or entry is None:
            entries.append(RunningGroup(group=group(index), unfinished=SIZE))
            state.open_group(entries[-1])
            index += 1
        elif event == "done" and entry.unfinished > entry.parked:
            state.member_done(entry)
        elif event == "park" and entry.parked < entry.unfinished:
            state.member_parked(entry, 1)
        elif event == "resume" and entry.parked:  # also of a group that ended meanwhile
            state.member_parked(entry, -1)
        elif event == "finish" and entry.group.index in state.running:
            state.finish_group(FinishedGroup(group=entry.group, rollouts=()), float(now_s))
        elif event == "close" and entry.group.index in state.running.keys() | state.finished.keys():
            ended = state.close_group(entry.group.index)
            assert ended is entry or isinstance(ended, FinishedGroup)
        assert state.running_rollouts == sum(one.unfinished - one.parked for one in state.running.values())
        assert state.parked_groups == sum(1 for one in state.running.values() if one.parked)
        assert state.finished_at_s.keys() == state.finished.keys()
        assert list(state.finished_at_s.values()) == sorted(state.finished_at_s.values())


def test_a_signal_wakes_those_that_have_something_to_do() -> None:
    async def main() -> None:
        signal, due = Signal(), list[int]()
        plain = asyncio.create_task(signal.wait(0))
        choosy = asyncio.create_task(signal.wait(0, lambda: bool(due)))
        cancelled = asyncio.create_task(signal.wait(0))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.sleep(0)
        signal.notify()
        await plain
        await asyncio.sleep(0)
        assert not choosy.done()
        due.append(1)
        await asyncio.sleep(0)
        assert not choosy.done()  # nobody has told it
        signal.notify()
        await choosy
        await signal.wait(0, lambda: bool(due))  # at once: it has changed since
        assert not signal._waiters

    asyncio.run(main())


@given(
    st.fixed_dictionaries(
        {name: st.booleans() for name in ("live", "draining", "idle", "yielded", "silent")}
        | {"update": st.integers(0, 2), "updating_since_s": st.none() | st.just(1.0)}
    ),
    st.sampled_from(("closed", "open", "half_open")),
    st.integers(0, 2),
    st.integers(0, 1),
)
def test_a_replicas_standing_is_its_conditions_also_where_nothing_is_the_matter(
    fields: dict[str, object], breaker: str, newest: int, oldest_version: int
) -> None:
    slot = WorkerSlot(WorkerSpec(name="generator-0", factory="none"), cast("Any", None), VirtualClock())
    replica = Replica(0, slot, experiment_of(Path("none")), RouterConfig())
    for name, value in fields.items():
        setattr(replica, name, value)
    now = 10.0
    if breaker != "closed":
        replica.breaker.trip(now if breaker == "open" else -1e6)
    expected = standing_of(replica._condition(now, oldest_version), newest, 5.0)
    assert replica.standing(now, newest, 5.0, oldest_version) == expected
