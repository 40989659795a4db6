"""How far are the trainer's log-probabilities in bfloat16 from those that the engine sampled with?

    python benchmarks/precision.py [--against REV] [--tokens 2000] [--quick]

Random Qwen3-style models, one of 43 M parameters and one with 16 experts (4 of a token), with scaled embeddings, so that
next tokens aren't equally likely, and uneven norms. The torch engine samples `--tokens` tokens at T = 1 by decoding on
its cache; the trainer computes the same tokens as it does in training, packed. Printed is the absolute difference of
the two log-probabilities of a token, in nats: its mean and its largest value. A mixture's trainer routes each token
itself (`own routers`), and over the engine's experts (`replayed`).

`--against REV`: the same by the code of this revision, from `git archive`, on the same files.
Last line, one JSON object: of `after` (this checkout) and `before` (REV), by model and kind, `mean` and `largest`.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headway.algorithms.samples import build_arrays, slice_micro_batch
from headway.config.model import ModelConfig
from headway.config.schema import TrainerConfig
from headway.generator.engines.torch.engine import TorchEngine
from headway.models.configuration import DecoderConfig, ExpertMixture
from headway.models.initialise import initialise_parameters
from headway.models.loading import build, load_model, save_model
from headway.records.generation import GenerationRequest, SamplingParameters, VersionSpan
from headway.records.rollout import Rollout, Sample
from headway.records.tokens import EXPERTS
from headway.records.training import TrainBatch
from headway.trainer.learner import Learner
from headway.trainer.ranks import Ranks

ROOT = Path(__file__).parent.parent
PROMPT_TOKENS, ROWS = 16, 16
EMBEDDING_SCALE = 4.0
DENSE = DecoderConfig(
    vocabulary_size=16384, width=512, layers=11, heads=8, kv_heads=4, head_dim=64, intermediate=1536, max_positions=512
)
MIXTURE = dataclasses.replace(
    DENSE,
    architecture="Qwen3MoeForCausalLM",
    width=256,
    layers=6,
    intermediate=512,
    mixture=ExpertMixture(experts=16, per_token=4, intermediate=512),
)
MODELS = {"dense": DENSE, "mixture": MIXTURE}
QUICK = {name: dataclasses.replace(c, vocabulary_size=256, width=64, layers=2) for name, c in MODELS.items()}


def write_models(folder: Path, configs: dict[str, DecoderConfig]) -> None:
    for name, config in configs.items():
        model = build(config)
        initialise_parameters(model, 0)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            model.embedding_weight.mul_(EMBEDDING_SCALE)
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
        save_model(model, folder / name)
        print(f"{name}: {sum(one.numel() for one in model.parameters()) / 1e6:.1f} M parameters", flush=True)


def sampled(folder: Path, tokens: int) -> list[Rollout]:
    """Sample `tokens` tokens by the engine, in `ROWS` rows at once."""
    model = load_model(folder, "bfloat16")
    has_experts = model.config.mixture is not None
    per_row = -(-tokens // ROWS)
    engine = TorchEngine(
        model, slots=ROWS, max_context_tokens=PROMPT_TOKENS + per_row, **({"return_experts": True} if has_experts else {})
    )
    random = np.random.default_rng(0)
    prompts = random.integers(0, model.config.vocabulary_size, (ROWS, PROMPT_TOKENS)).tolist()
    engine.submit(
        [
            GenerationRequest(
                request_id=str(row),
                prompt_ids=tuple(prompt),
                sampling=SamplingParameters(temperature=1.0, max_tokens=per_row, seed=row),
            )
            for row, prompt in enumerate(prompts)
        ]
    )
    deltas: dict[int, list[Any]] = {row: [] for row in range(ROWS)}
    while engine.step():
        for delta in engine.take_deltas():
            deltas[int(delta.request_id)].append(delta)
    for delta in engine.take_deltas():
        deltas[int(delta.request_id)].append(delta)
    return [rollout_of(row, tuple(prompts[row]), deltas[row]) for row in range(ROWS)]
