"""Prints the tables of docs/gpus.md: which model fits which machine, and how published trainers' models are divided, by
the memory model of `headway check`.

python -m docs.gpu_table [trainers]
"""

from __future__ import annotations

import json
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from headway.config.auto import Machine
from headway.config.load import validate_experiment
from headway.models.sizes import sizes_of
from headway.orchestrator.preflight.capacity import with_trainer
from headway.orchestrator.preflight.memory import trainer_parts
from headway.planner.catalogue.read import Catalogue
from headway.planner.gpu_experiment import PROMPT_TOKENS, fitted_experiment
from headway.planner.pool_file import machine_of, read_pool
from headway.planner.stage_curves import RooflineCurves
from headway.records.errors import ConfigurationError

# Qwen3's config.json: hidden, layers, heads, KV heads, intermediate, tied
QWEN3 = {
    "0.6B": (1024, 28, 16, 8, 3072, True),
    "4B": (2560, 36, 32, 8, 9728, True),
    "8B": (4096, 36, 32, 8, 12288, False),
    "32B": (5120, 64, 64, 8, 25600, False),
}
PUBLISHED = Path(__file__).resolve().parents[1] / "tests" / "unit" / "models" / "published_configs.json"
# what was or would be trained, model, device, devices, tokens of the longest sequence
TRAINERS = (
    ("Qwen3-8B", "Qwen/Qwen3-8B", "H100", 1, 4096),
    ("Qwen3-8B", "Qwen/Qwen3-8B", "H100", 2, 4096),
    ("Qwen3-32B", "Qwen/Qwen3-32B", "H100", 4, 4096),
    ("Qwen3-32B", "Qwen/Qwen3-32B", "H100", 8, 4096),
    ("Qwen3-32B (veRL)", "Qwen/Qwen3-32B", "H100", 64, 28672),
    ("Qwen3-235B (A: prime-rl)", "Qwen/Qwen3-235B-A22B", "H200", 64, 32768),
    ("GLM-5 (B)", "zai-org/GLM-5", "H200", 128, 65536),
    ("Qwen3-235B (C)", "Qwen/Qwen3-235B-A22B", "GB300", 32, 131072),
    ("Qwen3-235B (D: slime)", "Qwen/Qwen3-235B-A22B", "H200", 32, 32768),
)
POOLS = {
    "1 x 24 GB": 'device = "RTX4090"',
    "1 x 80 GB": 'device = "H100"',
    "8 x 80 GB": 'device = "H100"\ncount = 8',
    "8 x 192 GB": 'device = "B200"\ncount = 8',
    "no GPU, 24 GB": 'device = "cpu"',
}


def write_config(size: str, folder: Path) -> Path:
    """Write the config.json of a Qwen3 of ``size`` into ``folder``; returns it."""
    hidden, layers, heads, kv_heads, intermediate, tied = QWEN3[size]
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 128,
        "intermediate_size": intermediate, "max_position_embeddings": 40960, "tie_word_embeddings": tied,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def described(pool: str, folder: Path) -> Machine:
    """The machine of `POOLS` called ``pool``."""
    file = folder / "pool.toml"
    file.write_text(f"[[devices]]\n{POOLS[pool]}\n")
    return machine_of(read_pool(file, Catalogue.read()), str(file))


def tables(folder: Path) -> dict[str, Any]:
    """The sections of an experiment that have nothing to do with memory."""
    return {
        "run": {"directory": str(folder / "run")},
        "tasks": {"train": {"path": str(folder / "tasks.jsonl")}},
        "queue": {"groups_per_step": 32, "budget": 2},
    }


def summary(text: str) -> str:
    """A written experiment in a few words."""
    raw = tomllib.loads(text)
    model, generator, trainer = raw["model"], raw["generator"], raw["trainer"]
    kind = "LoRA" if "adapter" in model else "whole"
    kind += f" ({model['quantization']})" if "quantization" in model else ""
    split = f"{len(generator['devices'])}+{len(trainer['devices'])}" if "run" not in raw or not raw["run"].get(
        "offload") else "by turns"  # fmt: skip
    split += f", {trainer['shards']} shards" if trainer.get("shards", 1) > 1 else ""
    recompute = {"none": "", "selective": ", norms again", "full": ", recomputed"}[trainer["gradient_checkpointing"]]
    return f"{kind}, {split}, {generator['slots']} slots x {raw['rollout']['max_response_tokens']}{recompute}"


def write_published(name: str, folder: Path) -> Path:
    """Write the config.json of a published model into ``folder``; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = json.loads(PUBLISHED.read_text(encoding="utf-8"))[name]
    (folder / "config.json").write_text(json.dumps(stored.get("config", stored)))
    return folder


def division(model: Path, device: str, devices: int, tokens: int, folder: Path) -> str:
    """How `headway plan` divides a model among trainer ranks on these devices, or why it can't."""
    raw = tables(folder) | {
        "model": {"path": str(model)},
        "rollout": {"max_prompt_tokens": PROMPT_TOKENS, "max_response_tokens": tokens - PROMPT_TOKENS},
        "generator": {"devices": ["cuda:0"], "dtype": "bfloat16"},
        "trainer": {"devices": ["cuda:0"], "dtype": "bfloat16", "micro_batch_tokens": tokens,
                    "gradient_checkpointing": "full"},
    }  # fmt: skip
    file = folder / "pool.toml"
    file.write_text(
        f'[[devices]]\ndevice = "{device}"\ncount = {devices}\nnetwork_bytes_per_s = 5e10\n'
        f"[workload]\nprompt_tokens = 500\nresponse_tokens = {tokens // 2}\n"
    )
    pool = read_pool(file, Catalogue.read())
    curves = RooflineCurves(validate_experiment(raw, "the trainer"), sizes_of(model), pool)
    curve = curves.training(0, devices)
    if curve is None:
        return "no: " + curves.reasons["train"].removeprefix("train: ")
    cell = f"{curve.spread}: {(curve.bytes_per_device or 0) / 1e9:.1f} GB each"
    if "host memory" in curve.spread:
        names = tuple(f"cuda:{number}" for number in range(devices))
        parts, _ = trainer_parts(with_trainer(curves.experiment, devices=names, shards="all"), sizes_of(model))
        cell += f"; without, {sum(parts.values()) / 1e9:.1f} GB with all as shards"
    return cell


def print_trainers(folder: Path) -> None:
    for name, model, device, devices, tokens in TRAINERS:
        config = write_published(model, folder / model.replace("/", "-"))
        print(f"{name:26} {devices:3} {device:5} {division(config, device, devices, tokens, folder)}")


def main() -> None:
    if sys.argv[1:] == ["trainers"]:
        with tempfile.TemporaryDirectory() as scratch:
            print_trainers(Path(scratch))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for pool in POOLS:
            machine = described(pool, folder)
            for size in QWEN3:
                try:
                    text = fitted_experiment(machine, size, str(write_config(size, folder / size)), tables(folder))
                    cell = summary(text)
                except ConfigurationError as error:
                    cell = "no: " + str(error).partition("the whole model: ")[2].partition(";")[0]
                print(f"{pool:14} {size:5} {cell}")


if __name__ == "__main__":
    main()
