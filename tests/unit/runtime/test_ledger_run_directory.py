"""The run directory: one holder, one experiment, nothing half-written."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headway.config.load import validate_experiment
from headway.config.schema import Experiment
from headway.records.errors import BufferCorrupt, ConfigurationError, HeadwayError, RunLocked
from headway.runtime import file_lock
from headway.runtime.run_directory import RunDirectory


def experiment(directory: Path, **run: object) -> Experiment:
    raw = {
        "run": {"directory": str(directory), **run},
        "model": {"path": "m"},
        "tasks": {"train": {"path": "t.jsonl"}},
    }
    return validate_experiment(raw, "test")


def test_begin_makes_the_layout_and_stores_the_experiment(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "deep" / "run")
    given = experiment(run.path, seed=7)
    with run:
        assert run.begin(given, resume=False) is None
        assert run.has_run()
        assert run.checkpoints.is_dir()
        assert run.logs.is_dir()
    assert run.read_experiment() == given


def test_a_second_holder_is_refused_with_the_first_ones_pid(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as first:
        first.begin(experiment(tmp_path), resume=False)
        second = RunDirectory(tmp_path)
        assert second.holder() == os.getpid()
        with pytest.raises(RunLocked, match=f"process {os.getpid()}"):
            second.begin(experiment(tmp_path), resume=True)
    assert second.holder() is None
    with second:
        second.begin(experiment(tmp_path), resume=True)


def test_a_killed_holder_leaves_no_lock(tmp_path: Path) -> None:
    code = (
        "import sys, time; from headway.runtime.run_directory import RunDirectory\n"
        "RunDirectory(sys.argv[1]).acquire(); print('held', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        assert RunDirectory(tmp_path).holder() == child.pid
        with pytest.raises(RunLocked, match=str(child.pid)):
            RunDirectory(tmp_path).acquire()
    finally:
        child.kill()
        child.communicate()
    with RunDirectory(tmp_path) as run:
        run.acquire()


def test_asking_who_holds_the_lock_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`holder` takes the lock for an instant; a start that meets it there tries again."""
    lock = tmp_path / "lock"
    lock.write_text("4711\n")  # of a run that was killed
    asking = os.open(lock, os.O_RDONLY)
    fcntl.flock(asking, fcntl.LOCK_SH)
    monkeypatch.setattr(file_lock.time, "sleep", lambda seconds: os.close(asking))
    with RunDirectory(tmp_path) as run:
        run.acquire()
        assert run.holder() == os.getpid()


def test_an_old_run_is_not_overwritten(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        run.begin(experiment(tmp_path), resume=False)
    with pytest.raises(ConfigurationError, match="--resume, or choose another"):
        RunDirectory(tmp_path).begin(experiment(tmp_path), resume=False)
    assert RunDirectory(tmp_path).holder() is None


def test_resume_needs_a_run_and_the_same_experiment(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no run to resume"):
        RunDirectory(tmp_path).begin(experiment(tmp_path), resume=True)
    with RunDirectory(tmp_path) as run:
        run.begin(experiment(tmp_path, steps=10), resume=False)
    with pytest.raises(ConfigurationError, match=r"run\.seed"):
        RunDirectory(tmp_path).begin(experiment(tmp_path, steps=10, seed=1), resume=True)
    with RunDirectory(tmp_path) as run:
        stored = run.begin(experiment(tmp_path, steps=20), resume=True)
    assert stored is not None
    assert stored.run.steps == 10
    assert run.read_experiment().run.steps == 20


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path)
    run.write_json(run.summary, {"steps": 1})

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(HeadwayError, match="No space left"):
            run.write_json(run.summary, {"steps": 2})
    assert json.loads(run.summary.read_text()) == {"steps": 1}
    assert os.listdir(tmp_path) == ["summary.json"]


def test_a_path_that_is_a_file_or_damaged_is_a_clear_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(ConfigurationError, match=r"run\.directory"):
        RunDirectory(file).acquire()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match="damaged"):
        RunDirectory(tmp_path).read_experiment()


def test_a_resume_without_the_buffer_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        run.begin(experiment(tmp_path), resume=False)
    with RunDirectory(tmp_path) as run:  # killed before its first step: nothing is lost
        run.begin(experiment(tmp_path), resume=True)
    (tmp_path / "ledger.jsonl").write_text('{"kind":"step","step":0,"version":1}\n')
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(
        BufferCorrupt, match=r"buffer\.db is missing, and the run can't be resumed without it.*Put it back"
    ):
        RunDirectory(tmp_path).begin(experiment(tmp_path), resume=True)
    (tmp_path / "ledger.jsonl").unlink()
    (tmp_path / "checkpoints" / "step_00000005").mkdir()
    with pytest.raises(BufferCorrupt, match=r"buffer\.db is missing"):
        RunDirectory(tmp_path).begin(experiment(tmp_path), resume=True)
    assert sorted([*(path.name for path in tmp_path.iterdir()), "ledger.jsonl"]) == before
