"""Builds the engine of a replica: torch, vLLM or a vLLM server. vLLM is imported only where it is configured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec
from torch import Tensor

from headway.config.engines import head_size_refused
from headway.generator.engines.torch.engine import TorchEngine
from headway.models.configuration import DecoderConfig
from headway.models.cpu.native import why_none
from headway.models.loading import adopt_weights, load_for_generation, load_model, weights_of
from headway.records.errors import ConfigurationError
from headway.records.generation import (
    AppliedWeights,
    EngineStatistics,
    GenerationRequest,
    PublishedWeights,
    TokenDelta,
    UpdateMode,
)
from headway.runtime.child import WorkerContext
from headway.runtime.devices import Device
from headway.tokens.tokenizer import Tokenizer
from headway.weights.shared_memory import Subscriber


class Engine(Protocol):
    """Interface of engines to a replica's process. `TorchEngine` documents each method."""

    @property
    def open_requests(self) -> int: ...
    @property
    def ready_deltas(self) -> int: ...
    def submit(self, requests: Sequence[GenerationRequest]) -> None: ...
    def abort(self, request_ids: Sequence[str]) -> None: ...
    def step(self) -> bool: ...
    def take_deltas(self, running: bool = True) -> list[TokenDelta]: ...
    def apply(self, published: PublishedWeights, mode: UpdateMode) -> AppliedWeights:
        """Fetch, verify and apply a version between two steps. Raises WeightsCorrupt, with nothing changed."""
        ...

    def statistics(self) -> EngineStatistics: ...


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings of one replica's engine, out of `[generator]` and related sections."""

    model_path: str
    dtype: str
    slots: int
    max_context_tokens: int
    kv_capacity_tokens: int | None = None
    version: int = 0
    deterministic: bool = False
    native_kernels: bool = True
    prefill_tokens_per_step: int = 8192
    engine: str = "torch"
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)
    probe_every_updates: int = 1
    exchange_directory: str | None = None
    restarted: bool = False  # of a replica that died: a server that is away is waited for


def build_engine(settings: EngineSettings, context: WorkerContext) -> Engine:
    """Build the engine of a replica. Raises ConfigurationError when it can't be built."""
    if settings.engine == "vllm":
        return _vllm(settings, context.device)
    if settings.engine == "vllm-server":
        return _vllm_server(settings, context)
    return SubscribedTorchEngine.of(settings, context)


class SubscribedTorchEngine(TorchEngine):
    """Torch engine that fetches published weights. ``update_weights`` takes only tensors from its own subscriber."""

    @classmethod
    def of(cls, settings: EngineSettings, context: WorkerContext) -> SubscribedTorchEngine:
        model = load_for_generation(settings.model_path, settings.dtype, context.device.torch_device())
        engine = cls(
            model,
            slots=settings.slots,
            max_context_tokens=min(settings.max_context_tokens, model.config.max_positions),
            kv_capacity_tokens=settings.kv_capacity_tokens,
            version=settings.version,
            tokenizer=_tokenizer(settings.model_path),
            deterministic=settings.deterministic,
            prefill_tokens_per_step=settings.prefill_tokens_per_step,
            native_kernels=settings.native_kernels,
        )
        if settings.native_kernels and (reason := why_none(model.dtype, model.device)):
            context.log.warning("decoding without the native kernels, which costs speed: %s", reason)
        return engine

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._subscriber = Subscriber()

    def apply(self, published: PublishedWeights, mode: UpdateMode) -> AppliedWeights:
        """See `Engine.apply`."""
        started = self._now()
        with self.paused():  # ticks and calls share a thread: fetching pauses decoding too
            tensors = self._subscriber.fetch(published)
        fetch_s = self._now() - started
        applied = self.update_weights(tensors, published.version, mode)
        return msgspec.structs.replace(applied, fetch_s=fetch_s, pause_s=applied.pause_s + fetch_s)

    def _take_weights(self, tensors: Mapping[str, Tensor]) -> None:
        if adopt_weights(self._model, tensors):
            self._subscriber.keep()


def _tokenizer(model_path: str) -> Tokenizer | None:
    return Tokenizer.load(model_path) if (Path(model_path) / "tokenizer.json").is_file() else None


def _vllm_server(settings: EngineSettings, context: WorkerContext) -> Engine:
    from headway.generator.engines.vllm.http import VllmServer
    from headway.generator.engines.vllm.reference import PublishedModel
    from headway.generator.engines.vllm.server_engine import VllmServerEngine
    from headway.generator.engines.vllm.server_info import connect

    model = load_model(settings.model_path, settings.dtype)
    context_tokens = min(settings.max_context_tokens, model.config.max_positions)
    server = VllmServer(context.device.address)
    served = connect(server, slots=settings.slots, context_tokens=context_tokens, again=settings.restarted)
    published = PublishedModel(model.config)
    published.take(weights_of(model))
    return VllmServerEngine(
        server,
        served,
        published,
        slots=settings.slots,
        max_context_tokens=context_tokens,
        vocabulary=model.config.vocabulary_size,
        tied=model.config.tied,
        tokenizer=_tokenizer(settings.model_path),
        version=settings.version,
        probe_every_updates=settings.probe_every_updates,
        exchange_directory=settings.exchange_directory,
    )


def _vllm(settings: EngineSettings, device: Device) -> Engine:
    from headway.generator.engines.vllm.core import VllmCore, engine_arguments, prepare_process
    from headway.generator.engines.vllm.engine import VllmEngine

    own = settings.engine_arguments
    prepare_process(device, own.get("tensor_parallel_size", 1))
    model = DecoderConfig.from_pretrained(Path(settings.model_path))
    if refused := head_size_refused("vllm", (str(device),), model.head_dim):
        raise ConfigurationError(f"generator.engine = {refused}")
    context_tokens = min(settings.max_context_tokens, model.max_positions)
    if settings.kv_capacity_tokens is not None:
        context_tokens = min(context_tokens, settings.kv_capacity_tokens)  # one request must always fit alone
    core = VllmCore(
        engine_arguments(
            settings.model_path,
            model,
            device,
            dtype=settings.dtype,
            slots=settings.slots,
            context_tokens=context_tokens,
            kv_capacity_tokens=settings.kv_capacity_tokens,
            prefill_tokens_per_step=settings.prefill_tokens_per_step,
            own=own,
        )
    )
    return VllmEngine(
        core,
        slots=settings.slots,
        max_context_tokens=context_tokens,
        vocabulary=model.vocabulary_size,
        tokenizer=_tokenizer(settings.model_path),
        version=settings.version,
        dtype=settings.dtype,
        quantised="quantization" in own,
        probe_every_updates=settings.probe_every_updates,
    )
