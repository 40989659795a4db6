"""The same weights, bit for bit, wherever replicas and trainer compute: on one device, on their own, or both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from safetensors.torch import load_file

from headway.trainer.checkpoints import checkpoint_path

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]
STEPS = 5
PLACES = {
    "temporal": (["cpu:0"], ["cpu:0"]),
    "spatial": (["cpu:0"], ["cpu:1"]),
    "hybrid": (["cpu:0", "cpu:1"], ["cpu:1"]),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("inputs")
    tiny_run.write_inputs(folder)
    return tiny_run.inputs_in(folder)


def trained(folder: Path, inputs: Any, mode: str, part: int | None) -> tuple[dict[str, torch.Tensor], float]:
    """The weights after the last step, and the share of time that replicas were paused for the trainer."""
    folder.mkdir()
    replicas, ranks = PLACES[mode]
    given = {name: dict(section) for name, section in inputs.items()}
    for name, section in {
        "run": {"steps": STEPS, "deterministic": True},
        "generator": {"devices": replicas},
        "trainer": {"devices": ranks},
        "queue": {"groups_per_step": 4, "groups_per_part": part, "budget": 0},
    }.items():
        given[name] = given.get(name, {}) | section
    command = tiny_run.train(tiny_run.write_experiment(folder, **given))
    assert command.process.returncode == 0, command.output
    run = folder / "run"
    tiny_run.require_whole(run, STEPS)
    yielded = sum(step.generator_yielded_ratio for step in tiny_run.steps_of(run))
    return load_file(checkpoint_path(run, STEPS) / "model" / "model.safetensors"), yielded


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


MORE = [pytest.param(mode, part, marks=pytest.mark.long) for mode in ("temporal", "hybrid") for part in (None, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "part"), [("temporal", 2), pytest.param("hybrid", 2, marks=pytest.mark.long), *MORE])
def test_a_placement_changes_no_bit(tmp_path: Path, inputs: Any, mode: str, part: int | None) -> None:
    apart, yielded = trained(tmp_path / "apart", inputs, "spatial", part)
    assert yielded == 0.0
    placed, yielded = trained(tmp_path / mode, inputs, mode, part)
    assert yielded > 0.0
    assert distance(apart, placed) == 0.0


@pytest.mark.slow
@pytest.mark.long
def test_other_parts_change_the_weights_by_rounding_alone(tmp_path: Path, inputs: Any) -> None:
    """The gradients' sums are the same but for their order; AdamW divides by their size, so that of a gradient near
    zero the rounding counts in full. A weight of 0.3 alone is rounded to 3e-6 of an update of 0.01."""
    first = load_file(Path(inputs["model"]["path"]) / "model.safetensors")
    whole, _ = trained(tmp_path / "whole", inputs, "temporal", None)
    update = distance(first, whole)
    assert update > 0.0
    for part in (1, 2):
        apart, _ = trained(tmp_path / f"by-{part}", inputs, "temporal", part)
        assert distance(whole, apart) <= 1e-4 * update
