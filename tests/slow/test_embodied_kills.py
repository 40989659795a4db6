"""Seeded kills and hangs of simulators, learner and driver, at moments that the seed chooses."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from embodied_runs import digest, pinned_children, walk_experiment

from headway.embodied.driver import train
from headway.records.ledger import StepRecord
from headway.telemetry.ledger import read_ledger
from headway.telemetry.summary import summarise

STEPS = 8
SEEDS = [pytest.param(seed, marks=pytest.mark.long) if seed >= 6 else seed for seed in range(24)]
EXPERIMENT = """
[run]
directory = "{run}"
steps = 8
seed = 3
[simulator]
environment = "embodied_runs:Walk"
arguments = {{ trouble = "{trouble}" }}
lanes = 8
block_lanes = 4
steps_per_fragment = 64
step_timeout_s = 2.0
devices = ["cpu:0"]
[policy]
hidden = [8]
[queue]
budget = {budget}
[algorithm]
correction = "vtrace"
[trainer]
passes = 8
minibatch = 64
devices = ["cpu:1"]
[checkpoint]
every_steps = 2
"""


def start(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "headway.cli.main", "train", str(folder / "experiment.toml"), "--quiet", *options]
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output)


def wait_for_step(run: Path, version: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a step has made ``version``, or the run has ended."""
    while process.poll() is None:
        if (run / "ledger.jsonl").exists() and f'"version":{version},'.encode() in (run / "ledger.jsonl").read_bytes():
            return
        time.sleep(0.01)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
def test_run_ends_balanced_whatever_is_killed(seed: int, tmp_path: Path):
    chance = random.Random(seed)
    victim = ("simulators", "learner", "driver", "hang")[seed % 4]
    budget = (seed // 4) % 2 * 2
    run, trouble = tmp_path / "run", tmp_path / "trouble"
    trouble.mkdir()
    (tmp_path / "experiment.toml").write_text(EXPERIMENT.format(run=run, trouble=trouble, budget=budget))
    process = start(tmp_path)
    resumes = 0
    for version in sorted(chance.sample(range(1, STEPS), 2)):
        wait_for_step(run, version, process)
        time.sleep(chance.uniform(0, 0.3))
        if victim == "hang":
            (trouble / "hang").touch()
        elif victim == "driver" and process.poll() is None:
            process.kill()
            process.wait()
            resumes += 1
            process = start(tmp_path, "--resume")
        elif process.poll() is None:
            for process_id in pinned_children(int(victim == "learner"), process.pid):
                os.kill(process_id, signal.SIGKILL)
    assert process.wait(300) == 0, (tmp_path / "output.txt").read_text()
    lines = read_ledger(run)
    summary = summarise(lines)
    assert (summary.finished, summary.steps, summary.accounting_balanced) == (True, STEPS, True)
    assert summary.endings["trained"] == 2 * STEPS
    assert summary.endings.get("failed", 0) % 2 == 0
    assert bool(summary.endings.get("failed")) <= bool(resumes)
    steps = [line for line in lines if isinstance(line, StepRecord)]
    assert [step.version for step in steps] == list(range(1, STEPS + 1))
    assert max(step.trajectory_staleness.max for step in steps) <= budget
    last = steps[-1].episodes
    assert last is not None
    assert last.constructions == 2 + last.rebuilt
    if victim == "learner":
        undisturbed = walk_experiment(
            tmp_path / "undisturbed",
            run={"steps": STEPS},
            simulator={"steps_per_fragment": 64},
            trainer={"passes": 8, "learning_rate": 3e-4},
            queue={"budget": budget},
            algorithm={"correction": "vtrace"},
        )
        train(undisturbed)
        assert digest(run, STEPS) == digest(tmp_path / "undisturbed", STEPS)
