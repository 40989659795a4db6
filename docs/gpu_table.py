"""Prints the table of docs/gpus.md: which model fits which machine, by the memory model of `headway check`.

python -m docs.gpu_table
"""

from __future__ import annotations

import json
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from headway.config.auto import Machine
from headway.planner.catalogue.read import Catalogue
from headway.planner.gpu_experiment import fitted_experiment
from headway.planner.pool_file import machine_of, read_pool
from headway.records.errors import ConfigurationError

# Qwen3's config.json: hidden, layers, heads, KV heads, intermediate, tied
QWEN3 = {
    "0.6B": (1024, 28, 16, 8, 3072, True),
    "4B": (2560, 36, 32, 8, 9728, True),
    "8B": (4096, 36, 32, 8, 12288, False),
    "32B": (5120, 64, 64, 8, 25600, False),
}
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
    recompute = {"none": "", "selective": ", norms again", "full": ", recomputed"}[trainer["gradient_checkpointing"]]
    return f"{kind}, {split}, {generator['slots']} slots x {raw['rollout']['max_response_tokens']}{recompute}"


def main() -> None:
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
