"""Seeded kills and hangs of simulators, learner and driver at named points (`faulty_embodied.py`).

A step that hangs is noticed. Other work of a worker may take any time, and so may the driver's: what hangs there is
killed by hand, as a person would.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import faulty_embodied
import pytest
from embodied_runs import digest, walk_experiment

from headway.embodied.driver import train
from headway.records.ledger import StepRecord
from headway.telemetry.ledger import read_ledger
from headway.telemetry.summary import summarise

STEPS, BLOCKS, FRAGMENT_STEPS, CHECKPOINT_STEPS = 8, 2, 64, 2
FORMS = [(point, kind) for kind in ("kill", "hang") for point in faulty_embodied.POINTS]  # by seed
SLOW = {("put", "kill"), ("learned", "kill"), ("commit", "kill")}  # one of simulators, learner, driver each
SEEDS = [seed if FORMS[seed] in SLOW else pytest.param(seed, marks=pytest.mark.long) for seed in range(len(FORMS))]
PASSAGES = {  # the most that a run of so many steps has
    "step": STEPS * BLOCKS * FRAGMENT_STEPS,
    **dict.fromkeys(("put", "delivered"), STEPS * BLOCKS),
    **dict.fromkeys(("learn", "learned", "publish", "begun", "taken"), STEPS),
    **dict.fromkeys(("save", "saved", "commit", "committed"), STEPS // CHECKPOINT_STEPS),
}
EXPERIMENT = """
[run]
directory = "{run}"
steps = {steps}
seed = 3
[simulator]
environment = "embodied_runs:Walk"
arguments = {{ trouble = "{trouble}" }}
lanes = 8
block_lanes = 4
steps_per_fragment = {fragment_steps}
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
every_steps = {checkpoint_steps}
"""


def start(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    config, trouble = str(folder / "experiment.toml"), str(folder / "trouble")
    command = [sys.executable, faulty_embodied.__file__, trouble, "train", config, "--quiet", *options]
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output)


def run_to_its_end(folder: Path, *, kills_hung: bool) -> int:
    """Run, and resume when the driver has died; returns how often it was resumed."""
    process, resumes, hung = start(folder), 0, folder / "trouble" / "hung"
    deadline_s = time.monotonic() + 400
    while process.poll() != 0:
        assert time.monotonic() < deadline_s, (folder / "output.txt").read_text()
        if process.returncode is not None:
            assert process.returncode == -signal.SIGKILL, (folder / "output.txt").read_text()
            resumes += 1
            process = start(folder, *(["--resume"] if (folder / "run" / "config.json").exists() else []))
        if kills_hung and hung.exists():
            time.sleep(1.0)  # others work on meanwhile, until they wait for it
            os.kill(int(hung.read_text()), signal.SIGKILL)
            hung.unlink()
        time.sleep(0.02)
    return resumes


@pytest.mark.real
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", SEEDS)
def test_run_ends_balanced_whatever_is_killed_or_hangs(seed: int, tmp_path: Path):
    chance, (point, kind) = random.Random(seed), FORMS[seed]
    budget = chance.choice((0, 2))
    run, trouble = tmp_path / "run", tmp_path / "trouble"
    trouble.mkdir()
    sizes = {"steps": STEPS, "fragment_steps": FRAGMENT_STEPS, "checkpoint_steps": CHECKPOINT_STEPS}
    (tmp_path / "experiment.toml").write_text(EXPERIMENT.format(run=run, trouble=trouble, budget=budget, **sizes))
    (trouble / f"{point}.{kind}").write_text(str(chance.randint(1, PASSAGES[point])))
    resumes = run_to_its_end(tmp_path, kills_hung=point != "step")
    assert not (trouble / f"{point}.{kind}").exists()  # it has struck
    assert resumes == (point in faulty_embodied.DRIVER)
    lines = read_ledger(run)
    summary = summarise(lines)
    assert (summary.finished, summary.steps, summary.accounting_balanced) == (True, STEPS, True)
    assert summary.endings["trained"] == BLOCKS * STEPS
    assert summary.endings.get("failed", 0) % BLOCKS == 0  # whole rounds
    assert bool(summary.endings.get("failed")) <= bool(resumes)
    steps = [line for line in lines if isinstance(line, StepRecord)]
    assert [step.version for step in steps] == list(range(1, STEPS + 1))
    assert max(step.trajectory_staleness.max for step in steps) <= budget
    last = steps[-1].episodes
    assert last is not None
    assert last.constructions == BLOCKS + last.rebuilt
    assert bool(last.rebuilt) >= (point in faulty_embodied.SIMULATORS[:2])
    if point in faulty_embodied.LEARNER:  # simulators of the other stage are as they were
        undisturbed = walk_experiment(
            tmp_path / "undisturbed",
            run={"steps": STEPS},
            simulator={"steps_per_fragment": FRAGMENT_STEPS},
            trainer={"passes": 8, "learning_rate": 3e-4},
            queue={"budget": budget},
            algorithm={"correction": "vtrace"},
        )
        train(undisturbed)
        assert digest(run, STEPS) == digest(tmp_path / "undisturbed", STEPS)
