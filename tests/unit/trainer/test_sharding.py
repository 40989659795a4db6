"""Ranks that divide a copy of the model: gradients, norms and weights of one rank, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_processes import Weights, padded_gradients, processes, train
from tiny_hub import make_hub_model
from tiny_trainer import make_experiment

from headway.config.load import validate_experiment
from headway.models.loading import save_model
from tests.conformance.reference import random_model

torch.set_num_threads(1)
pytestmark = pytest.mark.real
ADAPTER = {"model": {"adapter": {"rank": 4, "alpha": 8.0}}}
KL = {"algorithm": {"kl_coefficient": 0.1}}
# Name -> model, and sections of the experiment.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("qwen3", {}),
    "windows": ("gemma3", {}),
    "mixture": ("qwen3_moe", {}),
    "untied": ("mistral-untied", {}),
    "transformers": ("Olmo2", {}),
    "rows": ("Bamba", {}),
    "adapter": ("qwen3", ADAPTER | KL),
    "adapter of transformers": ("Olmo2", ADAPTER | KL),
    "reference": ("gemma3", KL),
    "recomputed": ("qwen3_moe", {"trainer": {"gradient_checkpointing": "full"}}),
    "partly recomputed": ("qwen3", {"trainer": {"gradient_checkpointing": "selective"}}),
    "recomputed transformers": ("Olmo2", {"trainer": {"gradient_checkpointing": "full"}}),
    "minibatches": ("qwen3", {"trainer": {"optimizer_steps_per_batch": 2}}),
    "in host memory": ("qwen3", {"trainer": {"host_memory": "all"}}),
    "moments in host memory": ("qwen3", {"trainer": {"host_memory": "optimiser"}}),
}
LAYOUTS = {"2 shards": (2, 2), "4 shards": (4, 4), "2 copies of 2": (4, 2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharding")


def experiment_of(folder: Path, case: str, shards: int = 1, **trainer: Any) -> dict[str, Any]:
    kind, sections = CASES[case]
    model = folder / kind
    if not model.exists():
        family, _, untied = kind.partition("-")
        if family[0].isupper():
            make_hub_model(model, kind)
        else:
            save_model(random_model(0, vocabulary=41, family=family, tied=not untied), model)
    raw = make_experiment(str(model), folder / "run", **sections)
    raw["trainer"] |= {"devices": ["cpu:0"] * 4, "shards": shards, "max_grad_norm": 0.01, **trainer}
    return validate_experiment(raw, "test").model_dump(mode="json")


_expected: dict[Any, Any] = {}


def on_one(folder: Path, case: str, function: Any = train, *arguments: Any, **trainer: Any) -> Any:
    key = folder, case, function, repr((arguments, trainer))
    if key not in _expected:
        experiment = experiment_of(folder, case, **trainer)
        _expected[key] = processes(1).call(function, folder, experiment, *arguments)[0]
    return _expected[key]


def difference(actual: Weights, expected: Weights) -> float:
    assert actual.keys() == expected.keys()
    largest = max(np.abs(values).max() for values in expected.values())
    return max(float(np.abs(values - expected[name]).max() / largest) for name, values in actual.items())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_a_layout_computes_what_one_rank_does(folder: Path, case: str, layout: str) -> None:
    (size, shards), expected = LAYOUTS[layout], on_one(folder, case)
    results = processes(size).call(train, folder, experiment_of(folder, case, shards))
    for actual in results:
        worst = difference(actual["gradients"], expected["gradients"])
        print(f"{case}, {layout}: {worst:.1e} of the largest gradient")
        assert worst < 2e-6
        assert actual["norms"][0] == pytest.approx(expected["norms"][0], rel=1e-6)
        assert actual["norms"] == pytest.approx(expected["norms"], rel=2e-5)  # of weights that differ by rounding
        assert min(actual["norms"]) > 0.02, "clipping is active"
        assert actual["micro_batches"] >= 4
        assert difference(actual["weights"], expected["weights"]) < 5e-5
        np.testing.assert_allclose(actual["probe"], expected["probe"], atol=1e-3)


# Samples of each micro-batch of each rank: uneven ones, of which some ranks have fewer, or none.
PLANS = {
    "uneven": [[[0, 1, 2], [3], [4, 5]], [[6]], [[7, 8], [9]], [[10], [11]]],
    "a rank without data": [[[0, 1], [2]], [[3, 4, 5, 6], [7], [8]], [], [[9, 10], [11]]],
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", ["plain", "untied", "mixture", "transformers", "rows", "adapter"])
def test_ranks_may_have_fewer_micro_batches_or_none(folder: Path, case: str, plan: str) -> None:
    expected = on_one(folder, case, padded_gradients, PLANS[plan])
    for actual in processes(4).call(padded_gradients, folder, experiment_of(folder, case, 2), PLANS[plan]):
        assert difference(actual, expected) < 2e-6
