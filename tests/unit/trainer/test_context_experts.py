"""Ranks that divide tokens and experts, by the trainer's keys: gradients, norms, weights and figures of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_faults import with_fault
from rank_processes import Weights, loaded, processes, saved_and_resumed, shard_rows, train
from tiers import pairs
from tiny_hub import make_hub_model
from tiny_trainer import make_experiment

from headway.config.load import validate_experiment
from headway.models.loading import save_model
from tests.conformance.reference import random_model

torch.set_num_threads(1)
pytestmark = pytest.mark.real

# Name -> ranks, shards, context_parallel, expert_parallel.
LAYOUTS = {
    "cp2": (2, 1, 2, 1),
    "ep2": (2, 1, 1, 2),
    "cp2, ep2": (2, 1, 2, 2),  # the same two ranks
    "cp4": (4, 1, 4, 1),
    "2 copies of cp2": (4, 1, 2, 1),
    "2 shards x cp2": (4, 2, 2, 1),
    "ep4": (4, 4, 1, 4),
    "2 copies of ep2": (4, 2, 1, 2),
    "2 x ep2": (4, 4, 1, 2),  # two ranks divide the same experts
    "cp2 x ep2": (4, 2, 2, 2),
    "cp2, ep4": (4, 2, 2, 4),
}
MODELS = ("qwen3", "gemma3", "qwen3_moe", "Olmo2", "DeepseekV3")
MAX_NORM = 1e-4
GSPO = {"algorithm": {"loss": "gspo"}}
MASKS = {"algorithm": {"token_mask": [0.5, 2.0], "sequence_mask": [0.6, 1.6], "second_moment_limit": 0.5}}
ADAPTER = {"model": {"adapter": {"rank": 4, "alpha": 8.0}}}
KL = {"algorithm": {"kl_coefficient": 0.1}}
# Name -> kind of the batches, and sections of the experiment.
FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain", {}),
    "adapter": ("plain", ADAPTER | KL),
    "reference": ("plain", KL),
    "teacher": ("kept", {"algorithm": {"teacher": "t"}, "teachers": {"t": {"path": "teacher"}}}),
    "replay": ("experts", {}),
    "kept sets": ("kept", {}),
    "trees": ("trees", {}),
    "recomputed": ("trees", {"trainer": {"gradient_checkpointing": "full"}}),
    "partly recomputed": ("plain", {"trainer": {"gradient_checkpointing": "selective"}}),
    "sequences": ("trees", GSPO),
    "masks": ("plain", MASKS),
    "updates": ("plain", {"trainer": {"optimizer_steps_per_batch": 3}, "algorithm": {"early_stop_ratio": 50.0}}),
    "entropies": ("plain", {"algorithm": {"entropy_coefficient": 0.05, "entropy_threshold": 3.5}}),
    "in host memory": ("plain", {"trainer": {"host_memory": "all"}}),
    "fewer samples than ranks": ("few", {}),
}


def is_valid(layout: str, model: str, feature: str) -> bool:
    _, _, context, experts = LAYOUTS[layout]
    if experts > 1 or feature == "replay":
        return model == "qwen3_moe"
    if model[0].isupper():
        return feature not in ("partly recomputed", "teacher") and not (model == "Olmo2" and context == 4)
    return True


def experiment_of(folder: Path, model: str, feature: str, layout: tuple[int, ...] = (1, 1, 1, 1)) -> dict[str, Any]:
    path = folder / model
    if not path.exists():
        if model[0].isupper():
            make_hub_model(path, model)
        else:
            save_model(random_model(0, vocabulary=41, family=model), path)
    raw = make_experiment(str(path), folder / "run", **FEATURES[feature][1])
    if "teachers" in raw:
        save_model(random_model(1, vocabulary=41, family=model), teacher := folder / f"{model}-teacher")
        raw["teachers"] = {"t": {"path": str(teacher)}}
    size, shards, context, experts = layout
    keys = {"shards": shards, "context_parallel": context, "expert_parallel": experts}
    raw["trainer"] |= {"devices": ["cpu:0"] * size, "max_grad_norm": MAX_NORM, "micro_batch_tokens": 48, **keys}
    return validate_experiment(raw, "test").model_dump(mode="json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("divided")


_expected: dict[Any, Any] = {}


def on_one(folder: Path, model: str, feature: str, steps: int = 3) -> Any:
    key = folder, model, feature, steps
    if key not in _expected:
        arguments = experiment_of(folder, model, feature), steps, FEATURES[feature][0]
        _expected[key] = processes(1).call(train, folder, *arguments)[0]
    return _expected[key]


def on_ranks(folder: Path, layout: str, model: str, feature: str, steps: int = 3) -> list[Any]:
    experiment = experiment_of(folder, model, feature, LAYOUTS[layout])
    return processes(LAYOUTS[layout][0]).call(train, folder, experiment, steps, FEATURES[feature][0])


def difference(actual: Weights, expected: Weights) -> float:
    assert actual.keys() == expected.keys()
    largest = max(np.abs(values).max() for values in expected.values())
    return max(float(np.abs(values - expected[name]).max() / largest) for name, values in actual.items())


def require_equal(folder: Path, layout: str, model: str, feature: str) -> None:
    results, expected = on_ranks(folder, layout, model, feature), on_one(folder, model, feature)
    for actual in results:
        worst = difference(actual["gradients"], expected["gradients"])
        print(f"{layout}, {model}, {feature}: {worst:.1e} of the largest gradient")
        assert worst < (2.5e-6 if feature in ("updates", "fewer samples than ranks") else 2e-6)
        # float32: on one rank, other micro-batches change the first norm by up to 1.8e-6
        assert actual["norms"][0] == pytest.approx(expected["norms"][0], rel=2e-6)
        assert actual["norms"] == pytest.approx(expected["norms"], rel=5e-5)  # of weights that differ by rounding
        assert max(actual["norms"]) > 2 * MAX_NORM, "clipping is active"
        assert difference(actual["weights"], expected["weights"]) < 5e-5
        np.testing.assert_allclose(actual["probe"], expected["probe"], atol=1e-3)
        np.testing.assert_allclose(actual["hidden"], expected["hidden"], atol=1e-3)
    if feature != "fewer samples than ranks":
        assert expected["micro_batches"] >= 4
        assert min(expected["norms"]) > 2 * MAX_NORM
    first = results[0]  # has the figures of all ranks
    assert first["metrics"] == pytest.approx(expected["metrics"], rel=2e-3, abs=2e-4)
    assert [counts[:2] for counts in first["tokens"]] == [counts[:2] for counts in expected["tokens"]]


# What `make test` runs; of the others a share of those that have all pairs is slow.
QUICK = [
    ("cp2", "qwen3", "plain"),
    ("cp2", "Olmo2", "adapter"),
    ("ep2", "qwen3_moe", "plain"),
    ("cp4", "gemma3", "sequences"),
    ("cp2 x ep2", "qwen3_moe", "replay"),
    ("2 x ep2", "qwen3_moe", "adapter"),
    ("2 copies of cp2", "qwen3", "kept sets"),
    ("2 copies of ep2", "qwen3_moe", "updates"),
]
REST = pairs(
    tuple(LAYOUTS),
    MODELS,
    tuple(FEATURES),
    valid=lambda *cell: is_valid(*cell) and cell not in QUICK,
    marks=(pytest.mark.slow, pytest.mark.long),
)


@pytest.mark.parametrize(("layout", "model", "feature"), [*QUICK, *REST])
def test_a_layout_computes_what_one_rank_does(folder: Path, layout: str, model: str, feature: str) -> None:
    require_equal(folder, layout, model, feature)


@pytest.mark.parametrize("layout", ["cp2 x ep2", pytest.param("2 x ep2", marks=pytest.mark.slow)])
def test_bits_repeat_and_all_ranks_have_the_same_weights(folder: Path, layout: str) -> None:
    first, again = (on_ranks(folder, layout, "qwen3_moe", "replay") for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert one["norms"] == other["norms"] == first[0]["norms"]
        for name, values in one["weights"].items():
            assert np.array_equal(values, other["weights"][name])
            assert np.array_equal(values, first[0]["weights"][name])


@pytest.mark.parametrize("layout", ["cp2", "2 x ep2", pytest.param("cp2, ep4", marks=pytest.mark.slow)])
def test_a_checkpoint_loads_in_every_layout(folder: Path, tmp_path: Path, layout: str) -> None:
    paths = [str(tmp_path / str(number) / "checkpoints" / "step_00000001") for number in range(3)]
    size = LAYOUTS[layout][0]
    experiment = experiment_of(folder, "qwen3_moe", "plain", LAYOUTS[layout])
    stored = processes(size).call(saved_and_resumed, folder, experiment, paths[0])[0]["stored"]
    of_one = experiment_of(folder, "qwen3_moe", "plain")
    published = []
    for count, settings, source, target in ((1, of_one, paths[0], paths[1]), (size, experiment, paths[1], paths[2])):
        for actual in processes(count).call(loaded, folder, settings, source, target):
            assert all(np.array_equal(actual["state"][name], values) for name, values in stored.items())
            published += [actual["published"]] if actual["published"] is not None else []
    assert len(set(published)) == 1
    assert len(published) == 2


@pytest.mark.parametrize("layout", ["2 shards x cp2", "ep4", "2 x ep2", "cp2, ep2"])
def test_the_rows_of_all_shards_are_the_models(folder: Path, layout: str) -> None:
    size, experiment = LAYOUTS[layout][0], experiment_of(folder, "qwen3_moe", "plain", LAYOUTS[layout])
    parts = processes(size).call(shard_rows, folder, experiment)
    model = random_model(0, vocabulary=41, family="qwen3_moe")
    bytes_by_rank = [sum(rows.nbytes for _, _, rows in shards.values()) for shards in parts]
    whole = sum(parameter.nbytes for parameter in model.parameters())
    assert max(bytes_by_rank) <= 1.1 * whole / size
    for name, parameter in model.named_parameters():
        width = parameter.shape[-1] if parameter.ndim > 1 else 1
        rows, seen = parameter.detach().numpy().reshape(-1, width), np.zeros(parameter.numel() // width, np.int64)
        for shards in parts:
            shape, first, own = shards[name]
            assert shape == tuple(parameter.shape)
            stop = first + own.size // width
            assert np.array_equal(own.reshape(-1, width), rows[first:stop]), name
            seen[first:stop] += 1
        assert (seen == 1).all(), name


# Fault -> layout, model and feature in which a gradient shows it.
FAULTS = {
    "gather sums": ("cp2", "qwen3", "plain"),
    "each rank has its own loss": ("cp2", "qwen3", "sequences"),
    "gradients aren't sent back": ("ep2", "qwen3_moe", "plain"),
    "replay of the first rows": ("cp2", "qwen3_moe", "replay"),
    "denominators_of_every_rank": ("cp2", "qwen3", "plain"),
    "experts_of_another_rank": ("ep2", "qwen3_moe", "plain"),
    "experts_summed_once_more": ("2 x ep2", "qwen3_moe", "plain"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_changes_gradients(folder: Path, fault: str) -> None:
    layout, model, feature = FAULTS[fault]
    experiment = experiment_of(folder, model, feature, LAYOUTS[layout])
    arguments = fault, train, experiment, 1, FEATURES[feature][0]
    expected = on_one(folder, model, feature)["gradients"]
    results = processes(LAYOUTS[layout][0]).call(with_fault, folder, *arguments)
    assert any(difference(actual["gradients"], expected) > 1e-4 for actual in results)


def test_figures_counted_on_every_rank_are_noticed(folder: Path) -> None:
    experiment = experiment_of(folder, "qwen3", "plain", LAYOUTS["cp2"])
    arguments = "counts_of_every_rank", train, experiment, 1
    actual = processes(2).call(with_fault, folder, *arguments)[0]
    assert actual["tokens"][0][0] == 2 * on_one(folder, "qwen3", "plain")["tokens"][0][0]
