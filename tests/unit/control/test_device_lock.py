"""The device lock: every interleaving of three workers on two devices, deaths at every state, and its order."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.control.device_lock import OVERTAKES, DeviceLock
from headway.records.execution import LockChanges, LockStatistics, Participant

SETS = ("0", "1", "01")
STEPS = 3
BOUND = 1  # items between two workers


def party(name: str, devices: str, order: int = 0) -> Participant:
    return Participant(name=name, stage=f"stage-{name}", devices=frozenset(devices), order=order)


def lock_of(*parties: Participant, overtakes: int = OVERTAKES) -> DeviceLock:
    lock = DeviceLock(overtakes=overtakes)
    for one in parties:
        lock.add(one)
    return lock


# --- every interleaving -----------------------------------------------------------------------------------------


@dataclass
class Pipeline:
    """Worker 0 -> worker 1 -> worker 2. A worker waits for input, asks, computes, waits for room, hands on; it may keep
    its devices over a wait unless it is recalled. An item stays its consumer's input until its output is handed on.

    Phases: "wait" (for input), "ask", "compute", "room" (waits to hand on), "dead"."""

    lock: DeviceLock
    phases: list[str]
    done: list[int]
    memory: set[str]  # who is on its devices, by what grants told
    deaths: int

    def input_there(self, worker: int) -> bool:
        return self.done[worker] < (STEPS if worker == 0 else self.done[worker - 1])

    def room(self, worker: int) -> bool:
        return worker == len(self.done) - 1 or self.done[worker] - self.done[worker + 1] < BOUND

    def finished(self) -> bool:
        return min(self.done) == STEPS

    def moves(self) -> Iterator[tuple[str, int]]:
        for worker, phase in enumerate(self.phases):
            name = str(worker)
            holds = self.lock.holds(name)
            if phase == "dead":
                yield "memory_free", worker
                continue
            if self.deaths:
                yield "die", worker
            if phase == "wait" and self.input_there(worker):
                yield ("compute" if holds else "ask"), worker
            if phase == "compute":
                yield "computed", worker
            if phase == "room" and self.room(worker):
                yield "hand_on", worker
            if holds and phase in ("wait", "room"):
                yield "release", worker

    def make(self, move: str, worker: int) -> None:
        name = str(worker)
        if move == "ask":
            self.phases[worker] = "ask"
            self.took(self.lock.ask(name, 0.0))
        elif move == "compute":
            self.phases[worker] = "compute"
        elif move == "computed":
            self.phases[worker] = "room"
        elif move == "hand_on":
            self.phases[worker] = "wait"
            self.done[worker] += 1
        elif move == "release":
            self.took(self.lock.release(name, 0.0))
        elif move == "die":
            self.deaths -= 1
            self.phases[worker] = "dead"
            self.took(self.lock.mark_dead(name, 0.0))
        else:
            self.phases[worker] = "wait"
            self.memory.discard(name)
            self.took(self.lock.memory_free(name, 0.0))

    def took(self, changes: LockChanges) -> None:
        for grant in changes.grants:
            worker = int(grant.participant)
            assert self.phases[worker] == "ask"
            assert self.input_there(worker), "a grant without data"
            assert grant.onload == (grant.participant not in self.memory), "a needless or a missing load"
            self.memory -= set(grant.offload)
            self.memory.add(grant.participant)
            self.phases[worker] = "compute"
        for name in changes.recalls:
            assert self.lock.holds(name)
            assert self.lock.recalled(name)

    def check(self) -> None:
        for mine, other in itertools.combinations(self.lock.participants.values(), 2):
            if mine.devices & other.devices:
                assert not {mine.name, other.name} <= self.memory, "two parties on one device"
                assert not (self.lock.holds(mine.name) and self.lock.holds(other.name)), "two holders"
        for worker, phase in enumerate(self.phases):
            asked = [str(w) for w, p in enumerate(self.phases) if p == "ask"]
            assert not self.lock.holds(str(worker)) or phase in ("compute", "wait", "room")
            if phase == "compute":
                assert self.lock.holds(str(worker))
            if self.lock.holds(str(worker)):  # who is in somebody's way knows
                mine = self.lock.participants[str(worker)].devices
                wanted = any(self.lock.participants[name].devices & mine for name in asked)
                assert not wanted or self.lock.recalled(str(worker))

    def key(self) -> object:
        lock = vars(self.lock)
        asks = sorted(lock["_asks"].values(), key=lambda asked: asked.number)
        return (
            tuple(self.phases),
            tuple(self.done),
            self.deaths,
            frozenset(self.memory),
            frozenset(lock["_loaded"]),
            frozenset(lock["_dead"]),
            frozenset((name, hold.recalled_at_s) for name, hold in lock["_held"].items()),
            tuple((asked.participant.name, asked.overtaken) for asked in asks),
        )

    def copied(self) -> Pipeline:
        lock = DeviceLock.__new__(DeviceLock)
        for name, value in vars(self.lock).items():
            setattr(lock, name, copy.copy(value))
        for name in ("_asks", "_held"):
            setattr(lock, name, {key: copy.copy(value) for key, value in getattr(lock, name).items()})
        return Pipeline(lock, [*self.phases], [*self.done], {*self.memory}, self.deaths)


def explore(devices: tuple[str, ...], deaths: int) -> int:
    """Look at every state that can be reached; returns their count. Every state is checked, and from each all three
    workers can still finish (so no state is a deadlock); recalled holders that wait can release."""
    first = Pipeline(
        lock_of(*(party(str(order), held, order) for order, held in enumerate(devices))),
        ["wait"] * len(devices),
        [0] * len(devices),
        set(),
        deaths,
    )
    states = {first.key(): 0}
    before: list[list[int]] = [[]]
    ends = list[int]()
    queue = deque([first])
    while queue:
        state = queue.popleft()
        mine = states[state.key()]
        if state.finished():
            ends.append(mine)
            continue
        for move, worker in state.moves():
            after = state.copied()
            after.make(move, worker)
            after.check()
            key = after.key()
            if key not in states:
                states[key] = len(states)
                before.append([])
                queue.append(after)
            before[states[key]].append(mine)
    reached, todo = set(ends), [*ends]
    while todo:
        for state_number in before[todo.pop()]:
            if state_number not in reached:
                reached.add(state_number)
                todo.append(state_number)
    assert len(reached) == len(states), f"{len(states) - len(reached)} states from which the end can't be reached"
    return len(states)


@pytest.mark.parametrize("devices", list(itertools.product(SETS, repeat=3)), ids="-".join)
def test_every_interleaving_of_three_workers_on_two_devices(devices: tuple[str, ...]):
    assert explore(devices, deaths=0) > 100


@pytest.mark.parametrize(
    "devices", [("0", "0", "0"), ("0", "01", "1"), ("01", "01", "01"), ("01", "0", "1")], ids="-".join
)
def test_a_death_at_every_state(devices: tuple[str, ...]):
    assert explore(devices, deaths=1) > 1000


@settings(max_examples=200, deadline=None)
@given(st.data(), st.tuples(*[st.sampled_from(SETS)] * 3))
def test_each_hand_over_costs_a_switch_at_most(data: st.DataObject, devices: tuple[str, ...]):
    names = [party(str(order), held, order) for order, held in enumerate(devices)]
    state = Pipeline(lock_of(*names), ["wait"] * 3, [0] * 3, set(), 0)
    computed = 0
    while not state.finished():
        # a worker keeps its devices unless it is recalled, which is where switches are worth their cost
        moves = [(m, w) for m, w in state.moves() if m != "release" or state.lock.recalled(str(w))]
        move, worker = data.draw(st.sampled_from(moves))
        state.make(move, worker)
        computed += move == "computed"
    counts = state.lock.statistics(0.0)
    assert computed == 3 * STEPS
    assert counts.switches <= counts.grants <= computed
    alone = all(not a.devices & b.devices for a, b in itertools.combinations(names, 2))
    assert not alone or counts.switches == 0


# --- order ------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(SETS), st.integers(0, 2)), min_size=2, max_size=6),
    st.lists(st.integers(0, 99), max_size=60),
    st.integers(0, 3),
)
def test_no_ask_is_overtaken_for_ever(kinds: list[tuple[str, int]], moves: list[int], overtakes: int):
    lock = lock_of(*(party(str(i), held, order) for i, (held, order) in enumerate(kinds)), overtakes=overtakes)
    asks = dict[str, tuple[int, int]]()  # name -> (when, overtaken)
    for now, move in enumerate(moves):
        name = str(move % len(kinds))
        if name in asks:
            continue
        if lock.holds(name):
            changes = lock.release(name, now)
        else:
            asks[name] = now, 0
            changes = lock.ask(name, now)
        for grant in changes.grants:
            since, _ = asks.pop(grant.participant)
            for other, (asked, overtaken) in asks.items():
                if asked < since and lock.participants[other].devices & lock.participants[grant.participant].devices:
                    asks[other] = asked, overtaken + 1
                    assert overtaken + 1 <= overtakes
    while asks:  # holders give up in any order: all are served
        holder = next(name for name in lock.participants if lock.holds(name))
        for grant in lock.release(holder, 100).grants:
            del asks[grant.participant]


def test_the_furthest_downstream_comes_first_then_the_oldest():
    lock = lock_of(*(party(name, "0", order) for name, order in [("a", 0), ("b", 1), ("c", 1), ("d", 2)]))
    lock.ask("a", 0.0)
    for now, name in enumerate("cbd"):
        lock.ask(name, float(now))
    order = list[str]()
    holder = "a"
    while granted := lock.release(holder, 5.0).grants:
        holder = granted[0].participant
        order.append(holder)
    assert order == ["d", "c", "b"]


def test_a_free_device_is_kept_for_the_first_of_those_who_want_it():
    lock = lock_of(party("left", "0"), party("right", "1"), party("both", "01", 1), party("late", "0"))
    lock.ask("left", 0.0)
    lock.ask("right", 0.0)
    assert set(lock.ask("both", 1.0).recalls) == {"left", "right"}
    assert not lock.ask("late", 2.0).grants
    assert not lock.release("left", 3.0).grants  # device 0 waits for "both" with it
    granted = lock.release("right", 5.0).grants
    assert [(one.participant, one.offload, one.onload) for one in granted] == [("both", ("left", "right"), True)]
    assert lock.statistics(6.0) == LockStatistics(grants=3, switches=1, idle_wanted_s=2.0)


def test_who_asks_again_first_loads_nothing():
    lock = lock_of(party("a", "0"), party("b", "0", 1))
    assert lock.ask("a", 0.0).grants[0].onload
    lock.release("a", 1.0)
    assert not lock.ask("a", 2.0).grants[0].onload
    assert lock.ask("b", 3.0).recalls == ("a",)
    granted = lock.release("a", 4.0).grants[0]
    assert granted.onload
    assert granted.offload == ("a",)
    lock.mark_loaded("a")  # it couldn't leave
    lock.release("b", 5.0)
    assert not lock.ask("a", 6.0).grants[0].onload


def test_holders_in_the_way_are_named():
    lock = lock_of(party("generator-0", "0"), party("trainer", "01", 1))
    lock.ask("generator-0", 1.0)
    lock.ask("trainer", 3.0)
    said = "generator-0 (stage stage-generator-0) has 0 for 4.0 s, recalled 2.0 s ago"
    assert lock.blockers("trainer", 5.0) == {"generator-0": said}


def test_a_dead_partys_devices_are_taken_until_its_memory_is_free():
    lock = lock_of(party("a", "0"), party("b", "0", 1))
    lock.ask("a", 0.0)
    lock.ask("b", 1.0)
    assert not lock.mark_dead("a", 2.0).grants
    assert "dead; its memory may still be in use" in lock.blockers("b", 2.0)["a"]
    assert not lock.release("a", 3.0).grants  # a word from a process that has ended
    (granted,) = lock.memory_free("a", 4.0).grants
    assert granted.participant == "b"
    assert not granted.offload
    lock.ask("a", 5.0)
    assert lock.release("b", 6.0).grants[0].onload


def test_a_loaded_partys_death_blocks_its_devices_too():
    lock = lock_of(party("a", "0"), party("b", "0", 1))
    lock.ask("a", 0.0)
    lock.release("a", 1.0)
    lock.mark_dead("a", 2.0)
    assert not lock.ask("b", 3.0).grants
    assert lock.memory_free("a", 4.0).grants


def test_the_death_of_one_who_asks_lets_others_pass():
    lock = lock_of(party("left", "0"), party("both", "01", 1), party("right", "1"))
    lock.ask("left", 0.0)
    lock.ask("both", 0.0)
    lock.ask("right", 0.0)
    assert [one.participant for one in lock.mark_dead("both", 1.0).grants] == ["right"]
    lock.release("right", 1.0)
    lock.ask("both", 2.0)
    assert [one.participant for one in lock.withdraw("both", 3.0).grants] == []
    assert [one.participant for one in lock.ask("right", 3.0).grants] == ["right"]


def test_what_makes_no_sense_is_refused():
    lock = lock_of(party("a", "0"), party("b", "0"))
    lock.ask("a", 0.0)
    with pytest.raises(ValueError, match="'a' holds"):
        lock.ask("a", 0.0)
    lock.ask("b", 0.0)
    with pytest.raises(ValueError, match="'b' waits"):
        lock.ask("b", 0.0)
    with pytest.raises(ValueError, match="already"):
        lock.add(party("a", "1"))
    with pytest.raises(ValueError, match="no devices"):
        lock.add(party("c", ""))
    assert [one.participant for one in lock.remove("a", 1.0).grants] == ["b"]


def test_a_holder_is_recalled_once():
    lock = lock_of(party("a", "0"), party("b", "0"), party("c", "0"))
    lock.ask("a", 0.0)
    assert lock.ask("b", 1.0).recalls == ("a",)
    assert lock.ask("c", 2.0).recalls == ()
    assert lock.release("a", 3.0).recalls == ("b",)  # for c


def test_older_asks_overtake_nobody():
    downstream = [party(name, "0", 1) for name in ("d1", "d2", "d3", "d4")]
    lock = lock_of(*downstream, party("upstream", "0"))
    for now, name in enumerate(["d1", "d2", "d3", "upstream", "d4"]):
        lock.ask(name, float(now))
    holders = [lock.release(name, 9.0).grants[0].participant for name in ("d1", "d2", "d3", "d4")]
    assert holders == ["d2", "d3", "d4", "upstream"]
