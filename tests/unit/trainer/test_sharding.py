"""Ranks that divide a copy of the model: gradients, norms and weights of one rank, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_faults import FAULTS, with_fault
from rank_processes import Weights, counted, loaded, padded_gradients, processes, saved_and_resumed, train
from tiny_hub import make_hub_model
from tiny_trainer import make_experiment

from headway.config.load import validate_experiment
from headway.models.loading import save_model
from headway.records.errors import ConfigurationError
from headway.trainer.sharding import require_units
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
    "teacher": ("gemma3", {"algorithm": {"teacher": "t"}, "teachers": {"t": {"path": "gemma3-teacher"}}}),
    "teachers of tokens": (
        "qwen3",
        {"algorithm": {"teacher": "t"}, "teachers": {"t": {"path": "qwen3-teacher", "divergence": "sampled"}}},
    ),
    "self": ("qwen3", {"algorithm": {"teacher": "t"}, "teachers": {"t": {"path": "self"}}}),
    "averaged reference": ("gemma3", {"algorithm": KL["algorithm"] | {"reference_decay": 0.5}}),
    "entropies": ("qwen3", {"algorithm": {"entropy_coefficient": 0.05, "entropy_threshold": 3.5}}),
    "recomputed": ("qwen3_moe", {"trainer": {"gradient_checkpointing": "full"}}),
    "partly recomputed": ("qwen3", {"trainer": {"gradient_checkpointing": "selective"}}),
    "recomputed transformers": ("Olmo2", {"trainer": {"gradient_checkpointing": "full"}}),
    "minibatches": ("qwen3", {"trainer": {"optimizer_steps_per_batch": 2}}),
    "passes": ("qwen3", {"trainer": {"optimizer_steps_per_batch": 2, "passes": 2}}),
    "in host memory": ("qwen3", {"trainer": {"host_memory": "all"}}),
    "moments in host memory": ("qwen3", {"trainer": {"host_memory": "optimiser"}}),
}
LAYOUTS = {"2 shards": (2, 2), "4 shards": (4, 4), "2 copies of 2": (4, 2)}

EACH = [  # the slow ones repeat a case on another layout
    pytest.param(case, layout, marks=[] if layout == "2 copies of 2" or case == "plain" else pytest.mark.slow)
    for case in CASES
    for layout in LAYOUTS
]


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
    for teacher in raw.get("teachers", {}).values():
        if teacher["path"] == f"{kind}-teacher":
            save_model(random_model(1, vocabulary=41, family=kind), folder / teacher["path"])
            raw["teachers"] = {"t": teacher | {"path": str(folder / teacher["path"])}}
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


@pytest.mark.parametrize(("case", "layout"), EACH)
def test_a_layout_computes_what_one_rank_does(folder: Path, case: str, layout: str) -> None:
    (size, shards), expected = LAYOUTS[layout], on_one(folder, case)
    results = processes(size).call(train, folder, experiment_of(folder, case, shards))
    assert results[0]["micro_batches"] >= 4  # counted by rank 0
    for actual in results:
        worst = difference(actual["gradients"], expected["gradients"])
        print(f"{case}, {layout}: {worst:.1e} of the largest gradient")
        assert worst < 2e-6
        assert actual["norms"][0] == pytest.approx(expected["norms"][0], rel=1e-6)
        assert actual["norms"] == pytest.approx(expected["norms"], rel=2e-5)  # of weights that differ by rounding
        assert min(actual["norms"]) > 0.02, "clipping is active"
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


@pytest.mark.parametrize("case", ["plain", "mixture", "transformers"])
def test_bfloat16_is_gathered_from_float32_shards(folder: Path, case: str) -> None:
    expected = on_one(folder, case, dtype="bfloat16")
    for actual in processes(2).call(train, folder, experiment_of(folder, case, 2, dtype="bfloat16")):
        assert difference(actual["gradients"], expected["gradients"]) < 2e-2
        assert actual["norms"] == pytest.approx(expected["norms"], rel=2e-2)
        assert np.array_equal(actual["first_probe"], expected["first_probe"]), "the same rounded weights"


def test_ten_steps_of_adamw_end_near_those_of_one_rank(folder: Path) -> None:
    expected = on_one(folder, "plain", train, 10)
    (actual, *_) = processes(4).call(train, folder, experiment_of(folder, "plain", 2), 10)
    assert difference(actual["weights"], expected["weights"]) < 5e-5


@pytest.mark.parametrize("case", ["plain", "mixture", "reference"])
def test_a_run_on_the_same_ranks_has_the_same_bits(folder: Path, case: str) -> None:
    first, again = (processes(4).call(train, folder, experiment_of(folder, case, 2)) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert one["norms"] == other["norms"]
        assert all(np.array_equal(values, other["weights"][name]) for name, values in one["weights"].items())


def test_copies_and_shards_hold_the_same_weights(folder: Path) -> None:
    first, *others = (
        result["weights"] for result in processes(4).call(train, folder, experiment_of(folder, "plain", 2))
    )
    assert all(np.array_equal(values, other[name]) for other in others for name, values in first.items())


def test_a_checkpoint_of_four_ranks_is_that_of_two_and_of_one(folder: Path, tmp_path: Path) -> None:
    paths = [str(tmp_path / str(number) / "checkpoints" / "step_00000001") for number in range(5)]
    saved = processes(4).call(saved_and_resumed, folder, experiment_of(folder, "plain", 4), paths[0])
    published = list[str | None]()
    for (size, shards), source, target in zip(((4, 2), (2, 2), (1, 1), (4, 4)), paths, paths[1:], strict=False):
        results = processes(size).call(loaded, folder, experiment_of(folder, "plain", shards), source, target)
        for actual in results:
            assert all(np.array_equal(actual["state"][name], one) for name, one in saved[0]["stored"].items())
        published += [actual["published"] for actual in results if actual["published"] is not None]
    assert len(published) == 4, "rank 0 publishes, the others take part"
    assert len(set(published)) == 1


def test_offloaded_shards_come_back_and_are_a_share(folder: Path, tmp_path: Path) -> None:
    one = on_one(folder, "plain", saved_and_resumed, str(tmp_path / "one" / "step_00000001"))
    path = str(tmp_path / "checkpoints" / "step_00000001")
    for actual in processes(4).call(saved_and_resumed, folder, experiment_of(folder, "plain", 4), path):
        assert difference(actual["after"], one["after"]) < 1e-4
        assert actual["moved"] == actual["resident"]
        assert actual["resident"] <= 0.3 * one["resident"]  # some matrices have fewer rows than a multiple of ranks


@pytest.mark.parametrize("case", ["plain", "transformers"])
def test_collectives_are_counted_and_what_is_gathered_is_freed(folder: Path, case: str) -> None:
    for actual in processes(2).call(counted, folder, experiment_of(folder, case, 2)):
        assert actual["forward"] == ["all_gather"] * 3  # what is outside of the layers, and two of them
        assert sorted(actual["backward"]) == ["all_gather"] * 2 + ["reduce_scatter"] * 3
        assert actual["divided"]
        assert not actual["is_view"], "a loss that overwrites a view would change gradients silently"


# Fault -> what the error says; "": a gradient is wrong.
ERRORS: dict[str, str] = {
    "averaged_layers": "",
    "scaled_summands": "PREMUL_SUM",
    "method_without_hooks": "mixed torch.Tensor and DTensor",
    "unequal_calls": "no answer|died|Connection",
    "rounded_positions": "complex",
    "stale_parameters": "",
}


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=pytest.mark.long) if name == "unequal_calls" else name for name in FAULTS]
)  # which waits for an answer that doesn't come
def test_a_planted_fault_is_found(folder: Path, fault: str) -> None:
    case, function, arguments = "plain", train, [1]
    if fault == "unequal_calls":
        case, function, arguments = "rows", padded_gradients, [PLANS["uneven"]]
    experiment = experiment_of(folder, case, 4, dtype="bfloat16" if fault == "rounded_positions" else "float32")

    def call() -> list[Any]:
        limit_s = 20 if fault == "unequal_calls" else 100
        return processes(4).call(with_fault, folder, fault, function, experiment, *arguments, limit_s=limit_s)

    if ERRORS[fault]:
        with pytest.raises(RuntimeError, match=ERRORS[fault]):
            call()
        return
    expected = on_one(folder, case, train, 1)["gradients"]
    assert any(difference(actual["gradients"], expected) > 1e-3 for actual in call())


def test_a_model_that_cannot_be_divided_by_layers_is_refused() -> None:
    model = random_model(0, vocabulary=41)
    require_units(model)
    model.layers[1].input_norm = model.layers[0].input_norm
    with pytest.raises(ConfigurationError, match=r"layer 0 and layer 1 share the matrix input_norm, which can't be"):
        require_units(model)
    model.layers[1].input_norm = model.final_norm
    with pytest.raises(ConfigurationError, match=r"layer 1 and what is outside of the layers share .* final_norm"):
        require_units(model)
    model.layers[1].input_norm = torch.nn.Parameter(torch.ones(()))
    with pytest.raises(ConfigurationError, match=r"input_norm of layer 1 is a number, without rows; valid: 1"):
        require_units(model)
