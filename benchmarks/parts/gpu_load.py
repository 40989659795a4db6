"""What the parts of ``gpu.py`` share: their settings, the model's sizes, the loads and the experiment."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu import RESULT, SHOWN

from headway.config.load import validate_experiment
from headway.config.schema import Experiment
from headway.models.configuration import DecoderConfig
from headway.models.decoder import Decoder
from headway.records.generation import GenerationRequest, SamplingParameters
from headway.runtime.devices import Device

# Qwen3's own sizes (0.6B, 1.7B, 4B); all tie the output head to the embedding
SIZES: dict[str, dict[str, Any]] = {
    "0.6": {"layers": 28, "width": 1024, "heads": 16, "kv_heads": 8, "intermediate": 3072},
    "1.7": {"layers": 28, "width": 2048, "heads": 16, "kv_heads": 8, "intermediate": 6144},
    "4": {"layers": 36, "width": 2560, "heads": 32, "kv_heads": 8, "intermediate": 9728},
    "tiny": {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "intermediate": 128},
}
# of a forward pass: activations are kept for the backward, and the optimiser's state takes 16 bytes a parameter
MICRO_BATCH_TOKENS = {"0.6": 16_384, "1.7": 8192, "4": 2048, "tiny": 16_384}
CHARACTERS = "0123456789+-= abcdef"


class Context:
    """What a worker object sees of its process."""

    def __init__(self, device: str) -> None:
        self.device = Device(kind="cuda" if device == "cuda" else "cpu", first=0, last=0)
        self.log = logging.getLogger("gpu")

    def emit(self, event: Any) -> None:
        """Nobody listens."""


@dataclass(frozen=True)
class Settings:
    """What gpu.py asks for."""

    device: str  # cuda | cpu
    size: str
    quick: bool
    folder: str
    limit_s: float  # gpu.py kills the part then

    @property
    def model(self) -> Path:
        return Path(self.folder) / "model"

    @property
    def dtype(self) -> str:
        """Of the generator's weights and the trainer's products; on a CPU, where little has bfloat16, float32."""
        return "bfloat16" if self.device == "cuda" else "float32"

    def configuration(self) -> DecoderConfig:
        head_dim, vocabulary = (16, 512) if self.size == "tiny" else (128, 151_936)
        return DecoderConfig(
            **SIZES[self.size],
            head_dim=head_dim,
            vocabulary_size=vocabulary,
            max_positions=8192,
            rope_theta=1e6,
            eos_token_id=2,
            pad_token_id=0,
        )


def show(text: str) -> None:
    """For people."""
    print(SHOWN + text, flush=True)


def give(**found: Any) -> None:
    """For gpu.py, as soon as something is known."""
    print(RESULT + json.dumps(found), flush=True)


def synchronise(settings: Settings) -> None:
    if settings.device == "cuda":
        torch.cuda.synchronize()


def timed(settings: Settings, work: Callable[[], object]) -> float:
    """Seconds ``work`` takes on the device."""
    synchronise(settings)
    started = time.perf_counter()
    work()
    synchronise(settings)
    return time.perf_counter() - started


def memory(settings: Settings) -> str:
    return f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB at most" if settings.device == "cuda" else "on the CPU"


def concurrencies(settings: Settings) -> tuple[int, ...]:
    return (1, 4) if settings.quick else (1, 16, 64, 256)


def decode_lengths(settings: Settings) -> tuple[int, int]:
    """Prompt and response tokens."""
    return (8, 16) if settings.quick else (128, 256)


def requests(config: DecoderConfig, count: int, prompt: int, response: int) -> list[GenerationRequest]:
    """Distinct prompts, no stop tokens."""
    rng = random.Random(count)
    return [
        GenerationRequest(
            request_id=f"{response}-{index}",
            prompt_ids=tuple(rng.randrange(3, config.vocabulary_size) for _ in range(prompt)),
            sampling=SamplingParameters(max_tokens=response, seed=index),
        )
        for index in range(count)
    ]


def experiment(settings: Settings, name: str, budget: int = 2) -> Experiment:
    """Generator and trainer on the same device; lengths are forced."""
    load = load_of(settings)
    device = "cuda:0" if settings.device == "cuda" else "cpu:0"
    return validate_experiment(
        {
            "run": {"directory": str(Path(settings.folder) / name), "steps": 100_000},
            "model": {"path": str(settings.model)},
            "tasks": {"train": {"path": str(Path(settings.folder) / "tasks.jsonl"), "columns": {"answer": ""}}},
            # random responses end in a low digit now and then: rewards and gradients are not all zero
            "verifier": {"name": "regex", "parameters": {"pattern": "[0-4][^0-9]*$"}},
            "rollout": {
                "group_size": load.group,
                "max_prompt_tokens": load.prompt_tokens,
                "max_response_tokens": load.longest_tokens,
            },
            "generator": {"devices": [device], "dtype": settings.dtype, "slots": load.slots},
            "queue": {"groups_per_step": load.groups, "budget": budget, "filter_zero_variance": False},
            "trainer": {
                "devices": [device],
                "dtype": settings.dtype,
                "learning_rate": 1e-6,
                "micro_batch_tokens": load.micro_batch_tokens,
            },
            "checkpoint": {"every_steps": 1_000_000},
            "evaluation": {"test": "never"},
            "ledger": {"trackers": []},
        },
        "benchmark",
    )


@dataclass(frozen=True)
class Load:
    """What the loop generates and trains."""

    prompt_tokens: int
    median_tokens: int
    longest_tokens: int
    group: int
    groups: int  # of a step
    slots: int
    micro_batch_tokens: int
    steps: int  # measured


def load_of(settings: Settings) -> Load:
    if settings.quick:
        return Load(8, 6, 24, 4, 2, 8, 2048, 2)
    return Load(128, 192, 1024, 8, 16, 128, MICRO_BATCH_TOKENS[settings.size], 6)


def weight_bytes(decoder: Decoder) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in decoder.parameters())
