"""The load of ranks.py: a random model of 43 M parameters, batches of full micro-batches, trainers on some ranks."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headway.config.load import validate_experiment
from headway.config.schema import Experiment
from headway.models.configuration import DecoderConfig
from headway.models.initialise import initialise_parameters
from headway.models.loading import build, save_model
from headway.records.generation import VersionSpan
from headway.records.rollout import Rollout, Sample
from headway.records.tokens import TokenIds, TokenLogprobs, TokenMask
from headway.records.training import TrainBatch
from headway.runtime.clock import RealClock
from headway.runtime.workers import LocalLauncher
from headway.trainer import client
from headway.trainer.client import TrainerClient

VOCABULARY, SAMPLE_TOKENS, PROMPT_TOKENS = 16_384, 512, 32
CONFIG = DecoderConfig(
    vocabulary_size=VOCABULARY,
    width=512,
    layers=11,
    heads=8,
    kv_heads=4,
    head_dim=64,
    intermediate=1536,
    max_positions=1024,
    tied=True,
)
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def write_model(folder: Path) -> float:
    """Write the model; returns its million parameters."""
    torch.set_num_threads(1)
    model = build(CONFIG)
    initialise_parameters(model, 0)
    save_model(model, folder / "model")
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6


def rank_experiment(folder: Path, name: str, ranks: int, **trainer: Any) -> Experiment:
    """The experiment of a trainer on so many ranks, in turn on this machine's first two cores."""
    return validate_experiment(
        {
            "run": {"directory": str(folder / name)},
            "model": {"path": str(folder / "model")},
            "tasks": {"train": {"path": "unused.jsonl"}},
            "rollout": {"max_prompt_tokens": PROMPT_TOKENS, "max_response_tokens": SAMPLE_TOKENS - PROMPT_TOKENS},
            "generator": {"dtype": "bfloat16"},
            "trainer": {"devices": [f"cpu:{rank % 2}" for rank in range(ranks)], **trainer},
        },
        name,
    )


@asynccontextmanager
async def started(experiment: Experiment) -> AsyncIterator[TrainerClient]:
    """A trainer whose ranks can say how large their state is."""
    client.SERVICE = "parts.rank_states:MeasuredRank"
    trainer = TrainerClient(LocalLauncher(RealClock()), experiment, Path(experiment.run.directory).name)
    await trainer.start()
    try:
        yield trainer
    finally:
        await trainer.stop()


def batch(step: int, tokens: int) -> TrainBatch:
    """Samples of equal length without a common prefix, ``tokens`` in all."""
    random, samples = np.random.default_rng(step), list[Sample]()
    for group in range(tokens // SAMPLE_TOKENS):
        ids = random.integers(VOCABULARY, size=SAMPLE_TOKENS + 1).astype(np.int32)  # the last one isn't an input
        response_tokens = len(ids) - PROMPT_TOKENS
        rollout = Rollout(
            group=group,
            member=0,
            prompt_ids=TokenIds.view(ids[:PROMPT_TOKENS]),
            response_ids=TokenIds.view(ids[PROMPT_TOKENS:]),
            response_logprobs=TokenLogprobs.filled(-9.0, response_tokens),
            response_mask=TokenMask.filled(True, response_tokens),
            versions=(VersionSpan(version=0, tokens=response_tokens),),
        )
        samples.append(Sample(rollout=rollout, advantage=1.0 if group % 2 else -1.0))
    return TrainBatch(step=step, samples=tuple(samples))


def parts_of(whole: TrainBatch, count: int) -> list[TrainBatch]:
    """The batch in equal parts."""
    size = len(whole.samples) // count
    return [TrainBatch(step=whole.step, samples=whole.samples[n * size : (n + 1) * size]) for n in range(count)]


def cpu_s(trainer: TrainerClient) -> float:
    """CPU seconds that the ranks have used."""
    ticks = 0
    for worker in trainer.workers:
        fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / _TICKS_PER_S
