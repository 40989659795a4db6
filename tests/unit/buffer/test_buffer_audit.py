"""The independent audit passes a healthy run and finds every kind of tampering."""

import json
import sqlite3
import subprocess
import sys

import pytest

from headway.buffer.audit import audit_run, main
from headway.buffer.store import GroupBuffer
from headway.records.generation import VersionSpan
from headway.records.rollout import Batch, FinishedGroup, Group, Rollout
from headway.records.task import Task


def finished(index, version, size=2):
    group = Group(
        index=index,
        task=Task(task_id=str(index), prompt="p"),
        prompt_ids=(1,),
        size=size,
        admitted_version=version,
        admitted_s=0.0,
    )
    rollouts = tuple(
        Rollout(
            group=index,
            member=m,
            prompt_ids=(1,),
            response_ids=(2,),
            response_logprobs=(-1.0,),
            response_mask=(True,),
            versions=(VersionSpan(version=version, tokens=1),),
        )
        for m in range(size)
    )
    return FinishedGroup(group=group, rollouts=rollouts)


def checkpoint(run, version, consumed):
    folder = run / "checkpoints" / f"step_{version:08d}"
    folder.mkdir(parents=True)
    state = {"version": version, "consumed": {str(step): groups for step, groups in consumed.items()}}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


@pytest.fixture
def run(tmp_path):
    """Groups 0-4 trained at steps 0-4 (0 and 1 released), 5 discarded by a skip, 6 filtered, 7 buffered,
    8 open; checkpoints of versions 2 and 4; step 5 pending with group 9."""
    buffer = GroupBuffer(tmp_path / "buffer.db", 20)
    for index in range(10):
        item = finished(index, version=max(0, buffer.completed_steps - 2))
        buffer.admit(item.group)
        if index == 8:
            continue
        if index == 6:
            buffer.finish_group(item, "filtered", "zero_variance")
            continue
        buffer.finish_group(item)
        if index < 6 or index == 9:
            buffer.commit_batch(Batch(step=buffer.completed_steps, groups=(index,)))
        if index < 5:
            buffer.complete_step(index, "trained")
        if index == 5:
            buffer.complete_step(5, "skipped", "nan")
        if index in (1, 3):
            checkpoint(tmp_path, index + 1, buffer.consumed())
    buffer.release_covered(2)
    buffer.close()
    return tmp_path


def test_a_healthy_run_passes_and_the_report_fits_one_screen(run, capsys):
    (run / "checkpoints" / "step_00000006.partial").mkdir()
    report = audit_run(run)
    assert report.violations == []
    assert report.groups == {"trained": 5, "discarded": 1, "filtered": 1, "buffered": 1, "open": 1, "batched": 1}
    assert report.rollouts == {"trained": 10, "discarded": 2, "filtered": 2, "open": 6}
    assert (report.completed_steps, report.skipped_steps, report.pending_step) == (5, 1, 5)
    assert (report.checkpoints, report.max_staleness) == ([2, 4], 2)
    assert main([str(run)]) == 0
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) < 30
    assert "ok: every finished group was trained exactly once" in printed
    assert "step_00000006.partial is incomplete" in printed


def test_it_runs_as_a_module_without_the_buffer(run):
    code = "import sys, headway.buffer.audit; print(sorted(m for m in sys.modules if m.startswith('headway.')))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "['headway.buffer', 'headway.buffer.audit']"
    done = subprocess.run([sys.executable, "-m", "headway.buffer.audit", str(run)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


TAMPERINGS = {
    "a group trained in two steps": ("UPDATE batches SET groups = '[[0]]' WHERE step = 1", "is in batch"),
    "a batch that never was": ("DELETE FROM batches WHERE step = 3", "is next"),
    "an ending lost": ("UPDATE rollouts SET ending = NULL WHERE grp = 2 AND member = 0", "its group is ended trained"),
    "an ending of another kind": ("UPDATE rollouts SET ending = 'overdue' WHERE grp = 2", "is overdue"),
    "no reason": ("UPDATE groups SET reason = '' WHERE idx = 6", "without a reason"),
    "a rollout lost": ("DELETE FROM rollouts WHERE grp = 4 AND member = 1", "1 of 2 rollouts"),
    "a group lost": ("DELETE FROM groups WHERE idx = 6", "gap"),
    "a payload lost": ("DELETE FROM payloads WHERE id >> 16 = 3", "0 payloads, 2 expected"),
    "a payload kept": ("INSERT INTO payloads VALUES (6 << 16, x'00')", "1 payloads, 0 expected"),
    "a parked member of an ended group": ("INSERT INTO partials VALUES (6 << 16, x'00')", "but isn't open"),
    "a task lost": ("UPDATE groups SET task = NULL WHERE idx = 8", "its task is missing"),
    "trained without a batch": (
        "UPDATE groups SET state = 'ended', ending = 'trained', reason = 'x' WHERE idx = 7",
        "the log differs",
    ),
    "a batched group without its batch": ("DELETE FROM batches WHERE step = 5 AND attempt = 1", "is in no batch"),
    "released too much": ("UPDATE meta SET value = 5 WHERE key = 'released_version'", "no checkpoint covers them"),
}


@pytest.mark.parametrize("name", TAMPERINGS)
def test_tampering_is_found(run, name, capsys):
    statement, expected = TAMPERINGS[name]
    with sqlite3.connect(run / "buffer.db") as connection:
        assert connection.execute(statement).rowcount > 0
    connection.close()
    violations = audit_run(run).violations
    assert any(expected in violation for violation in violations), violations
    assert main([str(run)]) == 4
    assert "FAILED" in capsys.readouterr().out


def test_a_checkpoint_that_disagrees_with_the_log_is_found(run):
    checkpoint(run, 5, {0: [0], 1: [1], 2: [3], 3: [3], 4: [4]})
    violations = audit_run(run).violations
    assert any("step 2 trained [3], the log has [2]" in v for v in violations)
    assert any("groups [3] were trained more than once" in v for v in violations)


def test_a_checkpoint_with_a_step_missing_or_unreadable_is_found(run):
    checkpoint(run, 5, {0: [0], 1: [1], 3: [3], 4: [4]})
    (run / "checkpoints" / "step_00000004" / "state.json").write_text("{")
    violations = audit_run(run).violations
    assert any("holds 4 steps, not the 5" in v for v in violations)
    assert any("step_00000004: unreadable state.json" in v for v in violations)


def test_nothing_to_audit_is_exit_code_2(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert main([]) == 2
    assert "does not exist" in capsys.readouterr().err
