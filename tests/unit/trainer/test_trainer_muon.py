"""Muon against float64: each named matrix by its singular values, all other weights by AdamW."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_hub import make_hub_model
from tiny_trainer import Context, make_batch, make_experiment, make_model, optimiser_tensors

from headway.algorithms.samples import build_arrays, lay_out
from headway.config.load import validate_experiment
from headway.models.loading import save_model
from headway.records.errors import ConfigurationError
from headway.trainer.checkpoints import checkpoint_path
from headway.trainer.optimizer import NEWTON_SCHULZ, NEWTON_SCHULZ_STEPS, orthogonalised
from headway.trainer.service import TrainerService
from tests.conformance.reference import random_model

torch.set_num_threads(1)
RATE, DECAY, MOMENTUM = 5e-3, 0.1, 0.9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("muon")
    make_model(path / "dense")
    save_model(random_model(0, vocabulary=31, family="qwen3_moe", tied=False), path / "mixture")
    make_hub_model(path / "hub", "Olmo2")
    return path


def service(folder: Path, kind: str = "dense", run: Path = Path("/nowhere"), **trainer: Any) -> TrainerService:
    trainer = {"optimizer": "muon", "learning_rate": RATE, "weight_decay": DECAY, "max_grad_norm": 1e9, **trainer}
    raw = make_experiment(str(folder / kind), run, trainer=trainer)
    return TrainerService(Context, experiment=raw, run_id="test")


def exact_direction(matrix: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz's polynomial of the singular values, in float64."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.square().sum().sqrt().clamp(min=1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ v


@pytest.mark.parametrize("shape", [(7, 7), (3, 20), (20, 3), (1, 5), (4, 6, 5)])
def test_singular_values_become_nearly_one(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    actual = orthogonalised(matrix)
    for one, direction in zip(matrix.reshape(-1, *shape[-2:]), actual.reshape(-1, *shape[-2:]), strict=True):
        assert torch.allclose(direction.double(), exact_direction(one), rtol=0, atol=2e-5)
    values = torch.linalg.svdvals(orthogonalised(torch.eye(6) + 0.3 * torch.randn(6, 6)))
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3
    assert torch.equal(orthogonalised(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


def named_matrices(name: str, parameter: torch.Tensor, config: Any) -> list[torch.Tensor]:
    """The matrices of a parameter of a layer, by its name alone; []: AdamW's."""
    kind = name.rpartition(".")[2]
    if not name.startswith("layers.") or kind not in ("qkv_weight", "output_weight", "gate_up_weight", "down_weight"):
        return []
    experts = list(parameter) if parameter.ndim == 3 else [parameter]
    if kind == "qkv_weight":
        rows = [config.heads * config.head_dim, *[config.kv_heads * config.head_dim] * 2]
        return [part for expert in experts for part in expert.split(rows)]
    return [part for expert in experts for part in (expert.chunk(2) if kind == "gate_up_weight" else [expert])]


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_updates_equal_a_float64_reference_by_matrix(folder: Path, kind: str) -> None:
    trainer = service(folder, kind)
    learner = trainer.learner
    names, config = list(learner.masters.trained()), learner.model.config
    exact = {name: p.detach().double() for name, p in learner.masters.trained().items()}
    means = {name: torch.zeros_like(p) for name, p in exact.items()}
    squares = {name: torch.zeros_like(p) for name, p in exact.items()}
    blocks = 0
    for step in range(3):
        trainer.policy.accumulate_gradients(build_arrays(make_batch(step)))
        grads = {name: g.detach().double() for name, g in zip(names, learner.gradients(), strict=True)}
        settings = learner.optimiser_settings(RATE)
        learner.update(settings, 0.0)
        for name, grad in grads.items():
            means[name] = MOMENTUM * means[name] + (1 - MOMENTUM) * grad
            exact[name] *= 1 - RATE * DECAY
            ahead = MOMENTUM * means[name] + (1 - MOMENTUM) * grad
            matrices = named_matrices(name, exact[name], config)
            for matrix, direction in zip(matrices, named_matrices(name, ahead, config), strict=True):
                matrix -= RATE * 0.2 * math.sqrt(max(matrix.shape)) * exact_direction(direction)
                blocks += 1
            if not matrices:
                squares[name] = 0.95 * squares[name] + 0.05 * grad**2
                denominator = (squares[name] / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8
                exact[name] -= RATE * means[name] / (1 - MOMENTUM ** (step + 1)) / denominator
        for name, parameter in learner.masters.trained().items():
            assert torch.allclose(parameter.double(), exact[name], rtol=0, atol=RATE * 5e-3), name
    per_layer = 7 if kind == "dense" else 4 + 3 * config.mixture.experts
    assert blocks == 3 * per_layer * config.layers
    kept = {name.partition("/")[0] for name in optimiser_tensors(learner) if name.endswith("embedding_weight")}
    assert kept == {"step", "exp_avg", "exp_avg_sq"}
    assert {name.partition("/")[0] for name in optimiser_tensors(learner) if "qkv" in name} == {"momentum"}


@pytest.mark.parametrize("keys", [{}, {"dtype": "bfloat16"}, {"host_memory": "optimiser"}], ids=str)
def test_a_resumed_run_has_the_same_bits(folder: Path, tmp_path: Path, keys: dict[str, Any]) -> None:
    straight, path = service(folder, run=tmp_path, **keys), str(checkpoint_path(tmp_path, 2))
    (folder / "dense" / "tokenizer.json").write_text("{}")
    for step in range(4):
        straight.train_step(lay_out(make_batch(step, step=step)))
        if step == 1:
            straight.save_checkpoint(path, {})
    resumed = service(folder, run=tmp_path, **keys)
    assert resumed.load_checkpoint(path) == 2
    for step in (2, 3):
        resumed.train_step(lay_out(make_batch(step, step=step)))
    for one, other in zip(straight.learner.parameters, resumed.learner.parameters, strict=True):
        assert torch.equal(one, other)
    if keys:
        plain = service(folder)
        plain.train_step(lay_out(make_batch(0)))
        again = service(folder, **keys)
        again.train_step(lay_out(make_batch(0)))
        for one, other in zip(plain.learner.parameters, again.learner.parameters, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=0.0 if "host_memory" in keys else 4 * RATE)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"trainer": {"devices": ["cpu:0", "cpu:1"], "shards": 2}},
            "trainer.shards = 2 divides them; valid: shards = 1",
        ),
        ({"trainer": {"devices": ["cpu:0", "cpu:1"], "context_parallel": 2}}, "context_parallel = 2"),
        ({"trainer": {"host_memory": "all"}}, "trainer.host_memory = 'none' or 'optimiser'"),
        ({"model": {"adapter": {"rank": 2, "alpha": 4}}}, "[model.adapter]"),
    ],
)
def test_what_divides_or_replaces_matrices_is_refused(folder: Path, sections: dict[str, Any], message: str) -> None:
    raw = make_experiment(str(folder / "dense"), Path("/nowhere"), **sections)
    raw["trainer"]["optimizer"] = "muon"
    with pytest.raises(ConfigurationError, match=r"trainer.optimizer = 'muon'") as refused:
        validate_experiment(raw, "test")
    assert message in str(refused.value)


def test_models_of_transformers_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"trainer.optimizer = 'muon'.*valid: 'adamw'"):
        service(folder, "hub")
