"""vLLM engines for tests. Building one takes seconds, so a core is shared: each test's engine gets it emptied and
with ``model_of(0)``'s weights."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from scratch_folders import scratch_folder
from torch import Tensor

from headway.generator.engines.settings import EngineSettings
from headway.generator.engines.vllm.core import VllmCore, engine_arguments, prepare_process
from headway.generator.engines.vllm.engine import VllmEngine
from headway.models.decoder import Decoder
from headway.models.loading import save_model, weights_of
from headway.records.generation import AppliedWeights, UpdateMode
from headway.runtime.devices import parse_device
from headway.weights.shared_memory import Publisher
from tests.conformance import engine as conformance
from tests.conformance.reference import random_model

SLOTS = 40
CONTEXT_TOKENS = 96
BLOCKS = conformance.Capabilities(kv_block_tokens=32)

needs_vllm = [
    pytest.mark.real,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here: make test-vllm has it"
    ),
]


@functools.cache
def model_of(version: int, tied: bool = True, family: str = "qwen3") -> Decoder:
    """The conformance suite's models with heads that vLLM computes on a CPU."""
    return random_model(100 + version, vocabulary=conformance.VOCABULARY, tied=tied, family=family, head_dim=32)


@functools.cache
def publisher() -> Publisher:
    return Publisher("vllm-tests", directory=_folder())


@functools.cache
def _folder() -> Path:
    return scratch_folder("vllm")


@functools.cache
def core_of(tied: bool = True, family: str = "qwen3", kv_capacity_tokens: int | None = None) -> VllmCore:
    """A small KV also makes prompts take several steps."""
    torch.set_num_threads(1)
    device = parse_device("cpu:0")
    prepare_process(device, 1)
    folder = _folder() / f"{family}-{tied}"
    if not folder.exists():
        save_model(model_of(0, tied, family), folder)
    settings = EngineSettings(
        model_path=str(folder),
        dtype="float32",
        slots=SLOTS,
        max_context_tokens=CONTEXT_TOKENS,
        kv_capacity_tokens=kv_capacity_tokens,
        prefill_tokens_per_step=4096 if kv_capacity_tokens is None else 7,
    )
    return VllmCore(engine_arguments(settings, model_of(0, tied, family).config, device))


class PublishedEngine(VllmEngine):
    """Takes tensors, as the conformance suite gives them, by way of shared memory."""

    def update_weights(self, tensors: Mapping[str, Tensor], version: int, mode: UpdateMode) -> AppliedWeights:
        return self.apply(publisher().publish(version, tensors), mode)


_ENGINES: dict[VllmCore, PublishedEngine] = {}  # the last one of each core


def make_engine(
    *,
    slots: int = 4,
    max_context_tokens: int = CONTEXT_TOKENS,
    kv_capacity_tokens: int | None = None,
    tied: bool = True,
    family: str = "qwen3",
    tokenizer: Any = None,
) -> PublishedEngine:
    assert slots <= SLOTS
    core = core_of(tied, family, kv_capacity_tokens)
    if core in _ENGINES:
        _ENGINES[core].abort(list(_ENGINES[core]._open))
    model = model_of(0, tied, family)
    settings = EngineSettings(model_path="", dtype="float32", slots=1, max_context_tokens=max_context_tokens)
    PublishedEngine(core, settings, model.config.vocabulary_size).update_weights(weights_of(model), 0, "keep")
    settings = dataclasses.replace(settings, slots=slots)
    engine = PublishedEngine(core, settings, model.config.vocabulary_size, tokenizer)
    _ENGINES[core] = engine
    return engine
