"""Kill -9 at every delicate point and of every process; the history that survives trains every group exactly once."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
from pathlib import Path

import pytest
import tiny_run

from headway.trainer.checkpoints import find_checkpoints, verify

pytestmark = [pytest.mark.real, pytest.mark.timeout(420)]

STEPS = 60
# Where the orchestrator dies, one life after the other; N-th passage of the point. "all-": the trainer with it.
ORCHESTRATOR_KILLS = (
    "batch-committed:2",
    "all-checkpoint-files:1",
    "published:3",
    "step-computed:3",
    "all-checkpoint-rename:2",
    "group-finished:5",
    "step-completed:2",
    "log-durable:1",
    "all-checkpoint-pruning:1",
    "checkpoint-written:1",
    "applied:2",
    "group-admitted:3",
)
# Where the trainer alone dies; the run goes on by itself.
TRAINER_KILLS = ("checkpoint-files:1", "training:2", "publishing:3")


def struck(command: tiny_run.Command) -> bool:
    return "fault " in command.journal.read_text()


def completed_steps(run: Path) -> int:
    """From the batch log, read beside the run."""
    if not (run / "buffer.db").exists():
        return 0
    with sqlite3.connect(f"file:{run / 'buffer.db'}?mode=ro", uri=True, timeout=10.0) as connection:
        try:
            return connection.execute("SELECT count(*) FROM batches WHERE outcome = 'trained'").fetchone()[0]
        except sqlite3.OperationalError:  # its tables are being made
            return 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chaos")
    tiny_run.write_inputs(path)
    return path


def test_orchestrator_killed_at_every_point(folder: Path) -> None:
    config = tiny_run.write_experiment(
        folder, run={"directory": str(folder / "run"), "steps": STEPS}, verifier={"name": "tiny_verifiers:parity"}
    )
    run, resume = folder / "run", []
    for fault in ORCHESTRATOR_KILLS:
        command = tiny_run.train(config, *resume, fault=fault)
        assert command.process.returncode == -signal.SIGKILL, command.output
        assert struck(command), f"{fault} never came about\n{command.output}"
        tiny_run.wait_for_exits(command)
        assert tiny_run.audited(run).completed_steps < STEPS
        resume = ["--resume"]
    command = tiny_run.train(config, *resume)
    assert command.process.returncode == 0, command.output
    tiny_run.require_whole(run, STEPS)
    assert tiny_run.events_of(run, "records_restored")  # step-completed:2
    tiny_run.require_nothing_left(command)
    assert len(find_checkpoints(run)) == 2


def test_trainer_killed_alone(folder: Path, tmp_path: Path) -> None:
    config = tiny_run.write_experiment(tmp_path, run={"steps": 14}, **tiny_run.inputs_in(folder))
    command = tiny_run.train(config, fault=",".join(TRAINER_KILLS))
    assert command.process.returncode == 0, command.output
    assert command.journal.read_text().count("fault ") == len(TRAINER_KILLS)
    tiny_run.require_whole(tmp_path / "run", 14)
    assert len(tiny_run.events_of(tmp_path / "run", "worker_died")) == len(TRAINER_KILLS)
    assert [name for name, _ in command.workers()].count("trainer-0") == 1 + len(TRAINER_KILLS)
    tiny_run.require_nothing_left(command)


def test_random_kills_of_every_process(folder: Path, tmp_path: Path) -> None:
    """Workers one after the other, stopped ones among them, then the orchestrator, which resumes."""
    chance = random.Random(11)
    config = tiny_run.write_experiment(
        tmp_path,
        run={"steps": 100_000},
        rollout={"max_response_tokens": 40},
        checkpoint={"every_steps": 50},
        **tiny_run.inputs_in(folder),
    )
    run = tmp_path / "run"
    resume: list[str] = []
    for victims in (
        [("generator-0", signal.SIGKILL), ("verifier-0", signal.SIGKILL), ("trainer-0", signal.SIGKILL)],
        [("trainer-0", signal.SIGSTOP), ("generator-0", signal.SIGKILL)],
        [("generator-0", signal.SIGSTOP)],
    ):
        with tiny_run.headway("train", config, "--quiet", *resume, run=run) as command:
            for worker, number in victims:
                goal = completed_steps(run) + chance.randint(3, 10)
                command.until(lambda goal=goal: completed_steps(run) >= goal, f"step {goal}")
                os.kill(command.pid_of(worker), number)
                goal = completed_steps(run) + 4  # it goes on
                command.until(lambda goal=goal: completed_steps(run) >= goal, f"step {goal} after {worker}")
            command.process.kill()
            assert command.wait() == -signal.SIGKILL
            tiny_run.wait_for_exits(command)
        tiny_run.audited(run)
        resume = ["--resume"]
    steps = completed_steps(run) + 1  # so few publishes that what killed trainers left is not overwritten
    command = tiny_run.train(config, "--resume", f"--run.steps={steps}")
    assert command.process.returncode == 0, command.output
    tiny_run.require_whole(run, steps, drained=False)
    tiny_run.require_nothing_left(command)


@pytest.mark.long
def test_killed_while_the_best_weights_are_replaced(folder: Path, tmp_path: Path) -> None:
    tasks = folder / "held-out.jsonl"
    tasks.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    config = tiny_run.write_experiment(
        tmp_path,
        run={"steps": 2},
        evaluation={"test": "after"},
        **tiny_run.inputs_in(folder),
        **{"tasks.test": {"path": str(tasks)}},
    )
    best = tmp_path / "run" / "best"
    assert tiny_run.train(config).process.returncode == 0
    for steps, fault in enumerate(("renamed:1", "candidate-saved:1", "renamed:2"), start=3):
        command = tiny_run.train(config, "--resume", f"--run.steps={steps}", fault=fault)
        assert command.process.returncode == -signal.SIGKILL, command.output
        command = tiny_run.train(config, "--resume", f"--run.steps={steps}")
        assert command.process.returncode == 0, command.output
        assert verify(best).version == steps
        tiny_run.require_nothing_left(command)
