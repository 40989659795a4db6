"""Oversampling with real workers: parked members survive a kill of everything, discarded ones are accounted for."""

from __future__ import annotations

import os
import signal
import sqlite3
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import tiny_run

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("surplus")
    tiny_run.write_inputs(path)
    return path


def write(folder: Path, tmp_path: Path, steps: int, **queue: Any) -> Path:
    return tiny_run.write_experiment(
        tmp_path,
        run={"directory": str(tmp_path / "run"), "steps": steps},
        rollout={"max_response_tokens": 300},  # a random model ends its responses late: many are under way at a batch
        queue={"groups_per_step": 2, "oversampling": 3.0, **queue},
        generator={"slots": 24},
        **tiny_run.inputs_in(folder),
    )


def parked_members(run: Path) -> int:
    with sqlite3.connect(f"file:{run / 'buffer.db'}?mode=ro", uri=True, timeout=10.0) as connection:
        return connection.execute("SELECT count(*) FROM partials").fetchone()[0]


def summed(run: Path, field: str) -> dict[str, int]:
    total: dict[str, int] = {}
    for step in tiny_run.steps_of(run):
        for name, count in attrgetter(field)(step).items():
            total[name] = total.get(name, 0) + count
    return total


@pytest.mark.slow
@pytest.mark.long
def test_parked_members_survive_a_kill_of_everything(folder: Path, tmp_path: Path) -> None:
    config = write(folder, tmp_path, 40, surplus="park")
    run = tmp_path / "run"
    with tiny_run.headway("train", config, "--quiet", run=run) as command:
        command.until(lambda: (run / "buffer.db").exists() and tiny_run.steps_of(run), "a step")
        command.until(lambda: parked_members(run), "a parked member")
        pids = [command.process.pid, *(pid for _, pid in command.workers())]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        command.wait()
    kept = parked_members(run)
    assert kept > 0
    resumed = tiny_run.train(config, "--resume")
    assert resumed.process.returncode == 0, resumed.output
    report = tiny_run.audited(run)
    assert report.completed_steps == 40
    assert report.max_staleness <= 2
    assert sum(step.parkings for step in tiny_run.steps_of(run)) > kept
    assert summed(run, "endings").keys() == {"trained"}
    assert parked_members(run) == 0 or report.rollouts["open"] > 0
    tiny_run.require_nothing_left(resumed)


@pytest.mark.slow
def test_discarded_surplus_is_accounted_for(folder: Path, tmp_path: Path) -> None:
    config = write(folder, tmp_path, 10, surplus="discard", budget=0)
    ended = tiny_run.train(config)
    assert ended.process.returncode == 0, ended.output
    run = tmp_path / "run"
    report = tiny_run.audited(run)
    assert report.max_staleness == 0
    endings, tokens = summed(run, "endings"), summed(run, "tokens.ended")
    assert endings["trained"] == 10 * 2 * 4
    assert endings["discarded"] >= 10 * 4  # a group of three or more at each of ten steps
    assert tokens["discarded"] > tokens["trained"]
    assert report.rollouts["discarded"] == endings["discarded"]
    tiny_run.require_nothing_left(ended)
