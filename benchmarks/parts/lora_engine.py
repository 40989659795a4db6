"""Tokens a second of the own engine with an adapter apart, against the same adapter merged, on one core.

The 48.8 M model of `benchmarks/engine.py` with random weights, float32; 64 concurrent requests with prompts of 24 to 40
tokens, 32 new tokens each, rank 16 beside every linear matrix. Rounds of all sides alternate in one process; a ratio is
the median over rounds, with the smallest and largest beside it.
"""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any

import torch
from engine import CONTEXT_TOKENS, SIZES, prompts_of

from headway.config.adapter import AdapterConfig
from headway.generator.engines.torch.engine import TorchEngine
from headway.models.adapter_targets import adapted_targets
from headway.models.configuration import DecoderConfig
from headway.models.decoder import Decoder
from headway.models.initialise import initialise_parameters
from headway.models.loading import build
from headway.models.lora import Lora, merge
from headway.records.generation import GenerationRequest, SamplingParameters

RANK, SEVERAL = 16, 8


def random_base() -> Decoder:
    """The 48.8 M model with random weights."""
    model = build(DecoderConfig(kv_heads=2, max_positions=1024, **SIZES["large"]))
    initialise_parameters(model, 0)
    return model


def random_adapter(model: Decoder, seed: int) -> Lora:
    """An adapter of rank 16 beside every linear matrix, its B random: so it isn't zero."""
    lora = Lora(adapted_targets(model.config, AdapterConfig(rank=RANK, alpha=2.0 * RANK)), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in lora.parameters.items():
        if name.endswith("lora_B"):
            parameter.data.normal_(0.0, 0.01, generator=generator)
    return lora


def rate_of(engine: TorchEngine, names: list[str], concurrent: int, new_tokens: int, number: int) -> float:
    """Tokens a second of one round whose requests take the adapters ``names`` in turn."""
    requests = [
        GenerationRequest(
            request_id=f"{number}-{i}",
            prompt_ids=tuple(prompt),
            sampling=SamplingParameters(max_tokens=new_tokens, seed=number * 1000 + i),
            adapter=names[i % len(names)],
        )
        for i, prompt in enumerate(prompts_of(number, concurrent))
    ]
    started = time.perf_counter()
    engine.submit(requests)
    while engine.step():
        pass
    tokens = sum(len(delta.ids) for delta in engine.take_deltas())
    if tokens != concurrent * new_tokens:
        raise SystemExit(f"{tokens} tokens instead of {concurrent * new_tokens}")
    return tokens / (time.perf_counter() - started)


def measure_engine(rounds: int = 5, concurrent: int = 64, new_tokens: int = 32) -> dict[str, Any]:
    """Rates with one and with eight adapters apart, and their ratios to the merged model's: median, smallest, largest;
    the pause of an update in flight."""
    torch.set_num_threads(1)
    base = random_base()
    adapters = {f"a{number}": random_adapter(base, number) for number in range(SEVERAL)}
    merged = copy.deepcopy(base)
    merge(merged, adapters["a0"])
    published = {name: tensor.clone() for name, tensor in adapters["a0"].weights().items()}
    apart = TorchEngine(base, slots=concurrent, max_context_tokens=CONTEXT_TOKENS, adapters=adapters)
    whole = TorchEngine(merged, slots=concurrent, max_context_tokens=CONTEXT_TOKENS)
    named = {"one": ["a0"], "eight": list(adapters), "none": ["base"]}
    sides = {"merged": (whole, [""]), **{name: (apart, names) for name, names in named.items()}}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):  # the first warms up
        for name in sorted(sides, reverse=number % 2 == 1):
            rate = rate_of(*sides[name], concurrent, new_tokens, number)
            if number:
                rates[name].append(rate)
    found: dict[str, Any] = {"tokens_per_s": {name: round(statistics.median(all_)) for name, all_ in rates.items()}}
    for key, name in (("engine_over_merged", "one"), ("eight_over_merged", "eight"), ("base_over_merged", "none")):
        ratios = [apart / together for apart, together in zip(rates[name], rates["merged"], strict=True)]
        found[key] = round(statistics.median(ratios), 3)
        found[f"{key}_range"] = [round(min(ratios), 3), round(max(ratios), 3)]
    applied = apart.update_adapter("a0", published, 1, "finish")
    found["update_pause_ms"] = round(1000 * applied.pause_s, 2)
    return found
