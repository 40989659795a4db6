"""Adapters for tests of the vLLM engines: a base model, versions of its adapter, and engines that serve them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from scratch_folders import scratch_folder
from vllm_engines import CONTEXT_TOKENS, SLOTS, model_of, publisher

from headway.config.adapter import AdapterConfig
from headway.generator.engines.settings import EngineSettings
from headway.generator.engines.vllm.adapters import VllmAdapters
from headway.generator.engines.vllm.core import VllmCore, engine_arguments, prepare_process
from headway.generator.engines.vllm.engine import VllmEngine
from headway.generator.engines.vllm.reference import PublishedModel
from headway.models.adapter_files import open_adapter, save_adapter
from headway.models.decoder import Decoder
from headway.models.loading import save_model, weights_of
from headway.models.lora import Lora, merge
from headway.records.generation import POLICY_ADAPTER, PublishedWeights
from headway.runtime.devices import parse_device

REVISIONS = 3  # of the policy at once
CRITIC = 50  # the version of `adapter_of` that is served under the name critic
SEED = 7
POLICY = AdapterConfig(rank=4, alpha=8)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA_OPTIONS = ("--enable-lora", "--max-loras", "5", "--max-cpu-loras", "5", "--max-lora-rank", "8")
LORA_OPTIONS += ("--lora-target-modules", *TARGETS)


@functools.cache
def base_folder(family: str = "qwen3") -> Path:
    folder = scratch_folder("vllm-adapters") / family
    save_model(model_of(0, family=family), folder)
    return folder


def adapter_of(version: int, family: str = "qwen3") -> Lora:
    """Version 0 is the one that a run begins with, whose B is 0."""
    lora = open_adapter(base_folder(family), model_of(0, family=family).config, POLICY, seed=SEED)
    generator = torch.Generator().manual_seed(version)
    for pair in lora.pairs():
        if version:
            pair.b.data = torch.randn(pair.b.shape, generator=generator) * 0.3
    return lora


@functools.cache
def merged_model(version: int, family: str = "qwen3") -> Decoder:
    """What the trainer samples from as ``version``; -1: the base."""
    model = copy.deepcopy(model_of(0, family=family))
    if version > 0:
        merge(model, adapter_of(version, family))
    return model


def published(version: int, name: str = POLICY_ADAPTER, family: str = "qwen3") -> PublishedWeights:
    """A version of the policy as a trainer publishes it."""
    found = publisher().publish(version, adapter_of(version, family).weights())
    return msgspec.structs.replace(found, adapter=name)


@functools.cache
def critic_folder() -> Path:
    folder = scratch_folder("vllm-adapters") / "critic"
    save_adapter(adapter_of(CRITIC), folder, base_folder())
    return folder


def settings_with(family: str = "qwen3", critic: bool = False, **fields: Any) -> EngineSettings:
    names = {POLICY_ADAPTER: POLICY} | ({"critic": AdapterConfig(path=str(critic_folder()))} if critic else {})
    own: dict[str, Any] = {
        "slots": SLOTS,
        "max_context_tokens": CONTEXT_TOKENS,
        "adapters": names,
        "adapter_revisions": REVISIONS,
        "seed": SEED,
    }
    return EngineSettings(model_path=str(base_folder(family)), dtype="float32", **(own | fields))


def adapters_with(settings: EngineSettings, family: str = "qwen3") -> VllmAdapters:
    model = model_of(0, family=family)
    base = PublishedModel(model.config)
    base.take(weights_of(model))
    return VllmAdapters(settings, base)


@functools.cache
def lora_core(family: str = "qwen3") -> VllmCore:
    torch.set_num_threads(1)
    device = parse_device("cpu:0")
    prepare_process(device, 1)
    settings = settings_with(family, critic=family == "qwen3")
    arguments = adapters_with(settings, family).arguments
    return VllmCore(engine_arguments(settings, model_of(0).config, device) | arguments)


_OPEN: list[VllmEngine] = []


def adapter_engine(family: str = "qwen3", **fields: Any) -> VllmEngine:
    """An engine in this process, on the one core of its family."""
    core, settings = lora_core(family), settings_with(family, **fields)
    for engine in _OPEN:
        engine.abort(list(engine._open))
    for number in core._engine.list_loras():
        core._engine.remove_lora(number)
    _OPEN[:] = [VllmEngine(core, settings, model_of(0).config.vocabulary_size, None, adapters_with(settings, family))]
    return _OPEN[0]


def labels(engine: Any) -> Sequence[tuple[str, int]]:
    """Names and versions of the revisions that an engine has registered, the base's left out."""
    return [(one.name, one.version) for one in engine._adapters.registered if one.name != "base"]
