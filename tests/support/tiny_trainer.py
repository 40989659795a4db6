"""A tiny random model and random batches for the trainer's tests."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headway.models.configuration import DecoderConfig
from headway.models.loading import build, save_model
from headway.records.generation import VersionSpan
from headway.records.rollout import Rollout, Sample
from headway.records.training import TrainBatch
from headway.trainer.learner import Learner

VOCABULARY = 31


class Context:
    """What a worker object sees of its process."""

    log = logging.getLogger("tiny_trainer")

    class device:
        threads = 1

        @staticmethod
        def torch_device() -> str:
            return "cpu"


def make_model(path: Path, width: int = 16, layers: int = 2, vocabulary: int = VOCABULARY, seed: int = 0) -> str:
    """Write a random Qwen3-style model folder; returns its path."""
    config = DecoderConfig.from_mapping(
        {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": vocabulary,
            "hidden_size": width,
            "intermediate_size": width * 8 // 3,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": width // 2,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "attention_bias": False,
        }
    )
    model = build(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.15, generator=generator)
    save_model(model, path)
    return str(path)


def make_batch(
    seed: int, groups: int = 4, members: int = 3, step: int = 0, longest: int = 12, masked: bool = False
) -> TrainBatch:
    """A batch of random tokens, lengths, log-probabilities and advantages."""
    random = np.random.default_rng(seed)
    samples: list[Sample] = []
    for group in range(groups):
        prompt = tuple(random.integers(0, VOCABULARY, int(random.integers(1, 6))).tolist())
        for member in range(members):
            length = int(random.integers(1, longest + 1))
            rollout = Rollout(
                group=group,
                member=member,
                prompt_ids=prompt,
                response_ids=tuple(random.integers(0, VOCABULARY, length).tolist()),
                response_logprobs=tuple((-3.4 + 0.3 * random.standard_normal(length)).tolist()),
                response_mask=tuple((random.random(length) < 0.85).tolist()) if not masked else (False,) * length,
                versions=(VersionSpan(version=0, tokens=length),),
            )
            samples.append(Sample(rollout=rollout, advantage=float(random.standard_normal())))
    return TrainBatch(step=step, samples=tuple(samples))


def optimiser_tensors(learner: Learner) -> dict[str, torch.Tensor]:
    """This rank's rows of AdamW's state, by name."""
    return {shard.name: shard.tensor for shard in learner.optimiser_shards()}


def make_experiment(model: str, directory: Path, /, **sections: dict[str, Any]) -> dict[str, Any]:
    """A small experiment as a mapping; ``sections`` are merged over the defaults here."""
    raw: dict[str, Any] = {
        "run": {"directory": str(directory)},
        "model": {"path": model},
        "tasks": {"train": {"path": "unused.jsonl"}},
        "rollout": {"max_response_tokens": 16},
        "trainer": {"learning_rate": 1e-3, "micro_batch_tokens": 64},
    }
    for name, values in sections.items():
        raw[name] = {**raw.get(name, {}), **values}
    return raw
