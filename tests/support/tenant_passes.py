"""Random data of tenants, and the tenants' trainer in this process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_trainer import VOCABULARY, Context

from headway.records.tenants.protocols import TenantAdapter, TrainingDatum, TrainingPass
from headway.records.training import OptimiserSettings
from headway.trainer.tenants.service import TenantTrainerService

RL_LOSSES = ("importance_sampling", "ppo", "cispo", "dro", "gspo")


def service(model: str | Path, store: Path, **settings: Any) -> TenantTrainerService:
    torch.set_num_threads(1)
    return TenantTrainerService(Context, model_path=str(model), store=str(store), **settings)


def datum(random: np.random.Generator, loss: str, tokens: int, targets: int | None = None) -> TrainingDatum:
    """A row of random tokens with free targets, and what the loss needs beside them."""
    shape = (tokens,) if targets is None else (tokens, targets)
    inputs: dict[str, Any] = {"target_tokens": random.integers(0, VOCABULARY, shape)}
    if loss == "cross_entropy":
        inputs["weights"] = random.normal(size=shape).astype("f4")
    else:
        inputs["logprobs"] = (-math.log(VOCABULARY) + random.normal(0, 0.3, shape)).astype("f4")
        inputs["advantages"] = random.normal(size=shape).astype("f4") * (np.arange(tokens) >= tokens // 3)
    return TrainingDatum(token_ids_n=random.integers(0, VOCABULARY, tokens).astype("i4"), inputs=inputs)


def random_pass(
    seed: int, loss: str = "cross_entropy", rows: int = 3, longest: int = 12, **fields: Any
) -> TrainingPass:
    random = np.random.default_rng(seed)
    data = tuple(datum(random, loss, int(random.integers(2, longest))) for _ in range(rows))
    return TrainingPass(data=data, loss=loss, **fields)


def adam(**settings: Any) -> OptimiserSettings:
    """As the service makes them: without clipping unless it is asked for."""
    return OptimiserSettings(**{"learning_rate": 0.01, "max_grad_norm": math.inf} | settings)


def tensors(trainer: TenantTrainerService, model_id: str) -> dict[str, torch.Tensor]:
    """Copies of an adapter's weights and moments, from its durable state."""
    trainer.restore(model_id)
    trained = trainer.adapter(model_id)
    return {shard.name: shard.tensor.clone() for shard in trained.optimiser_shards()} | {
        name: parameter.detach().clone() for name, parameter in trained.lora.parameters.items()
    }


def gradients(trainer: TenantTrainerService, model_id: str) -> dict[str, torch.Tensor]:
    return {name: gradient.clone() for name, gradient in trainer.adapter(model_id).gradients().items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def perturb(trainer: TenantTrainerService, model_id: str, seed: int = 5, scale: float = 0.05) -> None:
    """Give a fresh adapter's B random numbers, so that its output depends on it; in memory alone."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in trainer.adapter(model_id).lora.parameters.items():
        if name.endswith("lora_B"):
            parameter.data.normal_(0, scale, generator=generator)


SMALL = TenantAdapter(rank=4, seed=3)
