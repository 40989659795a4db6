"""`headway serve-tinker`: the process of the service, with its workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headway.config.adapter import AdapterConfig
from headway.config.endpoint import EndpointConfig
from headway.config.load import apply_overrides, read_toml, validate
from headway.config.model import ModelConfig
from headway.config.schema import Experiment
from headway.config.section import Section
from headway.config.services.tinker import TinkerConfig
from headway.generator.client import GeneratorPool
from headway.generator.endpoint.server import serving
from headway.models.adapter_targets import base_digest
from headway.models.configuration import DecoderConfig
from headway.models.hf.configuration import read_config
from headway.models.hf.downloads import model_folder
from headway.models.sizes import sizes_of
from headway.orchestrator.preflight.experiment_file import prepared
from headway.orchestrator.preflight.memory import bytes_of, memory_uses, trained_weights
from headway.records.check_report import MemoryUse
from headway.records.errors import ConfigurationError, HeadwayError
from headway.records.tenants.protocols import BaseDescription
from headway.runtime.addresses import is_loopback, listening_socket
from headway.runtime.clock import RealClock
from headway.runtime.fork_server import MODEL_CODE
from headway.runtime.supervision import until_interrupted
from headway.runtime.worker_slots import WorkerSlot
from headway.runtime.workers import LocalLauncher, WorkerSpec
from headway.services.tinker.app import TinkerApp
from headway.services.tinker.catalogue import TinkerCatalogue
from headway.services.tinker.dispatch import TinkerDispatch
from headway.services.tinker.log import TinkerLog
from headway.services.tinker.tenants import TenantKeys
from headway.services.tinker.wire import message_classes
from headway.services.tinker.workers import AdapterSampler, TrainerWorker
from headway.tokens.tokenizer import Tokenizer

_TRAINER = "headway.trainer.tenants.service:TenantTrainerService"
_ADDRESS = "127.0.0.1:8000"
_CONTEXT_TOKENS = 4096  # of a prompt and its response, where the model's context is longer
_DEATHS = 10**6  # workers are restarted without end: what kills them is a tenant's request, which fails in the end
_EXPIRY_S = 60.0  # of service after which a death no longer delays the next restart
_MODEL_KEYS = ("adapter", "reference", "trust_remote_code")


@dataclass(frozen=True, kw_only=True)
class TinkerSettings:
    """Settings of the service: of its own section, and of model, devices and endpoint as an experiment has them."""

    tinker: TinkerConfig
    experiment: Experiment
    base: BaseDescription

    @property
    def store(self) -> Path:
        """Return the store's folder."""
        return Path(self.tinker.store).absolute()


class _TinkerFile(Experiment):
    """The file of the service: an experiment's sections of model, devices and endpoint, and its own."""

    tinker: TinkerConfig


def tinker_settings_from(path: str, overrides: list[str]) -> TinkerSettings:
    """Read the service's file. Raises ConfigurationError for what can't be served, by key and valid values."""
    raw = apply_overrides(read_toml(path), overrides, _TinkerFile)
    tinker = validate({"tinker": raw.pop("tinker", {})}, path, _Section).tinker
    model: dict[str, Any] = raw["model"] if isinstance(raw.get("model"), dict) else {}
    name = str(model.get("path", ""))
    if not name:
        raise ConfigurationError(f"{path}: model.path is missing: the folder of the base")
    if (engine := raw.get("generator", {}).get("engine", "torch")) != "torch":
        reason = "its adapters are fixed at its start; valid: 'torch', Headway's own"
        raise ConfigurationError(f"generator.engine = {engine!r}: {reason}")
    for key in _MODEL_KEYS:
        if model.get(key):
            raise ConfigurationError(f"model.{key} is set: valid: unset, since tenants bring the adapters of one base")
    config = read_config(ModelConfig(path=model_folder(name, key="model.path")))
    if not isinstance(config, DecoderConfig):
        raise ConfigurationError(f"model.path = {name!r} runs in transformers: valid: a family that Headway implements")
    context_tokens = min(config.max_positions, _CONTEXT_TOKENS)
    raw = {
        "run": {"directory": "none", "offload": False},
        "tasks": {"train": {"path": "none"}},
        "rollout": {"max_prompt_tokens": context_tokens - 1, "max_response_tokens": 1},
        **raw,
        "endpoint": {"address": _ADDRESS, **raw.get("endpoint", {})},
        "model": {**model, "adapter": {"rank": tinker.max_rank, "alpha": tinker.alpha}},
    }
    experiment = prepared(raw, path)
    unadapted = experiment.model.model_copy(update={"adapter": None})  # tenants' come later: none is the engines' own
    experiment = experiment.model_copy(update={"model": unadapted})
    _require_supported(experiment)
    folder = Path(experiment.model.path)
    base = BaseDescription(
        name=name,
        digest=base_digest(folder),
        architecture=config.family.model_type,
        tokenizer=str(folder.resolve()) if Path(name).is_dir() else name,
        vocabulary=config.vocabulary_size,
        max_context_tokens=min(config.max_positions, experiment.max_sequence_tokens),
    )
    return TinkerSettings(tinker=tinker, experiment=experiment, base=base)


class _Section(Section):
    tinker: TinkerConfig


def _require_supported(experiment: Experiment) -> None:
    generator, trainer, address = experiment.generator, experiment.trainer, experiment.endpoint.address
    if len(trainer.devices) != 1:
        raise ConfigurationError(f"trainer.devices = {list(trainer.devices)}: valid: one device")
    if trainer.devices[0] in generator.devices:
        raise ConfigurationError(
            f"trainer.devices = {list(trainer.devices)} is the generator's: valid: a device of its own, say 'cpu:1'"
        )
    if not is_loopback(address):
        raise ConfigurationError(
            f"endpoint.address = {address!r}: other machines reach it over plain HTTP, which shows everyone the keys: "
            "valid: a loopback address (127.0.0.1, [::1], localhost), behind a proxy with TLS"
        )


async def serve_tinker(
    settings: TinkerSettings, on_ready: Callable[[str], None], on_event: Callable[[str, str], None]
) -> None:
    """Serve until Ctrl-C or SIGTERM. ``on_ready(address)`` is called once, ``on_event(name, detail)`` at problems.
    Raises ConfigurationError (address, keys, prices, a store of another base) and RunLocked before a worker starts."""
    experiment, tinker, base, clock = settings.experiment, settings.tinker, settings.base, RealClock()
    message_classes()
    store = settings.store

    def worker_event(name: str, detail: str, /, **_: object) -> None:
        on_event(name, detail)

    async with until_interrupted() as stop_event, AsyncExitStack() as stack:
        listener = stack.enter_context(closing(listening_socket(experiment.endpoint.address, "endpoint.address")))
        keys = TenantKeys(tinker.keys)
        log = stack.enter_context(closing(TinkerLog(store, base)))
        launcher = LocalLauncher(clock, on_event=worker_event)
        options: dict[str, Any] = {"on_event": worker_event, "log_directory": store, "restart_limit": _DEATHS}
        pool = GeneratorPool(launcher, experiment, clock, **options)
        slot_options: dict[str, Any] = {"on_event": worker_event, "failure_expiry_s": _EXPIRY_S}
        slot = WorkerSlot(_trainer_spec(settings), launcher, clock, **slot_options)
        trainer = TrainerWorker(slot, co_batch=tinker.co_batch)
        sampler = AdapterSampler(pool, store, Tokenizer.of(experiment).stop_ids, tinker.resident_adapters)
        admitted_samples = 2 * experiment.generator.slots * len(experiment.generator.devices)
        dispatch = TinkerDispatch(log, trainer, sampler, base, tinker, clock, time.time, admitted_samples)
        catalogue = TinkerCatalogue(log, dispatch.operations, base, store, time.time)
        endpoint = EndpointConfig.of(experiment.endpoint)
        app = TinkerApp(
            log, dispatch, dispatch.operations, catalogue, base, endpoint, keys, time.time, sampler.statistics
        )
        stack.push_async_callback(pool.stop)
        stack.push_async_callback(trainer.stop)
        await asyncio.gather(pool.start(), trainer.start())
        try:
            async with serving(app, endpoint, listener) as address, asyncio.TaskGroup() as group:
                loops = [group.create_task(loop) for loop in (dispatch.run(), trainer.run(), sampler.watch(clock))]
                on_ready(address)
                await stop_event.wait()
                for loop in loops:
                    loop.cancel()
        except* HeadwayError as errors:
            raise errors.exceptions[0] from None


def memory_of(settings: TinkerSettings) -> list[MemoryUse]:
    """Return the most memory that the workers need: a base each, and all resident adapters of the largest rank."""
    tinker, sizes = settings.tinker, sizes_of(settings.experiment.model.path)
    adapter = AdapterConfig(rank=tinker.max_rank, alpha=tinker.alpha)
    adapted = settings.experiment.model.model_copy(update={"adapter": adapter})
    experiment = settings.experiment.model_copy(update={"model": adapted})
    weights, others = trained_weights(experiment, sizes), tinker.resident_adapters - 1
    # Of the trainer: weights, gradients and two moments. Of an engine: weights, and panels of B for a product's ranks.
    widths = {"trainer": 16, "generator": bytes_of(experiment.generator.dtype) + 8}
    uses: list[MemoryUse] = []
    for use in memory_uses(experiment, sizes):
        width = widths.get(use.name.partition("-")[0], 0)
        more = {"other adapters": others * weights * width} if "weights" in use.parts else {}
        uses += [msgspec.structs.replace(use, parts=use.parts | more)] if width else []
    return uses


def _trainer_spec(settings: TinkerSettings) -> WorkerSpec:
    experiment, tinker = settings.experiment, settings.tinker
    return WorkerSpec(
        name="trainer",
        factory=_TRAINER,
        device=experiment.trainer.devices[0],
        preload=MODEL_CODE,
        log_path=settings.store / "trainer.log",
        arguments={
            "model_path": experiment.model.path,
            "store": str(settings.store),
            "dtype": experiment.trainer.dtype,
            "quantization": experiment.model.quantization,
            "alpha": tinker.alpha,
            "resident_adapters": tinker.resident_adapters,
            "co_batch": tinker.co_batch,
            "implementation": experiment.model.implementation,
            "micro_batch_tokens": experiment.trainer.micro_batch_tokens,
            "gradient_checkpointing": experiment.trainer.gradient_checkpointing,
        },
    )
