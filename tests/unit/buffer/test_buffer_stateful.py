"""Random transitions, with crashes (files copied without closing) in between: the books always balance."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headway.buffer.store import GroupBuffer
from headway.control.accounting import Accounting
from headway.records.generation import VersionSpan
from headway.records.rollout import Batch, Failure, FinishedGroup, Group, Rollout
from headway.records.task import Task

CAPACITY = 6
FAILURE = Failure(boundary="reward", cause="NaN", infrastructure=True)


def rollout(group, member, failed):
    return Rollout(
        group=group.index,
        member=member,
        prompt_ids=group.prompt_ids,
        response_ids=(1,) * (member + 1),
        response_logprobs=(-1.0,) * (member + 1),
        response_mask=(True,) * (member + 1),
        versions=(VersionSpan(version=group.admitted_version, tokens=member + 1),),
        failure=FAILURE if failed else None,
    )


class BufferMachine(RuleBasedStateMachine):
    """The model is plain Python: what each group holds, which batches ran, and the books kept alongside."""

    @initialize()
    def start(self):
        self.root = Path(tempfile.mkdtemp(prefix="headway-buffer-"))
        self.generation = 0
        self.buffer = GroupBuffer(self.root / "0.db", CAPACITY)
        self.accounting = Accounting()
        self.groups = {}  # index -> (group, {member: rollout}, state)
        self.step = 0
        self.log = {}
        self.parts = {}
        self.pending = None
        self.released = 0

    def teardown(self):
        if hasattr(self, "buffer"):
            assert self.buffer.audit() == []
            self.buffer.close()
            shutil.rmtree(self.root)

    def pick(self, data, *states):
        return data.draw(st.sampled_from([i for i, (_, _, s) in self.groups.items() if s in states]))

    def has(self, *states):
        return any(s in states for _, _, s in getattr(self, "groups", {}).values())

    def end_members(self, index, ending, reason):
        for member in range(self.groups[index][0].size):
            done = self.groups[index][1].get(member)
            if done is None or done.failure is None:
                self.accounting.end(index, member, ending, reason)
        del self.groups[index]

    @precondition(lambda self: len(self.groups) < CAPACITY)
    @rule(size=st.integers(1, 3))
    def admit(self, size):
        index = self.buffer.next_index
        task = Task(task_id=str(index), prompt="p")
        group = Group(index=index, task=task, prompt_ids=(1, 2), size=size, admitted_version=self.step, admitted_s=0.0)
        self.buffer.admit(group)
        self.accounting.admit(index, size)
        self.groups[index] = (group, {}, "open")

    def enter(self, index, done):
        self.groups[index][1][done.member] = done
        if done.failure is not None:
            self.accounting.end(index, done.member, "failed", "reward", "reward")

    @precondition(lambda self: self.has("open"))
    @rule(data=st.data(), failed=st.sets(st.integers(0, 2)), ending=st.sampled_from([None, None, "filtered", "failed"]))
    def finish_group(self, data, failed, ending):
        index = self.pick(data, "open")
        group, members, _ = self.groups[index]
        whole = tuple(rollout(group, m, m in failed) for m in range(group.size))
        self.buffer.finish_group(FinishedGroup(group=group, rollouts=whole), ending, "outcome")
        for done in whole:
            self.enter(index, done)
        self.groups[index] = (group, members, "buffered")
        if ending is not None:
            self.end_members(index, ending, "outcome")

    @precondition(lambda self: self.has("open", "buffered"))
    @rule(data=st.data(), ending=st.sampled_from(["overdue", "pruned", "discarded", "failed"]))
    def end_group(self, data, ending):
        index = self.pick(data, "open", "buffered")
        self.buffer.end_group(index, ending, "why")
        self.end_members(index, ending, "why")

    @precondition(lambda self: self.pending is None and self.has("buffered"))
    @rule(data=st.data())
    def commit_batch(self, data):
        ready = sorted(i for i, (_, _, s) in self.groups.items() if s == "buffered")
        chosen = tuple(sorted(data.draw(st.lists(st.sampled_from(ready), min_size=1, unique=True))))
        self.buffer.commit_batch(Batch(step=self.step, groups=chosen))
        self.pending = [chosen]
        for index in chosen:
            self.groups[index] = (*self.groups[index][:2], "batched")

    @precondition(lambda self: self.pending is not None and self.has("buffered"))
    @rule(data=st.data())
    def commit_further_part(self, data):
        ready = sorted(i for i, (_, _, s) in self.groups.items() if s == "buffered")
        chosen = tuple(sorted(data.draw(st.lists(st.sampled_from(ready), min_size=1, unique=True))))
        self.buffer.commit_batch(Batch(step=self.step, groups=chosen), further=True)
        self.pending.append(chosen)
        for index in chosen:
            self.groups[index] = (*self.groups[index][:2], "batched")

    @precondition(lambda self: self.pending is not None)
    @rule(skip=st.sampled_from([False, False, True]))
    def complete_step(self, skip):
        self.buffer.complete_step(self.step, "skipped" if skip else "trained")
        reason = "skipped" if skip else f"step {self.step}"
        if not skip:
            self.log[self.step] = [(self.groups[i][0], self.groups[i][1]) for part in self.pending for i in part]
            self.parts[self.step] = self.pending
        for index in [i for part in self.pending for i in part]:
            self.end_members(index, "discarded" if skip else "trained", reason)
        self.pending = None
        self.step += not skip

    @precondition(lambda self: self.step > self.released)
    @rule(data=st.data())
    def checkpoint(self, data):
        self.buffer.make_durable()
        self.released = data.draw(st.integers(self.released, self.step))
        self.buffer.release_covered(self.released)

    @rule(clean=st.booleans())
    def restart(self, clean):
        old = self.root / f"{self.generation}.db"
        self.generation += 1
        if clean:
            self.buffer.close()
        for file in self.root.glob(f"{old.name}*"):
            shutil.copy(file, self.root / file.name.replace(old.name, f"{self.generation}.db"))
        self.buffer.close()
        self.buffer = GroupBuffer(self.root / f"{self.generation}.db", CAPACITY)
        assert self.buffer.audit() == []

    @invariant()
    def it_holds_what_the_model_holds(self):
        if not hasattr(self, "buffer"):
            return
        records = {r.group.index: r for r in self.buffer.open_groups()}
        assert records.keys() == self.groups.keys()
        for index, (group, members, state) in self.groups.items():
            assert records[index].group == group
            assert records[index].state == state
            assert {r.member: r for r in records[index].rollouts} == members
        assert self.buffer.statistics().used == len(self.groups) <= CAPACITY
        assert self.buffer.completed_steps == self.step
        assert self.buffer.consumed() == {s: [g.index for g, _ in groups] for s, groups in self.log.items()}

    @invariant()
    def the_books_balance(self):
        if not hasattr(self, "buffer"):
            return
        stored = self.buffer.accounting()
        assert stored.reasons == self.accounting.reasons
        assert stored.failures == self.accounting.failures
        self.accounting.check(**self.buffer.rollout_counts())
        stored.check(**self.buffer.rollout_counts())

    @invariant()
    def replay_has_every_payload_since_the_released_version(self):
        if not hasattr(self, "buffer"):
            return
        replayed = list(self.buffer.batches_since(self.released))
        expected = self.step - self.released + (self.pending is not None)
        assert [b.step for b in replayed] == list(range(self.released, self.released + expected))
        for batch in replayed:
            if batch.outcome == "trained":
                assert [(g.group, {r.member: r for r in g.rollouts}) for g in batch.groups] == self.log[batch.step]
            parts = self.parts[batch.step] if batch.outcome == "trained" else self.pending
            assert [tuple(g.group.index for g in part) for part in batch.parts] == parts


BufferMachine.TestCase.settings = settings(deadline=None, max_examples=25, stateful_step_count=40)
TestBufferMachine = BufferMachine.TestCase
