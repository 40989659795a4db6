"""What `headway sft` refuses before it starts anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.config.load import validate_experiment
from headway.config.schema import Experiment
from headway.orchestrator.jobs import sft
from headway.records.errors import ConfigurationError


def experiment(folder: Path, **changes: Any) -> Experiment:
    raw = {
        "run": {"directory": str(folder / "run")},
        "model": {"path": str(folder / "model")},
        "tasks": {"train": {"path": "t.jsonl"}},
        "sft": {"data": str(folder / "pairs.jsonl"), "output": str(folder / "out"), **changes},
    }
    return validate_experiment(raw, "test")


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(sft, "_sft", refuse)
    monkeypatch.setattr(sft, "reap", refuse)


@pytest.mark.parametrize("key", ["data", "output"])
def test_a_missing_key(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"missing key 'sft\.{key}'"):
        sft.run_sft(experiment(tmp_path, **{key: ""}))


def test_an_output_that_holds_something_else(tmp_path: Path) -> None:
    (tmp_path / "out" / "other-model").mkdir(parents=True)
    (tmp_path / "out" / "other-model" / "config.json").touch()
    with pytest.raises(ConfigurationError, match=r"sft\.output"):
        sft.run_sft(experiment(tmp_path))
    assert (tmp_path / "out" / "other-model" / "config.json").exists()


def test_an_output_that_is_the_model_it_begins_from(tmp_path: Path) -> None:
    given = experiment(tmp_path, output=str(tmp_path / "out/../model"))
    with pytest.raises(ConfigurationError, match=r"sft\.output: .*model is model\.path too and would be overwritten"):
        sft.run_sft(given)


def test_measuring_a_solve_rate_without_tasks_to_measure_it_on(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"sft\.evaluate_every_steps = 5 needs tasks\.validation"):
        sft.run_sft(experiment(tmp_path, evaluate_every_steps=5))


def test_steps_and_epochs_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"sft\.epochs = 2 and sft\.steps = 5 both set its end; valid: one"):
        experiment(tmp_path, epochs=2, steps=5)
    assert experiment(tmp_path, steps=5).sft.epochs is None
    default = experiment(tmp_path)
    assert (default.sft.epochs, default.sft.total_steps(400)) == (3, 38)
    for given in (default, experiment(tmp_path, steps=5)):  # as the worker is given it
        assert validate_experiment(given.model_dump(mode="json"), "again") == given
