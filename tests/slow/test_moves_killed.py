"""Placements changed in mid-run: every process killed amid the change, and the run that changes its plan by itself."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import pytest
import tiny_run

from headway.config.control import KnobName
from headway.telemetry.ledger import EVENT_PLAN_CHANGED, EVENT_PLAN_KEPT
from tests.slow.test_chaos import completed_steps

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(1200)]

KILLS = 20
LONGEST_S = 2.5  # about as long as a move takes here
PLACES = (
    (["cpu:0", "cpu:1"], ["cpu:1"]),
    (["cpu:0", "cpu:1"], ["cpu:0", "cpu:1"]),
    (["cpu:1"], ["cpu:0"]),
    (["cpu:0"], ["cpu:1"]),
)
VICTIMS = ("trainer-", "generator-", "verifier-", "orchestrator")
# The controller is on, so that a resume keeps the placement, and comes to no decision of its own.
MOVING = {"mode": "act", "devices": "move", "pin": list(get_args(KnobName))}


def moves_begun(command: tiny_run.Command) -> int:
    return command.journal.read_text().count("move ")


def moves_ended(run: Path) -> int:
    """Moves that were made or taken back, in all of the run's lives."""
    return sum(len(tiny_run.events_of(run, name)) for name in (EVENT_PLAN_CHANGED, EVENT_PLAN_KEPT))


def newest(command: tiny_run.Command, kind: str) -> int | None:
    """Process id of the newest live worker of a kind."""
    alive = [pid for name, pid in command.workers() if name.startswith(kind) and not tiny_run.exit_of(pid)]
    return alive[-1] if alive else None


@pytest.mark.long
def test_twenty_kills_amid_moves_lose_nothing(tmp_path: Path) -> None:
    chance, kills, amid, resume = random.Random(5), 0, 0, list[str]()
    tiny_run.write_inputs(tmp_path)
    config = tiny_run.write_experiment(
        tmp_path, run={"steps": 100_000}, checkpoint={"every_steps": 50}, control=MOVING, ledger={"trace": False}
    )
    run = tmp_path / "run"
    while kills < KILLS:
        first, ended = completed_steps(run) // 2, moves_ended(run)
        moves = [(2 * n, *PLACES[n % len(PLACES)]) for n in range(first + 1, first + 400)]
        with tiny_run.headway("train", config, "--quiet", *resume, run=run, moves=moves) as command:
            while kills < KILLS:
                begun = moves_begun(command)
                command.until(lambda begun=begun: moves_begun(command) > begun, "another move")
                time.sleep(chance.uniform(0.0, LONGEST_S))
                victim = chance.choice(VICTIMS)
                begun = moves_begun(command) > moves_ended(run) - ended
                print(f"kill {kills}: {victim} at step {completed_steps(run)}, amid a move: {begun}", flush=True)
                kills, amid = kills + 1, amid + begun
                if victim == "orchestrator":
                    break
                if (process := newest(command, victim)) is not None:
                    os.kill(process, signal.SIGKILL)
                goal = completed_steps(run) + 1
                command.until(lambda goal=goal: completed_steps(run) >= goal, f"step {goal} after {victim}")
            command.process.kill()
            assert command.wait() == -signal.SIGKILL
            tiny_run.wait_for_exits(command)
        tiny_run.audited(run)
        resume = ["--resume"]
    steps = completed_steps(run) + 3
    command = tiny_run.train(config, "--resume", f"--run.steps={steps}")
    assert command.process.returncode == 0, command.output
    tiny_run.require_whole(run, steps, drained=False)
    tiny_run.require_nothing_left(command)
    assert amid >= KILLS // 2
    assert moves_ended(run) >= KILLS // 2


@pytest.mark.long  # 5 to 20 minutes, and a comparison of rates: by hand, on a quiet machine
def test_a_run_changes_its_plan_when_its_lengths_triple(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "parts" / "plan_drift.py"
    ended = subprocess.run(
        [sys.executable, str(script), "--directory", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(ended.stdout.splitlines()[-1])
    print(result)
    assert result["live_over_afresh"] >= 0.95
    assert not result["problems"]
