"""The orchestrator killed at every delicate point, over fake actors.

What must survive is in the buffer, the run's folder and the checkpoints: those are the real ones here. The same points
with real workers in every life, and random kills of every process: tests/slow/test_chaos.py.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import tiny_run

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

STEPS = 40
# N-th passage of the point, in the order of the lives.
THIN_KILLS = (
    "batch-committed:2",
    "checkpoint-files:1",
    "published:3",
    "step-computed:3",
    "checkpoint-rename:1",
    "group-finished:5",
    "step-completed:2",
    "log-durable:1",
    "checkpoint-pruning:1",
    "checkpoint-written:1",
    "applied:2",
    "group-admitted:3",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kills")
    tiny_run.write_inputs(path)
    return path


def survive(config: Path, faults: tuple[str, ...], last: str, steps: int) -> None:
    """Kill a run at each of ``faults``, one life after the other; the last life ends it, and nothing is lost."""
    resume: list[str] = []
    for fault in faults:
        command = tiny_run.train(config, *resume, fault=fault)
        assert command.process.returncode == -signal.SIGKILL, command.output
        assert f"fault {fault}" in command.journal.read_text(), f"{fault} never came about\n{command.output}"
        tiny_run.wait_for_exits(command)
        assert tiny_run.audited(command.run).completed_steps < steps
        resume = ["--resume"]
    command = tiny_run.train(config, *resume, fault=last)
    assert command.process.returncode == 0, command.output
    tiny_run.require_whole(command.run, steps)


def test_run_survives_kills_at_every_point_of_its_orchestrator(folder: Path, tmp_path: Path):
    config = tiny_run.write_experiment(
        tmp_path, run={"steps": STEPS}, ledger={"trace": False}, **tiny_run.inputs_in(folder)
    )
    survive(config, tuple(f"thin-{fault}" for fault in THIN_KILLS), "thin-none", STEPS)
    assert tiny_run.events_of(tmp_path / "run", "records_restored")  # step-completed:2
