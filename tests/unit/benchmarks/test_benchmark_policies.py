"""Every policy that benchmarks/policies.py compares is a valid experiment."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from headway.config.load import load_experiment

ROOT = Path(__file__).parents[3]


def test_every_policy_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    policies = importlib.import_module("policies")
    config = str(ROOT / "examples" / "arithmetic" / "experiment.toml")
    loaded = {name: load_experiment(config, [*policies.COMMON, *keys]) for name, keys in policies.POLICIES.items()}
    assert loaded["pruning"].pruning.kinds
    assert loaded[policies.CONTROLLER].control.mode == "act"
    assert loaded[policies.SYNCHRONOUS].queue.budget == 0
    assert len({experiment.model_dump_json() for experiment in loaded.values()}) == len(loaded)


def test_every_live_row_of_the_simulator_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    live = importlib.import_module("parts.simulate_live")
    config = str(ROOT / "examples" / "arithmetic" / "experiment.toml")
    loaded = {name: load_experiment(config, [*live.COMMON, *keys]) for name, keys in live.ROWS.items()}
    assert {live.BASE, live.BESIDE} < loaded.keys()
    assert loaded[live.BESIDE].queue.budget == 0
    assert all(experiment.trainer.learning_rate == 0 for experiment in loaded.values())
    assert len({experiment.model_dump_json() for experiment in loaded.values()}) == len(loaded)
