"""Settings of a replica's engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.config.adapter import AdapterConfig, Quantization
from headway.config.model import Implementation


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings of one replica's engine, out of `[generator]` and related sections."""

    model_path: str
    chat: bool = False  # as in `Tokenizer.load`
    implementation: Implementation | None = None  # of the model; None: by its family
    trust_remote_code: bool = False  # run Python code of the model folder
    quantization: Quantization | None = None
    adapters: Mapping[str, AdapterConfig] = field(default_factory=dict[str, AdapterConfig])  # by name
    seed: int = 0  # of new adapters
    adapter_revisions: int = 2  # vLLM: most revisions of the trained adapter at once
    dtype: str
    slots: int
    max_context_tokens: int
    kv_capacity_tokens: int | None = None
    version: int = 0
    deterministic: bool = False
    native_kernels: bool = True
    prefill_tokens_per_step: int = 8192
    engine: str = "torch"
    engine_arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    probe_every_updates: int = 1
    exchange_directory: str | None = None
    offload_directory: str | None = None  # of offloaded tensors; the temporary folder if this is none
    pixels_directory: str | None = None  # of pixel arrays; None: requests have no pictures
    return_experts: bool = False  # return the experts of each token, as rows of its deltas
    restarted: bool = False  # the replica died before: wait for a server that is unavailable
