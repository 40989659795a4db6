"""A model of known sizes, and what a run of it needs, for tests of the memory model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.config.auto import Gpu, Machine
from headway.config.load import validate_experiment
from headway.config.schema import Checkpointing, Experiment
from headway.models.configuration import DecoderConfig
from headway.models.sizes import ModelSizes, sizes_from
from headway.orchestrator.preflight.memory import memory_uses
from headway.records.check_report import MemoryUse

GIB = 2**30

CONFIG = DecoderConfig(
    vocabulary_size=1000,
    width=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=128,
    max_positions=4096,
    tied=True,
)


def sizes(config: DecoderConfig = CONFIG, **changes: Any) -> ModelSizes:
    return sizes_from(replace(config, **changes).to_mapping("float32"))


MODEL = sizes()
NORMS = 64 + 2 * (2 * 64 + 2 * 16)
PARAMETERS = 1000 * 64 + 2 * ((4 + 2 * 2 + 4) * 16 * 64 + 3 * 64 * 128) + NORMS


def experiment(folder: Path, **sections: dict[str, Any]) -> Experiment:
    raw: dict[str, Any] = {
        "run": {"directory": str(folder / "run")},
        "model": {"path": "m"},
        "tasks": {"train": {"path": "t"}},
        "rollout": {"max_prompt_tokens": 100, "max_response_tokens": 400},
        "generator": {"slots": 10},
    }
    for name, values in sections.items():
        raw[name] = raw.get(name, {}) | values
    return validate_experiment(raw, "test")


CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")


def uses_of(folder: Path, **sections: dict[str, Any]) -> dict[str, MemoryUse]:
    return {f"{use.name} {use.location}": use for use in memory_uses(experiment(folder, **sections), MODEL)}


def machine_with(memory_bytes: int, count: int) -> Machine:
    gpus = [Gpu(index=n, name="G", memory_bytes=memory_bytes, free_bytes=memory_bytes) for n in range(count)]
    return Machine(gpus=tuple(gpus), torch_cuda="13.0")
