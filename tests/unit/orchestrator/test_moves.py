"""Moves: the order of their actions over all placements of three devices; what is refused; a resume's placement."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import tiny_run

from headway.config.load import changed_experiment
from headway.orchestrator.actors.placement_changer import (
    actions_between,
    planned_move,
    require_movable,
)
from headway.records.errors import ConfigurationError
from headway.records.plan import PlacementFile, RunPlacement
from headway.runtime.run_directory import RunDirectory, placement_of, with_saved_placement


def placements(devices: int) -> list[RunPlacement]:
    """All that use any of the devices, by each side, alone or both."""
    found: list[RunPlacement] = []
    for uses in itertools.product(("", "g", "t", "gt"), repeat=devices):
        sides = [tuple(f"cpu:{i}" for i, use in enumerate(uses) if side in use) for side in "gt"]
        if all(sides):
            found.append(RunPlacement(generator=sides[0], trainer=sides[1]))
    return found


def shared(placement: RunPlacement) -> set[str]:
    return set(placement.generator) & set(placement.trainer)


@pytest.mark.parametrize("devices", [2, 3])
def test_actions_lead_there_and_no_device_is_ever_in_more_use_than_a_placement_says(devices: int) -> None:
    for before, after in itertools.product(placements(devices), repeat=2):
        generator, trainer = set(before.generator), before.trainer
        allowed = shared(before) | shared(after)
        for action in actions_between(before, after):
            names = set(action.devices)
            if action.kind == "join":
                assert not names & generator
                generator |= names
            elif action.kind == "leave":
                assert names <= generator
                generator -= names
                assert generator, (before, after)  # requests have somewhere to go
            else:
                assert bool(trainer) == (action.kind == "stop")
                trainer = action.devices if action.kind == "start" else ()
            assert generator & set(trainer) <= allowed, (before, after, action)
        assert (generator, trainer) == (set(after.generator), after.trainer)


def test_what_both_have_is_not_touched() -> None:
    for before, after in itertools.product(placements(3), repeat=2):
        moved = [
            name for action in actions_between(before, after) for name in action.devices if action.kind in "joinleave"
        ]
        assert not set(moved) & (set(before.generator) & set(after.generator))
        if before.trainer == after.trainer:
            assert all(action.kind in ("join", "leave") for action in actions_between(before, after))
        if before == after:
            assert actions_between(before, after) == []


def test_a_trainer_that_is_down_is_only_started() -> None:
    down = RunPlacement(generator=("cpu:0",), trainer=())
    up = RunPlacement(generator=("cpu:0",), trainer=("cpu:1",))
    assert [action.kind for action in actions_between(down, up)] == ["start"]


def experiment(folder: Path, generator: list[str], trainer: list[str], **control: Any) -> Any:
    return tiny_run.experiment_of(
        tiny_run.write_experiment(
            folder,
            generator={"devices": generator},
            trainer={"devices": trainer},
            control={"mode": "act", "devices": "move", **control},
        )
    )


@pytest.mark.parametrize(
    ("generator", "trainer", "control", "said"),
    [
        (["cpu:0"], ["cpu:0"], {}, "cpu:0: with one device there is one plan, temporal"),
        (["cpu:0-1"], ["cpu:2"], {}, "devices of one kind and size"),
        (["cuda:0"], ["cpu:0"], {}, "devices of one kind and size"),
        (["cpu:0-1"], ["cpu:1-2"], {}, "cpu:0-1 and cpu:1-2 overlap in part"),
        (["cpu:0"], ["cpu:1"], {"mode": "advise"}, "control.mode = 'advise' changes nothing"),
    ],
)
def test_where_nothing_can_move_it_says_so(
    tmp_path: Path, generator: list[str], trainer: list[str], control: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        require_movable(experiment(tmp_path, generator, trainer, **control))


def test_a_resume_uses_the_placement_that_was_in_effect_unless_the_configuration_has_changed(tmp_path: Path) -> None:
    configured, directory = experiment(tmp_path, ["cpu:0"], ["cpu:1"]), RunDirectory(tmp_path)
    assert with_saved_placement(configured, directory) is configured
    moved = planned_move({"generator.devices": '["cpu:0", "cpu:1"]', "trainer.devices": '["cpu:1"]'}, 1.2, 9.0, 3.0)
    assert (moved.placement.mode, str(moved.placement)) == (
        "hybrid",
        "hybrid: generate on cpu:0, cpu:1; train on cpu:1",
    )
    kept = PlacementFile(configured=placement_of(configured), present=moved.placement)
    directory.write_json(directory.placement, kept)
    assert placement_of(with_saved_placement(configured, directory)) == moved.placement
    other = changed_experiment(configured, {"trainer.devices": '["cpu:0"]'})
    assert with_saved_placement(other, directory) is other
    stays = changed_experiment(configured, {"control.devices": '"recommend"'})
    assert with_saved_placement(stays, directory) is stays
    directory.placement.write_text("{")
    with pytest.raises(ConfigurationError, match=r"placement\.json is damaged"):
        with_saved_placement(configured, directory)
