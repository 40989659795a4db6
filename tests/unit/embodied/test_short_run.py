"""A whole run of three steps, in real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from embodied_runs import digest, walk_experiment

from headway.embodied.driver import train


@pytest.mark.real
def test_three_steps_leave_a_whole_folder(tmp_path: Path):
    run = tmp_path / "run"
    summary = train(walk_experiment(run, run={"steps": 3}))
    assert (summary.finished, summary.steps, summary.accounting_balanced) == (True, 3, True)
    assert (summary.endings, summary.environment_steps) == ({"trained": 6}, 3 * 8 * 24)
    assert digest(run, 3)
    assert json.loads((run / "summary.json").read_text())["environment_steps"] == 576
    names = {path.name for path in run.iterdir()}
    assert names >= {
        "config.json",
        "ledger.jsonl",
        "checkpoints",
        "epoch",
        "logs",
        "lock",
        "summary.json",
        "trace.jsonl",
    }
    assert not (run / "workers").exists()


@pytest.mark.real
def test_time_limit_that_the_start_takes_leaves_a_step(tmp_path: Path):
    summary = train(walk_experiment(tmp_path / "run", run={"time_limit_s": 0.01}))
    assert (summary.ended, summary.accounting_balanced) == ("the time limit, at version 1", True)
