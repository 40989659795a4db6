"""kill -9 in the middle of writing: what was acknowledged is there, and the audit finds nothing wrong."""

import json
import os
import random
import signal
import subprocess
import sys

import pytest

from headway.buffer.audit import audit_run
from headway.buffer.store import GroupBuffer

pytestmark = pytest.mark.real

# Runs all transitions as fast as it can and acknowledges each on stdout once it is committed.
WRITER = """
import json, os, random, sys
from pathlib import Path
from headway.buffer.store import GroupBuffer
from headway.records.generation import VersionSpan
from headway.records.rollout import Batch, FinishedGroup, Group, Rollout
from headway.records.task import Task

run = Path(sys.argv[1]); chance = random.Random(int(sys.argv[2]))
buffer = GroupBuffer(run / "buffer.db", 24)

def say(*line):
    os.write(1, (" ".join(map(str, line)) + "\\n").encode())

def finish(group):
    whole = tuple(Rollout(group=group.index, member=m, prompt_ids=group.prompt_ids, response_ids=(7,) * 200,
                   response_logprobs=(-0.25,) * 200, response_mask=(True,) * 200,
                   versions=(VersionSpan(version=group.admitted_version, tokens=200),))
           for m in range(group.size))
    ending = "filtered" if chance.random() < 0.2 else None
    buffer.finish_group(FinishedGroup(group=group, rollouts=whole), ending, "chance"); say("finish", group.index)
    return ending is None

ready = []
pending = buffer.pending_batch()
if pending is not None:
    buffer.complete_step(pending.step, "trained"); say("step", pending.step)
for record in buffer.open_groups():
    if record.state == "buffered" or finish(record.group):
        ready.append(record.group.index)
say("ready")
while True:
    while len(ready) < 8:
        index = buffer.next_index
        group = Group(index=index, task=Task(task_id=str(index), prompt="p"), prompt_ids=(1, 2), size=4,
                      admitted_version=buffer.completed_steps, admitted_s=0.0)
        buffer.admit(group); say("admit", index)
        if finish(group):
            ready.append(index)
    step = buffer.completed_steps
    buffer.commit_batch(Batch(step=step, groups=tuple(sorted(ready[:4])))); say("commit", step, *sorted(ready[:4]))
    ready = ready[4:]
    buffer.complete_step(step, "trained"); say("step", step)
    if step % 10 == 9:
        buffer.make_durable()
        folder = run / "checkpoints" / f"step_{step + 1:08d}"
        partial = folder.with_suffix(".partial"); partial.mkdir(parents=True, exist_ok=True)
        consumed = {str(s): g for s, g in buffer.consumed().items()}
        (partial / "state.json").write_text(json.dumps({"version": step + 1, "consumed": consumed}))
        partial.rename(folder)
        buffer.release_covered(max(0, step - 9))
"""


@pytest.mark.slow
def test_nothing_acknowledged_is_lost_over_repeated_kills(tmp_path):
    chance = random.Random(5)
    acknowledged: dict[str, dict[int, list[int]]] = {"admit": {}, "finish": {}, "commit": {}, "step": {}}
    steps = 0
    for life in range(8):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(life)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        lines = []
        for line in writer.stdout:
            lines.append(line)
            if line == b"ready\n":
                break
        stop_after = chance.randint(1, 1500)
        for line in writer.stdout:
            lines.append(line)
            if len(lines) >= stop_after:
                break
        os.kill(writer.pid, signal.SIGKILL)
        lines += [line for line in writer.stdout if line.endswith(b"\n")]
        assert writer.wait() == -signal.SIGKILL
        for line in lines:
            kind, *numbers = line.decode().split()
            if kind in acknowledged:
                acknowledged[kind].setdefault(int(numbers[0]), [int(n) for n in numbers[1:]])

        report = audit_run(tmp_path)
        assert report.violations == []
        assert report.completed_steps >= steps
        steps = report.completed_steps
        buffer = GroupBuffer(tmp_path / "buffer.db", 24)
        consumed = buffer.consumed()
        # An admission is written with the next transition, which is its own group's: one may be missing, the last.
        assert buffer.next_index >= max(acknowledged["admit"])
        assert buffer.next_index > max(acknowledged["finish"])
        assert set(acknowledged["step"]) <= set(consumed)
        for step, groups in acknowledged["commit"].items():
            pending = buffer.pending_batch()
            logged = consumed.get(step) or [g.group.index for g in pending.groups] if pending else consumed[step]
            assert logged == groups, f"step {step} was committed with {groups}"
        still_open = {r.group.index: r for r in buffer.open_groups()}
        for index in acknowledged["finish"]:
            assert index not in still_open or still_open[index].state != "open"
        buffer.close()
    trained = [g for groups in consumed.values() for g in groups]
    assert len(trained) == len(set(trained)) > 100
    assert json.loads(max(tmp_path.glob("checkpoints/step_*/state.json")).read_text())["version"] > 0
