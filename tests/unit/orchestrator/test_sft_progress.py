"""`headway sft` over a stand-in for its worker: it saves only what has learnt something."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_run import evaluation
from tiny_trainer import make_experiment

from headway.config.load import validate_experiment
from headway.config.schema import Experiment
from headway.orchestrator.jobs import sft
from headway.orchestrator.nodes import machines
from headway.records.errors import ConfigurationError, NoProgress
from headway.records.ledger import EvaluationRecord
from headway.report.progress_bars import SftProgress
from headway.tasks.sft_data import SftTokens
from headway.trainer.checkpoints import CheckpointState, write_folder


def experiment(folder: Path, **section: Any) -> Experiment:
    raw = make_experiment("no-model", folder, sft={"data": "pairs.jsonl", "output": str(folder / "out"), **section})
    raw["tasks"] |= {"validation": {"path": "validation.jsonl"}}
    return validate_experiment(raw, "test")


class Trainer:
    """Stands for the worker: it applies no step but the ``applied`` first. ``held_out``: losses, one after another."""

    def __init__(self, applied: int) -> None:
        self.applied = applied
        self.held_out: list[float] = []
        self.steps = 0
        self.saved: list[str] = []
        self.metrics: list[dict[str, float]] = []  # of each model that was saved

    async def start(self, spec: object) -> Trainer:
        return self

    async def stop(self, *_: object) -> None: ...

    async def call(self, method: str, *arguments: Any, **_: object) -> Any:
        if method == "steps":
            self.steps += arguments[0]
            version = min(self.applied, self.steps)
            return {"version": version, "skipped": self.steps - version, "loss_mean": 1.0}
        if method == "save":
            self.saved.append(arguments[0])
            self.metrics.append(arguments[1])
        return self.held_out.pop(0) if method == "held_out_loss" else None


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    stand_in = Trainer(applied=0)
    monkeypatch.setattr(machines, "LocalLauncher", lambda *a, **k: stand_in)
    one = SftTokens(
        token_ids_n=np.zeros(2, np.int32),
        learned_n=np.ones(2, bool),
        lengths_s=np.full(1, 2),
        counts={"kept": 1},
    )
    monkeypatch.setattr(sft, "read_sft_tokens", lambda experiment: one)
    return stand_in


@pytest.mark.parametrize("output", [".", "models"])
def test_an_output_that_could_only_fail_at_the_end(
    tmp_path: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "another").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match=f"sft.output = '{output}'.*(own name|valid: a new folder)"):
        sft.run_sft(experiment(tmp_path, output=output))
    assert trainer.steps == 0


def test_a_model_that_learnt_nothing_is_not_saved(tmp_path: Path, trainer: Trainer) -> None:
    with pytest.raises(NoProgress, match="all 5 steps were skipped"):
        sft.run_sft(experiment(tmp_path, steps=5))
    assert trainer.saved == []
    trainer.applied, trainer.steps = 1, 0
    shown: list[dict[str, Any]] = []
    assert sft.run_sft(experiment(tmp_path, steps=5), on_progress=shown.append)["skipped"] == 4
    assert trainer.saved == [str(tmp_path / "out")]
    assert shown[-1] == {"step": 5, "steps": 5, "loss_mean": 1.0, "skipped": 4}


def test_what_a_save_left_when_it_was_killed_is_cleared_away(tmp_path: Path, trainer: Trainer) -> None:
    out = tmp_path / "out"
    write_folder(out, lambda folder: (folder / "model.safetensors").write_text("whole"), CheckpointState(version=1))

    def half(folder: Path) -> None:
        (folder / "model.safetensors").write_text("ha")
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        write_folder(out, half, CheckpointState(version=2))
    os.waitpid(child, 0)
    assert (tmp_path / "out.tmp" / "model.safetensors").read_text() == "ha"
    trainer.applied = 1
    sft.run_sft(experiment(tmp_path, steps=5))
    assert sorted(os.listdir(tmp_path)) == [".out.lock", "out"]
    assert (out / "model.safetensors").read_text() == "whole"  # until the new one is saved (by the worker: not here)

    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp" / "model.safetensors").write_text("somebody's")
    with pytest.raises(ConfigurationError, match=r"would remove .*out\.tmp: move it"):
        sft.run_sft(experiment(tmp_path, steps=5))
    assert (tmp_path / "out.tmp" / "model.safetensors").read_text() == "somebody's"


def judge(monkeypatch: pytest.MonkeyPatch, *rates: float | None, failed: int = 0) -> None:
    """Have evaluations of 8 attempts find these solve rates, one after another; None: every attempt fails."""
    records = [
        evaluation("during", 5, rate or 0.0, samples=8 - ill, failed=ill, failure_cause="KeyError: 'x'")
        for rate, ill in ((rate, 8 if rate is None else failed) for rate in rates)
    ]

    class Scorer:
        def __init__(self, *_: object) -> None:
            self.generator = self

        async def start(self, stack: object) -> None: ...

        async def update_weights(self, weights: object) -> None: ...

        async def score(self, phase: str, step: int) -> EvaluationRecord:
            return records.pop(0)

    monkeypatch.setattr(sft, "Scorer", Scorer)


def test_an_evaluation_that_measured_nothing_is_not_a_solve_rate_of_0(
    tmp_path: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge(monkeypatch, 0.25, None)
    trainer.applied = 10
    shown: list[dict[str, Any]] = []
    given = experiment(tmp_path, steps=10, evaluate_every_steps=5, stop_at_solve_rate=0.9)
    result = sft.run_sft(given, on_progress=shown.append)
    assert [line.get("solve_rate") for line in shown[1:]] == [0.25, None]
    assert result["solve_rate"] == 0.25


def test_a_solve_rate_of_a_few_attempts_ends_nothing_and_is_shown_with_those_that_failed(
    tmp_path: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge(monkeypatch, 1.0, 1.0, failed=7)
    trainer.applied = 10
    shown: list[dict[str, Any]] = []
    given = experiment(tmp_path, steps=10, evaluate_every_steps=5, stop_at_solve_rate=0.9)
    result = sft.run_sft(given, on_progress=shown.append)
    assert result["step"] == 10
    said = "MOST FAILED, and count in no rate: 7 of 8 attempts failed: KeyError: 'x'"
    assert (result["failed"], shown[-1]["failed"]) == (said, said)
    assert SftProgress(silent=True)._line(shown[-1]).endswith(f"solve rate 1 · standard error 0 · {said}")
    judge(monkeypatch, 1.0, failed=3)
    assert sft.run_sft(given)["step"] == 5


def test_training_ends_when_the_held_out_loss_rises_and_keeps_the_lowest(
    tmp_path: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    four_hundred = SftTokens(
        token_ids_n=np.zeros(800, np.int32),
        learned_n=np.ones(800, bool),
        lengths_s=np.full(400, 2),
        counts={"kept": 400},
    )
    monkeypatch.setattr(sft, "read_sft_tokens", lambda experiment: four_hundred)
    trainer.applied, trainer.held_out = 1000, [2.0, 1.5, 1.75, 1.0]
    shown: list[dict[str, Any]] = []
    result = sft.run_sft(experiment(tmp_path, epochs=10), on_progress=shown.append)
    assert result["held_out"] == 20
    assert trainer.steps == result["step"] == 36  # of 119: three epochs of 380 sequences
    assert len(trainer.saved) == 2  # after the first epoch and the second, not after the third
    assert result["ended"] == "the held-out loss rose from 1.5 to 1.75: the model of step 24 is kept"
    assert shown[-1]["ended"] == result["ended"]

    trainer.steps, trainer.saved, trainer.held_out = 0, [], [2.0, 1.5, 1.25]
    assert "ended" not in sft.run_sft(experiment(tmp_path))
    assert trainer.steps == 36  # three epochs are the default
    trainer.steps = 0
    assert sft.run_sft(experiment(tmp_path, steps=30))["held_out"] == 0
    assert trainer.steps == 30

    trainer.steps, trainer.metrics, trainer.held_out = 0, [], [2.0, 1.5, 1.75]
    judge(monkeypatch, 0.25, 0.75, 0.5)
    result = sft.run_sft(experiment(tmp_path, epochs=10, evaluate_every_steps=12))
    assert [one["solve_rate"] for one in result["evaluations"]] == [0.25, 0.75, 0.5]
    assert (result["solve_rate"], result["step"]) == (0.75, 36)  # the score of the model that is kept
    assert trainer.metrics == [
        {"loss_mean": 1.0, "held_out_loss": 2.0, "solve_rate": 0.25},
        {"loss_mean": 1.0, "held_out_loss": 1.5, "solve_rate": 0.75},
    ]
