"""Rules 1, 2, 3 and 7 together on random schedules: a small event simulation of generator and trainer.

Durations, first-token delays, replicas' update lags, parking, filters, failures, skipped steps and the publish
interval are random. A run that can't reach its last step (no event left) is a deadlock and fails the test.
"""

import heapq
import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.control.accounting import Accounting
from headway.control.admission import credit
from headway.control.length_bias import LengthBias
from headway.control.staleness import NextPart, OpenGroup, check_budget, select_batch


@dataclass
class Shape:
    """The random parameters of one simulated run."""

    seed: int
    per_step: int
    budget: int
    publish_interval: int
    policy: str
    replicas: int = 2
    size: int = 2
    concurrency: int = 12  # groups
    steps: int = 12
    lose: float = 0.0  # probability that a finished group is filtered or fails
    skip: float = 0.0  # probability that a step is skipped
    parking: bool = False  # updates park running groups
    stop_admitting: bool = False  # admit only what the remaining steps can train
    per_part: int = 99  # groups: a batch is committed in parts of so many


@dataclass
class Running:
    admitted_version: int
    lengths: list
    first: dict = field(default_factory=dict)  # member -> first-token version
    done: set = field(default_factory=set)
    parked: bool = False
    finish_s: dict = field(default_factory=dict)
    finished: bool = False


class Simulation:
    def __init__(self, shape):
        self.shape = shape
        self.random = random.Random(shape.seed)
        self.now = 0.0
        self.events = []
        self.order = 0
        self.version = 0
        self.applied = [0] * shape.replicas
        self.groups = {}
        self.in_batch = ()
        self.computing = False
        self.admitted = 0
        self.accounting = Accounting()
        self.bias = LengthBias(shape.per_step)
        self.trained = []
        self.worst = 0
        self.most_open = 0
        self.waits = 0

    def at(self, delay, action):
        self.order += 1
        heapq.heappush(self.events, (self.now + delay, self.order, action))

    def heavy(self):
        return min(40.0, self.random.paretovariate(1.1))

    # -- generator

    def dispatch(self):
        shape = self.shape
        while True:
            allowed = credit(
                open_groups=len(self.groups),
                completed_steps=self.version,
                applied_version=min(self.applied),
                groups_per_step=shape.per_step,
                budget=shape.budget,
            )
            running = sum(not g.finished for g in self.groups.values())
            left = shape.per_step * (shape.steps - self.version) - len(self.groups)
            if allowed == 0 or running >= shape.concurrency or (shape.stop_admitting and left <= 0):
                return
            index = self.admitted
            self.admitted += 1
            entry = Running(min(self.applied), [int(self.heavy() * 10) for _ in range(shape.size)])
            self.groups[index] = entry
            self.accounting.admit(index, shape.size)
            self.bias.admit(index, shape.size)
            self.most_open = max(self.most_open, len(self.groups))
            for member in range(shape.size):
                self.at(self.random.expovariate(2.0), lambda i=index, m=member: self.first_token(i, m))

    def first_token(self, index, member):
        entry = self.groups.get(index)
        if entry is None:
            return
        if entry.parked:  # it starts once the group is resumed
            self.at(0.3, lambda: self.first_token(index, member))
            return
        entry.first[member] = self.random.choice(self.applied)
        self.at(entry.lengths[member] / 10, lambda: self.finish(index, member))

    def finish(self, index, member):
        entry = self.groups.get(index)
        if entry is None:
            return
        if entry.parked:
            self.at(0.3, lambda: self.finish(index, member))
            return
        entry.done.add(member)
        if len(entry.done) == self.shape.size:
            entry.finished = True
            if self.random.random() < self.shape.lose:
                self.leave(index, self.random.choice(["filtered", "failed"]), "chance")

    def leave(self, index, ending, reason):
        entry = self.groups.pop(index)
        self.accounting.end_group(index, ending, reason, "engine" if ending == "failed" else None)
        for member, length in enumerate(entry.lengths):
            self.bias.end(index, ending, length, complete=member in entry.done)

    def update(self, version):
        for replica in range(self.shape.replicas):

            def apply(replica=replica):
                self.applied[replica] = max(self.applied[replica], version)

            self.at(self.random.expovariate(1.0), apply)
        if self.shape.parking:
            parked = [g for g in self.groups.values() if not g.finished and self.random.random() < 0.5]
            for position, entry in enumerate(parked):
                entry.parked = True
                self.at(0.5 + 0.2 * position, lambda entry=entry: setattr(entry, "parked", False))

    # -- trainer

    def candidates(self):
        for index, entry in self.groups.items():
            if index in self.in_batch:
                continue
            bound = min(entry.first.values()) if entry.finished else entry.admitted_version
            state = "finished" if entry.finished else "parked" if entry.parked else "running"
            yield OpenGroup(index=index, first_version=bound, state=state)

    def train(self):
        if self.computing or self.version >= self.shape.steps:
            return
        shape = self.shape
        left = shape.per_step - len(self.in_batch)
        taken = min(shape.per_part, left)
        part = NextPart(groups=taken, remaining=left - taken)
        candidates = list(self.candidates())
        chosen = select_batch(self.version, candidates, shape.per_step, shape.budget, shape.policy, part)
        assert shape.policy == "drop" or not chosen.overdue
        for index in chosen.overdue:
            self.leave(index, "overdue", "budget")
        self.waits += not chosen.groups
        if not chosen.groups:
            return
        assert len(chosen.groups) == taken
        firsts = [(i, min(self.groups[i].first.values())) for i in chosen.groups]
        self.worst = max(self.worst, check_budget(self.version, firsts, shape.budget))
        self.in_batch += chosen.groups
        self.computing = True
        self.at(self.random.uniform(0.2, 3.0), self.complete)

    def complete(self):
        self.computing = False
        if len(self.in_batch) < self.shape.per_step:
            return
        skipped = self.random.random() < self.shape.skip
        for index in self.in_batch:
            if not skipped:
                self.trained.extend(self.groups[index].lengths)
            self.leave(index, "discarded" if skipped else "trained", "step")
        self.in_batch = ()
        if skipped:
            return
        self.version += 1
        if self.version % self.shape.publish_interval == 0:
            self.update(self.version)

    def run(self):
        while self.version < self.shape.steps:
            self.train()
            self.dispatch()
            self.accounting.check(admitted=self.admitted * self.shape.size, open_now=len(self.groups) * self.shape.size)
            assert self.events, f"deadlock at step {self.version} with {len(self.groups)} open groups"
            self.now, _, action = heapq.heappop(self.events)
            action()
        return self


def shapes(policy):
    interval = st.integers(1, 4)
    return interval.flatmap(
        lambda p: st.builds(
            Shape,
            seed=st.integers(0, 10**6),
            per_step=st.integers(1, 4),
            budget=st.integers(p - 1, p + 5),
            publish_interval=st.just(p),
            policy=st.just(policy),
            replicas=st.integers(1, 3),
            size=st.integers(1, 3),
            concurrency=st.integers(1, 16),
            lose=st.sampled_from([0.0, 0.0, 0.3]),
            skip=st.sampled_from([0.0, 0.0, 0.2]),
            parking=st.booleans(),
            stop_admitting=st.booleans(),
            per_part=st.sampled_from([1, 2, 3, 99]),
        )
    )


@settings(deadline=None, max_examples=150)
@given(shapes("wait"))
def test_wait_keeps_the_budget_and_never_deadlocks(shape):
    run = Simulation(shape).run()
    assert run.worst <= shape.budget
    assert run.most_open <= shape.per_step * (shape.budget + 1)
    assert run.accounting.endings["overdue"] == 0
    assert run.accounting.endings["trained"] == shape.steps * shape.per_step * shape.size


@settings(deadline=None, max_examples=100)
@given(shapes("drop"))
def test_drop_keeps_the_budget_and_never_deadlocks(shape):
    run = Simulation(shape).run()
    assert run.worst <= shape.budget
    assert run.accounting.endings["trained"] == shape.steps * shape.per_step * shape.size


@settings(deadline=None, max_examples=60)
@given(shapes("wait"))
def test_under_wait_with_filters_off_what_is_trained_is_what_was_completed(shape):
    shape.lose = shape.skip = 0.0
    shape.stop_admitting = True
    run = Simulation(shape).run()
    assert run.groups == {}
    trained, completed = run.bias.lengths()
    assert trained == completed
    assert sum(trained.values()) == len(run.trained) == run.admitted * shape.size
    statistics = run.bias.statistics()
    assert (statistics.ks, statistics.scheduling_ks, statistics.censored_share) == (0.0, 0.0, 0.0)
    assert run.admitted == shape.steps * shape.per_step


def test_the_worst_staleness_reaches_the_budget_and_batches_really_wait():
    """The schedules above are not harmless: the bound is attained and the feasibility test binds."""
    runs = [Simulation(Shape(s, 2, 2, 1, "wait", steps=20)).run() for s in range(10)]
    assert max(run.worst for run in runs) == 2
    assert sum(run.waits for run in runs) > 0


def test_drop_under_heavy_tails_is_seen_as_scheduling_bias():
    shape = Shape(3, 2, 1, 1, "drop", steps=60, concurrency=16)
    run = Simulation(shape).run()
    statistics = run.bias.statistics()
    assert run.accounting.endings["overdue"] > 0
    assert statistics.scheduling_ks > 0.05
    assert statistics.filter_ks == 0.0
    assert statistics.cut_share > 0.0
