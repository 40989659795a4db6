"""Writes an experiment that fits a machine's GPUs, by the memory model of `headway check`.

Tried in this order, the first that fits is written: the whole model, the same with its optimiser in the host's memory,
low-rank adapters, adapters beside 8-bit and 4-bit weights; replicas of one GPU, then of more by tensor parallelism; a
quarter of the GPUs training, then half of them, then one. The fewest of the trainer's ranks that can divide a copy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from headway.config.auto import Machine, resolve
from headway.config.load import validate_experiment
from headway.config.schema import Checkpointing, Experiment, HostMemory
from headway.models.sizes import ModelSizes, sizes_of
from headway.orchestrator.preflight.capacity import (
    fewest_shards,
    gibibytes,
    lacking,
    memory_places,
    shard_counts,
    with_trainer,
)
from headway.orchestrator.preflight.memory import memory_uses
from headway.records.errors import ConfigurationError

PROMPT_TOKENS = 512
_RESPONSES, _SLOTS, _MICRO_BATCHES = (2048, 1024), (256, 128, 64, 32, 16), (16384, 8192, 4096, 2048)
_CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")  # each is slower than the one before
_FULL_RATE, _ADAPTER_RATE = 2e-6, 3e-5  # of models of billions of weights


@dataclass(frozen=True, kw_only=True)
class MemoryChoice:
    """An experiment's choices about memory."""

    adapter: bool  # whether low-rank weights are trained instead of the model's
    quantization: str  # of the weights beside an adapter; "": none
    host_memory: HostMemory
    trainers: int  # GPUs that train; 0: as "auto" splits them
    ranks: int  # GPUs of a replica
    checkpointing: Checkpointing = "full"
    response_tokens: int = _RESPONSES[-1]
    slots: int = _SLOTS[-1]
    micro_batch_tokens: int = _MICRO_BATCHES[-1]


def fitted_experiment(machine: Machine, model: str, folder: str, tables: dict[str, Any]) -> str:
    """The text of an experiment file that trains the model called ``model``, whose configuration is in ``folder``, on
    ``machine``; each value has its reason. ``tables``: the sections that have nothing to do with memory. Raises
    ConfigurationError with the bytes that are missing."""
    sizes, refusals = sizes_of(folder), dict[str, str]()
    for method_choice in _methods(machine):
        try:
            smallest_experiment = _experiment(machine, folder, tables, method_choice)
        except ConfigurationError as error:
            refusals[_method(method_choice)] = str(error)
            continue
        if refusal := lacking(smallest_experiment, sizes, machine):
            refusals[_method(method_choice)] = refusal
            continue
        for kept, response_tokens, slots, micro in product(_CHECKPOINTING, _RESPONSES, _SLOTS, _MICRO_BATCHES):
            choice = replace(method_choice, checkpointing=kept, response_tokens=response_tokens)
            choice = replace(choice, slots=slots, micro_batch_tokens=micro)
            experiment = _experiment(machine, folder, tables, choice)
            if not lacking(experiment, sizes, machine):
                return _text(machine, model, experiment, sizes, tables, choice, refusals)
    details_text = "; ".join(f"{method}: {refusal}" for method, refusal in refusals.items())
    raise ConfigurationError(
        f"--model {model} doesn't fit {_describe(machine)}: {details_text}; valid: a smaller model, or larger GPUs"
    )


def _methods(machine: Machine) -> Iterator[MemoryChoice]:
    gpu_count = len(machine.usable)
    trainer_counts = [0, *([gpu_count // 2] if gpu_count >= 4 else []), *([1] if gpu_count >= 8 else [])]
    rank_counts = [ranks for ranks in (1, 2, 4, 8) if ranks == 1 or ranks < gpu_count]
    methods: list[tuple[bool, str, HostMemory]] = [(False, "", "none")]
    methods.extend([(False, "", "optimiser")] if gpu_count else [])
    methods.extend((True, quantization, "none") for quantization in ("", "8bit", "4bit"))
    for (adapter, quantization, host_memory), ranks, trainers in product(methods, rank_counts, trainer_counts):
        if not (quantization and ranks > 1):  # vLLM would load the weights unquantised
            choice = MemoryChoice(
                adapter=adapter, quantization=quantization, host_memory=host_memory, trainers=trainers, ranks=ranks
            )
            yield choice


def _method(choice: MemoryChoice) -> str:
    if not choice.adapter:
        return "the whole model" + (", its optimiser in host memory" if choice.host_memory != "none" else "")
    return f"an adapter beside {choice.quantization} weights" if choice.quantization else "an adapter"


def _experiment(machine: Machine, folder: str, tables: dict[str, Any], choice: MemoryChoice) -> Experiment:
    raw_settings = tables | _keys(choice)
    raw_settings["model"] = {**tables.get("model", {}), "path": folder, **raw_settings["model"]}
    if choice.trainers and machine.usable:
        raw_settings["trainer"]["devices"] = [f"cuda:{n}" for n in machine.usable[-choice.trainers :]]
    experiment = validate_experiment(resolve(raw_settings, machine), "the experiment")
    return with_trainer(experiment, shards=fewest_shards(experiment, machine))


def _keys(choice: MemoryChoice) -> dict[str, dict[str, Any]]:
    """The keys that a choice sets, by section."""
    generator: dict[str, Any] = {"slots": choice.slots}
    if choice.ranks > 1:
        generator |= {"engine": "vllm", "engine_arguments": {"tensor_parallel_size": choice.ranks}}
        generator |= {"update_mode": "recompute"} if choice.adapter else {}
    model: dict[str, Any] = {"quantization": choice.quantization} if choice.quantization else {}
    if choice.adapter:
        model["adapter"] = {"rank": 32, "alpha": 32}
    return {
        "model": model,
        "rollout": {"max_prompt_tokens": PROMPT_TOKENS, "max_response_tokens": choice.response_tokens},
        "generator": generator,
        "trainer": {
            "micro_batch_tokens": choice.micro_batch_tokens,
            "gradient_checkpointing": choice.checkpointing,
            "learning_rate": _ADAPTER_RATE if choice.adapter else _FULL_RATE,
            **({} if choice.host_memory == "none" else {"host_memory": choice.host_memory}),
        },
    }


def _describe(machine: Machine) -> str:
    if not machine.usable:
        return "a machine without GPUs"
    first_gpu = machine.cuda[machine.usable[0]]
    return f"{len(machine.usable)} × {first_gpu.name} with {gibibytes(first_gpu.memory_bytes)}"


def _text(
    machine: Machine,
    model: str,
    experiment: Experiment,
    sizes: ModelSizes,
    tables: dict[str, Any],
    choice: MemoryChoice,
    refusals: dict[str, str],
) -> str:
    """The experiment as TOML, each value with its reason."""
    places = memory_places(memory_uses(experiment, sizes), machine=machine)
    needed = {place.name: gibibytes(place.needed_bytes) for place in places}
    generator, trainer, keys = experiment.generator, experiment.trainer, _keys(choice)
    refusal_text = "; ".join(f"{method}: {reason}" for method, reason in refusals.items() if method != _method(choice))
    takes_turns = experiment.run.offload
    fewer = [count for count in shard_counts(experiment) if count < trainer.shards_of(len(trainer.devices))]
    fewer_shards_text = lacking(with_trainer(experiment, shards=max(fewer, default=1)), sizes, machine, trainer=True)
    on_gpus = [name for name in (generator.devices[0], trainer.devices[0]) if name in needed]
    reason_by_key = {
        "run.offload": "the sides take turns on one GPU: each frees its memory for the other",
        "model.path": f"{sizes.parameters / 1e9:.2f} G weights",
        "model.dtype": "what all of the GPUs multiply fastest" if machine.usable else "the fastest on most CPU cores",
        "model.adapter": f"{_method(choice)}, because {refusal_text}",
        "model.quantization": "type of the weights beside the adapter",
        "rollout.max_prompt_tokens": "raise it where check names longer prompts",
        "rollout.max_response_tokens": "what fits beside the weights; KV and activations grow with it",
        "generator.engine": "vLLM divides a replica among GPUs" if choice.ranks > 1 else "Headway's own",
        "generator.engine_arguments": f"one GPU doesn't hold a replica: {choice.ranks} do",
        "generator.devices": "generation is most of the work" if not takes_turns else "shared with the trainer",
        "generator.slots": f"requests at once of a replica: {needed.get((on_gpus or [''])[0], '?')} of its GPU at most",
        "generator.update_mode": "vLLM keeps no two revisions of an adapter for one request",
        "trainer.devices": f"{needed.get((on_gpus or [''])[-1], '?')} of each at most",
        "trainer.shards": f"{trainer.shards} ranks divide a copy: {fewer_shards_text}",
        "trainer.host_memory": "AdamW's moments, for which the GPUs have no space",
        "trainer.learning_rate": f"usual for {'adapters' if choice.adapter else 'whole models'}",
        "trainer.micro_batch_tokens": "the largest whose activations fit",
        "trainer.gradient_checkpointing": "what is computed again, where activations don't fit otherwise",
    }
    keys["run"] = {"offload": True} if takes_turns else {}
    keys["model"] = {"path": model, "dtype": trainer.dtype} | keys["model"]
    keys["generator"] = {"engine": generator.engine, "devices": [*generator.devices]} | keys["generator"]
    shards = {"shards": trainer.shards} if trainer.shards != 1 else {}
    keys["trainer"] = {"devices": [*trainer.devices]} | shards | keys["trainer"]
    lines = [f"# Fits {_describe(machine)}, by the memory model of headway check. Every other key has a default."]
    for name in dict.fromkeys((*tables, *keys)):
        section = tables.get(name, {}) | keys.get(name, {})
        nested_tables = {key: value for key, value in section.items() if key in ("train", "validation", "test")}
        plain_values = {key: value for key, value in section.items() if key not in nested_tables}
        if plain_values:
            lines += ["", f"[{name}]"]
        for key, value in plain_values.items():
            reason = reason_by_key.get(f"{name}.{key}", "")
            lines.append(f"{key} = {_toml(value)}" + (f"  # {reason}" if reason else ""))
        for key, table in nested_tables.items():
            lines += ["", f"[{name}.{key}]", *(f"{table_key} = {_toml(value)}" for table_key, value in table.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(part)}" for key, part in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False)


def has_chat_template(folder: str) -> bool:
    """Whether the tokenizer in ``folder`` has a chat template, by its files."""
    config_file = Path(folder) / "tokenizer_config.json"
    return (Path(folder) / "chat_template.jinja").is_file() or (
        config_file.is_file() and '"chat_template"' in config_file.read_text()
    )
