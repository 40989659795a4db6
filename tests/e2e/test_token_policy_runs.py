"""Runs of token policies in real processes: equal weights wherever the stages run, budgets, a killed learner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from token_runs import digest, token_experiment, token_model

from headway.embodied.driver import train
from headway.records.ledger import StepRecord
from headway.telemetry.ledger import read_ledger
from headway.weights.slots import SHARED_MEMORY

PLACEMENTS = {
    "spatial": (["cpu:0"], ["cpu:1"]),
    "temporal": (["cpu:0"], ["cpu:0"]),
    "hybrid": (["cpu:0", "cpu:1"], ["cpu:1"]),
}


def trained(directory: Path, model: str, steps: int, placement: str, **sections: Any) -> str:
    simulators, learner = PLACEMENTS[placement]
    experiment = token_experiment(
        directory,
        model,
        run={"steps": steps},
        simulator={"devices": simulators},
        trainer={"devices": learner},
        checkpoint={"every_steps": steps},
        **sections,
    )
    summary = train(experiment)
    assert (summary.steps, summary.accounting_balanced) == (steps, True)
    return digest(directory, steps)


@pytest.mark.real
def test_a_run_of_three_steps_reports_groups_and_success(tmp_path: Path):
    model = token_model(tmp_path / "model")
    trained(tmp_path / "tokens", model, 3, "spatial", evaluation={"every_steps": 3, "episodes": 8, "video": False})
    steps = [line for line in read_ledger(tmp_path / "tokens") if isinstance(line, StepRecord)]
    assert [step.metrics["groups"] for step in steps] == [4] * 3
    assert all(0 <= step.metrics["success"] <= 1 for step in steps)
    assert (tmp_path / "tokens" / "best" / "trainer" / "model" / "config.json").is_file()
    assert not [*SHARED_MEMORY.glob("headway-tokens-*.weights")]


@pytest.mark.real
@pytest.mark.long
def test_weights_are_equal_in_every_placement(tmp_path: Path):
    model = token_model(tmp_path / "model")
    digests = {name: trained(tmp_path / name, model, 20, name) for name in PLACEMENTS}
    assert len(set(digests.values())) == 1, digests


@pytest.mark.real
@pytest.mark.long
def test_a_budget_of_two_trains_on_fragments_within_it(tmp_path: Path):
    model = token_model(tmp_path / "model")
    sections: dict[str, Any] = {"queue": {"budget": 2}, "algorithm": {"correction": "recompute"}}
    trained(tmp_path / "run", model, 8, "spatial", **sections)
    steps = [line for line in read_ledger(tmp_path / "run") if isinstance(line, StepRecord)]
    assert max(step.trajectory_staleness.max for step in steps if step.trajectory_staleness) == 2
