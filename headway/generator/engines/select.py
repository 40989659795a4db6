"""Builds the engine of a replica: torch, the plain one of transformers' models, vLLM or a vLLM server. transformers and
vLLM are imported only where they are used."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from headway.config.engines import cpu_refusal, transformers_refusal
from headway.config.model import ModelConfig
from headway.generator.engines.engine import Engine
from headway.generator.engines.settings import EngineSettings
from headway.generator.engines.torch.engine import TorchEngine
from headway.generator.engines.torch.slot_engine import SlotOptions
from headway.models.adapter_files import open_adapter
from headway.models.configuration import DecoderConfig
from headway.models.cpu.native import missing_reason
from headway.models.hf.configuration import HfConfig, implementation_of, read_config
from headway.models.hf.pixels import PixelStore
from headway.models.quantization import load_sampled
from headway.models.run_model import open_hf_adapter
from headway.records.errors import ConfigurationError
from headway.runtime.child import WorkerContext
from headway.runtime.devices import Device, cpu_multiplies_bfloat16
from headway.tokens.tokenizer import Tokenizer


def build_engine(settings: EngineSettings, context: WorkerContext) -> Engine[Any]:
    """Build the engine of a replica. Raises ConfigurationError when it can't be built."""
    in_transformers = implementation_of(settings.model_path, settings.implementation) == "transformers"
    if in_transformers:
        _require_served(settings)
    if settings.engine == "vllm":
        engine = _vllm(settings, context.device)
    elif settings.engine == "vllm-server":
        engine = _vllm_server(settings, context.device)
    else:
        engine = _hf(settings, context) if in_transformers else _torch(settings, context)
    offload_folder = settings.offload_directory
    if engine.memory is not None and offload_folder and Path(offload_folder).is_dir():
        engine.memory.directory = offload_folder
    return engine


def _torch(settings: EngineSettings, context: WorkerContext) -> TorchEngine:
    path, device = settings.model_path, torch.device(context.device.torch_device())
    model = load_sampled(path, settings.quantization, settings.dtype, device)
    adapters = {
        name: open_adapter(path, model.config, config, seed=settings.seed) for name, config in settings.adapters.items()
    }
    if settings.native_kernels and (reason := missing_reason(model.dtype, model.device)):
        context.log.warning("decoding without the native kernels, which costs speed: %s", reason)
    return TorchEngine(
        model,
        native_kernels=settings.native_kernels,
        adapters=adapters,
        return_experts=settings.return_experts,
        **_options(settings, model.config.max_positions),
    )


def _require_served(settings: EngineSettings) -> None:
    """Raise ConfigurationError for settings that exclude sampling from a model that runs in transformers."""
    if refusal := transformers_refusal(settings.engine, bool(settings.adapters)):
        raise ConfigurationError(f"generator.engine = {refusal}")
    if settings.quantization:
        raise ConfigurationError(
            f"model.quantization = {settings.quantization!r} on a model that runs in transformers can't be sampled "
            "from; valid: the whole model, or a family of docs/models.md with model.implementation = 'headway'"
        )


def _hf(settings: EngineSettings, context: WorkerContext) -> Engine[Any]:
    from headway.generator.engines.hf.engine import HfEngine
    from headway.models.hf.model import load_hf

    device = torch.device(context.device.torch_device())
    lacks_bfloat16 = settings.dtype == "bfloat16" and device.type == "cpu" and not cpu_multiplies_bfloat16()
    dtype = "float32" if lacks_bfloat16 else settings.dtype  # as `load_for_generation`
    model = load_hf(settings.model_path, dtype, device, settings.trust_remote_code)
    path, seed = settings.model_path, settings.seed
    adapters = {name: open_hf_adapter(model, path, config, seed) for name, config in settings.adapters.items()}
    engine = HfEngine(
        model,
        adapters=adapters,
        pixels=None if settings.pixels_directory is None else PixelStore(settings.pixels_directory),
        **_options(settings, model.config.max_positions),
    )
    context.log.info("sampling from transformers' %s, in batches of %s", model.config.model_type, engine.batching)
    return engine


def _options(settings: EngineSettings, positions: int) -> SlotOptions:
    """Make the options of an engine that computes in this process, for a model of ``positions`` positions."""
    return SlotOptions(
        slots=settings.slots,
        max_context_tokens=min(settings.max_context_tokens, positions),
        kv_capacity_tokens=settings.kv_capacity_tokens,
        version=settings.version,
        tokenizer=_tokenizer(settings),
        deterministic=settings.deterministic,
        prefill_tokens_per_step=settings.prefill_tokens_per_step,
    )


def _tokenizer(settings: EngineSettings) -> Tokenizer | None:
    path = settings.model_path
    return Tokenizer.load(path, chat=settings.chat) if (Path(path) / "tokenizer.json").is_file() else None


def _vllm_server(settings: EngineSettings, device: Device) -> Engine[Any]:
    from headway.generator.engines.vllm.adapters import VllmAdapters
    from headway.generator.engines.vllm.managed_server import start_server
    from headway.generator.engines.vllm.reference import PublishedModel
    from headway.generator.engines.vllm.server_client import VllmServer
    from headway.generator.engines.vllm.server_engine import VllmServerEngine
    from headway.generator.engines.vllm.server_info import connect

    published_model = PublishedModel.of(_model_config(settings))
    published_model.load(settings.dtype)
    settings, is_managed = _with_context(settings, published_model.shape.max_positions), device.kind != "server"
    if is_managed and settings.kv_capacity_tokens is not None:  # one request must always fit alone
        settings = _with_context(settings, settings.kv_capacity_tokens)
    adapters = VllmAdapters(settings, published_model) if settings.adapters else None
    adapter_arguments = adapters.arguments if adapters is not None else {}
    if is_managed:
        _require_heads(settings, published_model.shape, device)
        server = start_server(settings, published_model.shape, device, adapter_arguments)
    else:
        server = VllmServer(device.address)
    server_info = connect(
        server,
        slots=settings.slots,
        context_tokens=settings.max_context_tokens,
        adapters=adapter_arguments,
        again=settings.restarted and not is_managed,
    )
    engine = VllmServerEngine(server, server_info, published_model, settings, _tokenizer(settings), adapters)
    engine.bias = _bias(settings, published_model.shape)
    return engine


def _vllm(settings: EngineSettings, device: Device) -> Engine[Any]:
    from headway.generator.engines.vllm.adapters import VllmAdapters
    from headway.generator.engines.vllm.core import VllmCore, engine_arguments, prepare_process
    from headway.generator.engines.vllm.engine import VllmEngine
    from headway.generator.engines.vllm.reference import PublishedModel

    prepare_process(device, settings.engine_arguments.get("tensor_parallel_size", 1))
    model_config = _model_config(settings)
    shape = read_config(model_config)
    _require_heads(settings, shape, device)
    settings = _with_context(settings, shape.max_positions)
    if settings.kv_capacity_tokens is not None:  # one request must always fit alone
        settings = _with_context(settings, settings.kv_capacity_tokens)
    adapters = None
    if settings.adapters:
        published_model = PublishedModel.of(model_config)
        published_model.load(settings.dtype)
        adapters = VllmAdapters(settings, published_model)
    arguments = engine_arguments(settings, shape, device) | (adapters.arguments if adapters is not None else {})
    model_choice = {"implementation": model_config.implementation, "trust_remote_code": model_config.trust_remote_code}
    core, tokenizer = VllmCore(arguments, model_choice), _tokenizer(settings)
    engine = VllmEngine(core, settings, shape.vocabulary_size, tokenizer, adapters, mixture=shape.has_experts)
    engine.bias = _bias(settings, shape)
    return engine


def _require_heads(settings: EngineSettings, model: DecoderConfig | HfConfig, device: Device) -> None:
    """Raise ConfigurationError for a model that vLLM doesn't compute on this device."""
    if isinstance(model, DecoderConfig):
        has_mixture = bool(settings.adapters) and model.mixture is not None
        if refusal := cpu_refusal(settings.engine, (str(device),), model.head_dim, has_mixture):
            raise ConfigurationError(f"generator.engine = {refusal}")


def _bias(settings: EngineSettings, model: DecoderConfig | HfConfig) -> dict[int, float]:
    """Return the logit bias, by id, of pictures' placeholder tokens: the trainer gives them no probability either."""
    if isinstance(model, DecoderConfig):
        return {}
    from transformers import AutoConfig

    from headway.models.hf.model import placeholders_of

    load_options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": settings.trust_remote_code}
    config = AutoConfig.from_pretrained(settings.model_path, **load_options)
    return dict.fromkeys(placeholders_of(config, model.vocabulary_size), -100.0)  # the least that vLLM takes


def _model_config(settings: EngineSettings) -> ModelConfig:
    """Make the configuration of the model as the trainer runs it."""
    return ModelConfig(
        path=settings.model_path,
        implementation=settings.implementation,
        trust_remote_code=settings.trust_remote_code,
    )


def _with_context(settings: EngineSettings, context_tokens: int) -> EngineSettings:
    return dataclasses.replace(settings, max_context_tokens=min(settings.max_context_tokens, context_tokens))
