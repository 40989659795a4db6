"""Placements changed in mid-run, real workers: nothing is lost, the weights are a staying run's, errors go back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
import tiny_run
from page_answers import words

from headway.config.control import KnobName
from headway.control.tuning.placement_outcome import MEASURED
from headway.telemetry.ledger import EVENT_CONTROL, EVENT_PLAN_CHANGED, EVENT_PLAN_KEPT
from headway.trainer.checkpoints import checkpoint_path

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moves")
    tiny_run.write_inputs(path)
    return path


def weights_of(run: Path, version: int) -> dict[str, bytes]:
    """The files of a checkpoint's model, and its optimiser's."""
    folder = checkpoint_path(run, version)
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.suffix in (".safetensors", ".pt")}


@pytest.mark.slow
def test_a_deterministic_run_that_moves_has_the_weights_of_one_that_stays(folder: Path, tmp_path: Path) -> None:
    outcomes: list[dict[str, bytes]] = []
    for name, moves in (
        ("stays", []),
        ("moves", [(2, ["cpu:0"], ["cpu:0"]), (3, ["cpu:1"], ["cpu:0"]), (4, ["cpu:0"], ["cpu:1"])]),
    ):
        place = tmp_path / name
        place.mkdir()
        config = tiny_run.write_experiment(
            place, run={"steps": 6, "deterministic": True}, queue={"budget": 0}, **tiny_run.inputs_in(folder)
        )
        command = tiny_run.train(config, moves=moves)
        assert command.process.returncode == 0, command.output
        tiny_run.require_whole(place / "run", 6)
        tiny_run.require_nothing_left(command)
        assert len(tiny_run.events_of(place / "run", EVENT_PLAN_CHANGED)) == len(moves)
        outcomes.append(weights_of(place / "run", 6))
    assert any(name.endswith(".safetensors") for name in outcomes[0])
    assert outcomes[0] == outcomes[1]


@pytest.mark.slow
def test_every_kind_of_move_keeps_the_books(folder: Path, tmp_path: Path) -> None:
    moves = [  # each placement lasts for some pulses: the trace has devices from them
        (30, ["cpu:0", "cpu:1"], ["cpu:1"]),  # hybrid: a replica joins beside the rank
        (60, ["cpu:0", "cpu:1"], ["cpu:0", "cpu:1"]),  # temporal: a rank more
        (90, ["cpu:1"], ["cpu:0"]),  # spatial, the other way round
        (120, ["cpu:0"], ["cpu:1"]),  # the sides change places
    ]
    config = tiny_run.write_experiment(tmp_path, run={"steps": 150}, **tiny_run.inputs_in(folder))
    command = tiny_run.train(config, moves=moves)
    assert command.process.returncode == 0, command.output
    tiny_run.require_whole(tmp_path / "run", 150)
    tiny_run.require_nothing_left(command)
    changed = tiny_run.events_of(tmp_path / "run", EVENT_PLAN_CHANGED)
    assert [event.step for event in changed] == [30, 60, 90, 120]
    print([(event.detail, event.data["cost_s"]) for event in changed])
    assert not tiny_run.events_of(tmp_path / "run", "worker_died")
    placed = json.loads((tmp_path / "run" / "placement.json").read_text())
    assert placed["present"] == placed["configured"] == {"generator": ["cpu:0"], "trainer": ["cpu:1"]}
    require_shown(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.long
def test_a_divided_model_moves_between_two_ranks_and_one(folder: Path, tmp_path: Path) -> None:
    both = ["cpu:0", "cpu:1"]
    moves = [(3, ["cpu:0"], ["cpu:1"]), (6, both, both)]
    trainer = {"devices": both, "shards": 2}
    config = tiny_run.write_experiment(tmp_path, run={"steps": 9}, trainer=trainer, **tiny_run.inputs_in(folder))
    command = tiny_run.train(config, moves=moves)
    assert command.process.returncode == 0, command.output
    tiny_run.require_whole(tmp_path / "run", 9)
    assert [event.step for event in tiny_run.events_of(tmp_path / "run", EVENT_PLAN_CHANGED)] == [3, 6]
    assert not tiny_run.events_of(tmp_path / "run", "worker_died")
    assert "gradients of 2 ranks and of one differ by" in (tmp_path / "run/logs/trainer-0.log").read_text()


def require_shown(run: Path) -> None:
    """Report and trace have the placements, their stages and what the changes cost."""
    assert "4 changes of plan in the run; the last at version 120" in " ".join(
        tiny_run.output_of("report", run).split()
    )
    page = words(run / "report.html")
    assert "Stages by placement" in page
    assert "spatial: generate on cpu:1; train on cpu:0 -> spatial: generate on cpu:0; train on cpu:1" in page
    tiny_run.output_of("trace", run, "--from-step", "0")
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    named = {
        (tracks[e["pid"], e["tid"]], e["name"]) for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) in tracks
    }
    for device in ("cpu:0", "cpu:1"):
        names = {name for track, name in named if track == f"device {device}"}
        assert any(name.startswith("trainer-0: step") for name in names), names
        assert any(name.startswith("generator-") and name.endswith("busy") for name in names), names
    assert ("plan", "generator: join on cpu:1") in named


def test_plan_auto_has_the_controller_move_the_run_or_says_why_it_cannot(folder: Path, tmp_path: Path) -> None:
    config = tiny_run.write_experiment(tmp_path, run={"steps": 3}, **tiny_run.inputs_in(folder))
    said = " ".join(tiny_run.refused("train", config, "--plan", "auto", '--trainer.devices=["cpu:0"]').split())
    assert "with one device there is one plan, temporal" in said
    assert not (tmp_path / "run" / "config.json").exists()
    command = tiny_run.train(config, "--plan", "auto")
    assert command.process.returncode == 0, command.output
    control = json.loads((tmp_path / "run" / "config.json").read_text())["control"]
    assert (control["mode"], control["devices"]) == ("act", "move")


@pytest.mark.slow
def test_a_move_that_fails_is_taken_back(folder: Path, tmp_path: Path) -> None:
    moves = [(2, ["cpu:0"], ["cpu:77"]), (3, ["cpu:0", "cpu:77"], ["cpu:1"]), (4, ["cpu:1"], ["cpu:77"])]
    config = tiny_run.write_experiment(tmp_path, run={"steps": 8}, **tiny_run.inputs_in(folder))
    command = tiny_run.train(config, moves=moves)
    assert command.process.returncode == 0, command.output
    tiny_run.require_whole(tmp_path / "run", 8)
    kept = tiny_run.events_of(tmp_path / "run", EVENT_PLAN_KEPT)
    assert [event.step for event in kept] == [2, 3, 4]
    assert all("cpu:77" in event.detail and "still spatial" in event.detail for event in kept), kept
    assert not (tmp_path / "run" / "placement.json").exists()


@pytest.mark.slow
def test_a_move_that_makes_the_run_slower_is_reverted_once(folder: Path, tmp_path: Path) -> None:
    control = {"mode": "act", "devices": "move", "pin": list(get_args(KnobName))}  # comes to no decision of its own
    config = tiny_run.write_experiment(tmp_path, run={"steps": 50}, control=control, **tiny_run.inputs_in(folder))
    command = tiny_run.train(config, moves=[(2, ["cpu:1"], ["cpu:0"], 1e6)])  # as if it had been a million samples/s
    assert command.process.returncode == 0, command.output
    tiny_run.require_whole(tmp_path / "run", 50)
    there, back = tiny_run.events_of(tmp_path / "run", EVENT_PLAN_CHANGED)
    assert there.step == 2
    assert back.step >= 2 + MEASURED
    assert back.detail.endswith("spatial: generate on cpu:0; train on cpu:1")
    said = [event.detail for event in tiny_run.events_of(tmp_path / "run", EVENT_CONTROL)]
    assert any(
        line.startswith("rollback: back to spatial: generate on cpu:0; train on cpu:1: the rate") for line in said
    )
