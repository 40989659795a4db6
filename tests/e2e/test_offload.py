"""Runs whose sides take turns on one device and free their memory meanwhile (`run.offload`)."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from safetensors.numpy import load_file

from headway.models.offload import PREFIX
from headway.trainer.checkpoints import checkpoint_path

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]
STEPS = 5


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("inputs")
    tiny_run.write_inputs(folder)
    return tiny_run.inputs_in(folder)


def written(folder: Path, inputs: Any, rank: str, *, offload: bool, **sections: dict[str, Any]) -> Path:
    folder.mkdir()
    given = {
        "run": {"steps": STEPS, "deterministic": True, "offload": offload} | sections.pop("run", {}),
        "generator": {"devices": ["cpu:0"]},
        "trainer": {"devices": [rank]},
        "queue": {"budget": 0} | sections.pop("queue", {}),
        "ledger": {"trace": True},
    }
    return tiny_run.write_experiment(folder, **{**inputs, **given, **sections})


def weights_of(run: Path) -> dict[str, bytes]:
    file = checkpoint_path(run, STEPS) / "model" / "model.safetensors"
    return {name: array.tobytes() for name, array in load_file(file).items()}


@pytest.mark.parametrize("part", [None, pytest.param(2, marks=pytest.mark.long)])
def test_sides_in_turns_that_free_their_memory_train_the_weights_of_sides_apart(
    tmp_path: Path, inputs: Any, part: int | None
) -> None:
    for name, rank, offload in (("apart", "cpu:1", False), ("turns", "cpu:0", True)):
        config = written(tmp_path / name, inputs, rank, offload=offload, queue={"groups_per_part": part})
        command = tiny_run.train(config)
        assert command.process.returncode == 0, command.output
        tiny_run.require_whole(tmp_path / name / "run", STEPS)
        tiny_run.require_nothing_left(command)
    run = tmp_path / "turns" / "run"
    assert weights_of(run) == weights_of(tmp_path / "apart" / "run")
    for kind in ("offload", "onload"):
        told = tiny_run.events_of(run, kind)
        assert sorted(event.worker for event in told) == ["generator-0", "trainer"]  # each once
        assert all(event.data["moved_bytes"] > 0 for event in told)
    assert all(step.switch_s > 0 for step in tiny_run.steps_of(run)[1:])
    assert not tiny_run.events_of(run, "offload_failed")
    spans = (run / "trace.jsonl").read_text()
    for what in ("trainer: offload", "trainer: onload", "generator-0: offload"):
        assert what in spans


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["trainer-0", pytest.param("generator-0", marks=pytest.mark.long)])
@pytest.mark.long
def test_a_side_killed_while_it_is_away_costs_no_run(tmp_path: Path, inputs: Any, victim: str) -> None:
    config = written(
        tmp_path / "run", inputs, "cpu:0", offload=True, run={"steps": 30, "deterministic": False}, queue={"budget": 1}
    )
    run = tmp_path / "run" / "run"
    with tiny_run.headway("train", config, "--quiet", run=run) as command:
        for number in (3, 8):  # at whatever moment of a step: it is away half of the time
            command.until(lambda number=number: len(tiny_run.steps_of(run)) >= number, f"{number} steps")
            held = len(deaths(run, victim))
            command.until(lambda: held_by(command, victim), f"{victim} away")
            os.kill(command.pid_of(victim), signal.SIGKILL)
            command.until(lambda dead=held: len(deaths(run, victim)) > dead, "its death")
        assert command.wait() == 0, command.output
    tiny_run.require_whole(run, 30, drained=False)
    tiny_run.require_nothing_left(command)
    assert not list(run.rglob(f"{PREFIX}*"))


def deaths(run: Path, victim: str) -> list[Any]:
    name = "generator_died" if victim.startswith("generator") else "worker_died"
    return tiny_run.events_of(run, name)


def held_by(command: tiny_run.Command, worker: str) -> bool:
    """Whether a worker has its memory in a file now."""
    folder = Path(f"/proc/{command.pid_of(worker)}/fd")
    try:
        links = [os.readlink(entry) for entry in folder.iterdir()]
    except OSError:
        return False
    return any(link.startswith(str(command.run)) and link.endswith("(deleted)") for link in links)


def test_a_device_that_nobody_shares_is_refused_by_name(tmp_path: Path, inputs: Any) -> None:
    said = tiny_run.refused("train", written(tmp_path / "run", inputs, "cpu:1", offload=True))
    assert "run.offload = true" in said
    assert "no device is shared" in said
