"""`headway serve-kernels`: the kernel service of this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from typing import Any

from headway.config.endpoint import EndpointConfig
from headway.generator.endpoint.api_keys import ApiKeys, read_keys, require_keys
from headway.generator.endpoint.server import serving
from headway.kernels.device_queries import core_devices, default_core_sets, query_gpus
from headway.kernels.devices import DeviceTable, OnDeviceEvent
from headway.records.errors import ConfigurationError
from headway.records.kernels import KernelSubmission
from headway.runtime.addresses import listening
from headway.runtime.clock import RealClock
from headway.runtime.devices import machine_cores, parse_device
from headway.runtime.imports import import_function
from headway.runtime.supervision import until_interrupted
from headway.services.kernel_api import KernelApi
from headway.services.kernel_dispatch import KernelDispatch, KernelLimits
from headway.services.kernel_requests import KernelRequests

_BODY_FACTOR, _BODY_BYTES = 4, 1 << 16  # of a request: two sources with what JSON or base64 adds, and its other fields


@dataclass(frozen=True, kw_only=True)
class KernelServing:
    """Settings of the kernel service."""

    address: str  # HOST:PORT
    cores: tuple[str, ...]  # for timing: sets, each leased as a whole
    limits: KernelLimits
    keys: tuple[str, ...] = ()  # accepted API keys; (): none is needed
    max_source_bytes: int = 1 << 20
    evaluator: str = ""  # module:function, called with these settings; "": Headway's own


def kernel_serving(
    host: str,
    port: int,
    key_file: str,
    cores: str,
    concurrency: int | None,
    evaluator: str,
    max_source_bytes: int,
    **limits: Any,
) -> KernelServing:
    """Settings from the command's arguments; ``limits``: those of KernelLimits. Raises ConfigurationError: cores that
    this machine lacks or that are named twice, an address that other machines reach without keys, a file without any.
    """
    sets = tuple(f"cpu:{one.strip()}" for one in cores.split(",")) if cores else default_core_sets()
    try:
        core_devices(sets)
    except ConfigurationError as error:
        raise ConfigurationError(f"--cores {cores}: {error}; valid: sets of cores, say 2-3,4-5") from None
    counted = [core for name in sets for core in parse_device(name).core_ids()]
    if len(set(counted)) < len(counted):
        raise ConfigurationError(f"--cores {cores}: a core is named twice; valid: sets that share none, say 2-3,4-5")
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    keys = read_keys(key_file, "--key-file")
    require_keys(keys, address, f"--host {host}", "--key-file")
    most = len(shared_cores(sets)) if concurrency is None else concurrency
    return KernelServing(
        address=address,
        cores=sets,
        keys=keys,
        limits=KernelLimits(**limits, concurrency=most),
        evaluator=evaluator,
        max_source_bytes=max_source_bytes,
    )


def shared_cores(timed: Sequence[str]) -> tuple[int, ...]:
    """Ids of the cores that aren't among the ``timed`` devices, or all of the machine's where none is left."""
    taken = {core for name in timed for core in parse_device(name).core_ids()}
    return tuple(core for core in machine_cores() if core not in taken) or machine_cores()


async def serve_kernels(
    settings: KernelServing, on_ready: Callable[[str, Sequence[str]], None], on_event: OnDeviceEvent
) -> None:
    """Serve until Ctrl-C or SIGTERM. ``on_ready(address, devices)`` is called once; ``on_event(name, detail)`` at
    problems."""
    clock, limits = RealClock(), settings.limits
    async with until_interrupted() as stopped, AsyncExitStack() as stack:
        listener = stack.enter_context(closing(listening(settings.address, "--host and --port")))
        devices = DeviceTable(core_devices(settings.cores), query_gpus, on_event)
        await devices.refresh()
        evaluator = _make_evaluator(settings)
        await evaluator.start()
        stack.push_async_callback(evaluator.close)
        dispatch = KernelDispatch(evaluator, devices, limits, clock, on_event)
        stack.callback(dispatch.stop)
        endpoint = EndpointConfig(
            address=settings.address, max_body_bytes=settings.max_source_bytes * _BODY_FACTOR + _BODY_BYTES
        )
        requests = KernelRequests(devices, limits.timeout_s, settings.max_source_bytes)
        app = KernelApi(dispatch, devices, requests, endpoint, ApiKeys(settings.keys))
        async with serving(app, endpoint, listener) as address:
            on_ready(address, devices.names())
            await stopped.wait()


def _make_evaluator(settings: KernelServing) -> Any:
    if settings.evaluator:
        return import_function(settings.evaluator, "--evaluator", ())(settings)
    from headway.kernels.evaluator import EvaluatorSettings, KernelEvaluator
    from headway.kernels.operators import check_operators
    from headway.kernels.tasks import resized_source

    def check(submission: KernelSubmission) -> str:
        findings = check_operators(submission.source, submission.task.backend, submission.task)
        return findings[0].text if findings else ""

    timing = tuple(parse_device(name).core_ids() for name in settings.cores)
    most = settings.limits.concurrency + len(timing)
    return KernelEvaluator(EvaluatorSettings(concurrent=most, timing_cores=timing), check=check, resize=resized_source)
