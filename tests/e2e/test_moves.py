"""Placements changed in mid-run, real workers: nothing is lost, the weights are a staying run's, errors go back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_run

from headway.telemetry.ledger import EVENT_PLAN_CHANGED, EVENT_PLAN_KEPT
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


def test_every_kind_of_move_keeps_the_books(folder: Path, tmp_path: Path) -> None:
    moves = [
        (2, ["cpu:0", "cpu:1"], ["cpu:1"]),  # hybrid: a replica joins beside the rank
        (4, ["cpu:0", "cpu:1"], ["cpu:0", "cpu:1"]),  # temporal: a rank more
        (6, ["cpu:1"], ["cpu:0"]),  # spatial, the other way round
        (8, ["cpu:0"], ["cpu:1"]),  # the sides change places
    ]
    config = tiny_run.write_experiment(tmp_path, run={"steps": 12}, **tiny_run.inputs_in(folder))
    command = tiny_run.train(config, moves=moves)
    assert command.process.returncode == 0, command.output
    tiny_run.require_whole(tmp_path / "run", 12)
    tiny_run.require_nothing_left(command)
    changed = tiny_run.events_of(tmp_path / "run", EVENT_PLAN_CHANGED)
    assert [event.step for event in changed] == [2, 4, 6, 8]
    print([(event.detail, event.data["cost_s"]) for event in changed])
    assert not tiny_run.events_of(tmp_path / "run", "worker_died")
    placed = json.loads((tmp_path / "run" / "placement.json").read_text())
    assert placed["present"] == placed["configured"] == {"generator": ["cpu:0"], "trainer": ["cpu:1"]}


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
