"""Critics on ranks over gloo: gradients and steps of one rank in every layout, checkpoints of any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from critic_batches import resumed_values, train_values
from rank_processes import processes
from tiny_trainer import make_experiment

from headway.config.load import validate_experiment
from headway.models.loading import save_model
from headway.trainer.checkpoints import checkpoint_path
from tests.conformance.reference import random_model

torch.set_num_threads(1)
pytestmark = pytest.mark.real
PATHS = ("trunk", "folder", "adapter")
LAYOUTS = {"2 copies": (2, {}), "2 shards": (2, {"shards": 2}), "2 of context": (2, {"context_parallel": 2})}
FIXED = {"packing": "fixed", "micro_batch_samples": 2}
PACKINGS = {"balanced": {}, "small": {"micro_batch_tokens": 16}, "fixed": FIXED}
EACH = [
    pytest.param(path, layout, packing, marks=[] if (path, packing) == ("trunk", "small") else pytest.mark.slow)
    for path in PATHS
    for layout in LAYOUTS
    for packing in PACKINGS
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("critics")
    for seed, name in enumerate(("policy", "critic")):
        save_model(random_model(seed, vocabulary=41, family="qwen3"), path / name)
    return path


def experiment_of(folder: Path, path: str, **trainer: Any) -> dict[str, Any]:
    critic = {"path": str(folder / "critic") if path.startswith("folder") else path, "learning_rate": 1e-3}
    model = {"adapter": {"rank": 4, "alpha": 8.0}} if path.endswith("adapter") else {}
    algorithm = {"preset": "ppo", "overlong": "bootstrap"}
    raw = make_experiment(str(folder / "policy"), folder / "run", critic=critic, model=model, algorithm=algorithm)
    raw["trainer"] |= {"devices": ["cpu:0"] * 2, "max_grad_norm": 0.05, **trainer}
    return validate_experiment(raw, "test").model_dump(mode="json")


def differences(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    assert actual.keys() == expected.keys()
    largest = max(np.abs(values).max() for values in expected.values())
    return max(float(np.abs(values - expected[name]).max() / largest) for name, values in actual.items())


@pytest.mark.parametrize("groups", [6, 1], ids=["all ranks", "a rank without data"])
@pytest.mark.parametrize(("path", "layout", "packing"), EACH)
def test_a_layout_computes_what_one_rank_does(folder: Path, path: str, layout: str, packing: str, groups: int) -> None:
    (size, sections), packed = LAYOUTS[layout], PACKINGS[packing]
    one = processes(1).call(train_values, folder, experiment_of(folder, path), groups)[0]
    for actual in processes(size).call(train_values, folder, experiment_of(folder, path, **sections, **packed), groups):
        for name in ("gradients", "policy"):
            worst = differences(actual[name], one[name])
            print(f"{path}, {layout}, {packing}: {worst:.1e} of the largest {name}")
            assert worst < 2e-6
        np.testing.assert_allclose(actual["head"], one["head"], atol=2e-5)
        if one["network"]:
            assert differences(actual["network"], one["network"]) < 5e-5
        assert actual["scale"].count == one["scale"].count
        assert actual["scale"].mean == pytest.approx(one["scale"].mean, rel=1e-5)


@pytest.mark.parametrize("path", [*PATHS, "folder beside an adapter"])
def test_a_checkpoint_of_two_ranks_is_that_of_one(folder: Path, tmp_path: Path, path: str) -> None:
    saved = str(checkpoint_path(tmp_path, 1))
    sharded = experiment_of(folder, path, shards=2)
    straight = processes(2).call(resumed_values, folder, sharded, saved)[0]
    again = processes(2).call(resumed_values, folder, sharded, str(checkpoint_path(tmp_path / "a", 1)), saved)[0]
    alone = processes(1).call(
        resumed_values, folder, experiment_of(folder, path), str(checkpoint_path(tmp_path / "b", 1)), saved
    )[0]
    assert again["scale"] == straight["scale"]
    assert alone["scale"].mean == pytest.approx(straight["scale"].mean, rel=1e-5)
    for name in ("network", "policy"):
        for key, values in straight[name].items():
            assert np.array_equal(again[name][key], values), key
            np.testing.assert_allclose(alone[name][key], values, atol=1e-4)
    assert np.array_equal(again["head"], straight["head"])
    np.testing.assert_allclose(alone["head"], straight["head"], atol=1e-5)
