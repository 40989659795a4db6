"""`headway serve-kernels` runs the kernel service of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from typing import Any

from headway.config.endpoint import EndpointConfig
from headway.generator.endpoint.api_keys import ApiKeys
from headway.generator.endpoint.server import serving
from headway.kernels.device_queries import core_devices, default_core_sets, query_gpus
from headway.kernels.devices import DeviceTable, OnDeviceEvent
from headway.records.errors import ConfigurationError
from headway.records.kernels import KernelSubmission
from headway.runtime.addresses import listening_socket, service_keys
from headway.runtime.clock import RealClock
from headway.runtime.devices import machine_cores, parse_device
from headway.runtime.imports import import_function
from headway.runtime.supervision import until_interrupted
from headway.services.kernel_api import KernelApi
from headway.services.kernel_dispatch import KernelDispatch, KernelLimits
from headway.services.kernel_requests import KernelRequests

_BODY_FACTOR, _BODY_BYTES = 4, 1 << 16  # of a request: two sources as JSON or base64, and the other fields


@dataclass(frozen=True, kw_only=True)
class KernelSettings:
    """Settings of the kernel service, with the names of the command's options."""

    host: str = "127.0.0.1"
    port: int = 0
    key_file: str = ""  # "": no key is needed
    cores: str = ""  # sets of cores for timing, 2-3,4-5; "": the upper half
    concurrency: int | None = None  # of untimed evaluations; None: the number of cores that aren't for timing
    queue: int = 256
    queue_s: float = 300.0
    timeout_s: float = 600.0
    timing_s: float = 0.7  # longest timing; a speed-up that isn't measured precisely enough by then isn't reported
    max_source_bytes: int = 1 << 20
    evaluator: str = ""  # module:function, called with these settings; "": Headway's own

    @property
    def address(self) -> str:
        """Return HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def core_sets(self) -> dict[str, tuple[int, ...]]:
        """Return the devices for timing, with the ids of their cores. Raises ConfigurationError for cores that this
        machine lacks, or that are named twice."""
        names = [f"cpu:{core_set.strip()}" for core_set in self.cores.split(",")] if self.cores else default_core_sets()
        try:
            cores_by_device = {name: parse_device(name).core_ids() for name in names}
        except ConfigurationError as error:
            raise ConfigurationError(f"--cores {self.cores}: {error}; valid: sets of cores, say 2-3,4-5") from None
        all_cores = [core for name in names for core in cores_by_device[name]]
        if len(set(all_cores)) < len(all_cores):
            raise ConfigurationError(f"--cores {self.cores}: a core is named twice; valid: sets that share none")
        return cores_by_device

    def limits(self) -> KernelLimits:
        """Return the limits of the service. Raises ConfigurationError as `core_sets` does."""
        timing_core_count = sum(map(len, self.core_sets().values()))
        return KernelLimits(
            concurrency=self.concurrency or max(1, len(machine_cores()) - timing_core_count),
            queue=self.queue,
            queue_s=self.queue_s,
            timeout_s=self.timeout_s,
        )


async def serve_kernels(
    settings: KernelSettings, on_ready: Callable[[str, str], None], on_event: OnDeviceEvent
) -> None:
    """Serve until Ctrl-C or SIGTERM. ``on_ready(address, description)`` is called once, ``on_event(name, detail)`` at
    problems. Raises ConfigurationError for invalid cores, an address that is taken, or that other machines reach
    without keys, and a file without keys."""
    limits, cores_by_device = settings.limits(), settings.core_sets()
    keys = service_keys(settings.key_file, "--key-file", settings.address, f"--host {settings.host}")
    async with until_interrupted() as stop_event, AsyncExitStack() as stack:
        listener = stack.enter_context(closing(listening_socket(settings.address, "--host and --port")))
        own_evaluator = not settings.evaluator
        if own_evaluator and (other_cores := {*machine_cores()}.difference(*cores_by_device.values())):
            stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
            os.sched_setaffinity(0, other_cores)  # compiling and checking mustn't use the cores for timing
        # Headway's own evaluator uses cores alone, so its table has no GPU to which a submission could be sent.
        devices = DeviceTable(core_devices(list(cores_by_device)), tuple if own_evaluator else query_gpus, on_event)
        await devices.refresh()
        evaluator = make_evaluator(settings, devices)
        await evaluator.start()
        stack.push_async_callback(evaluator.close)
        dispatch = KernelDispatch(evaluator, devices, limits, RealClock(), on_event, leases_cores=own_evaluator)
        stack.callback(dispatch.stop)
        body_bytes = settings.max_source_bytes * _BODY_FACTOR + _BODY_BYTES
        endpoint = EndpointConfig(address=settings.address, max_body_bytes=body_bytes)
        requests = KernelRequests(devices, limits.timeout_s, settings.max_source_bytes)
        app = KernelApi(dispatch, devices, requests, endpoint, ApiKeys(keys))
        async with serving(app, endpoint, listener) as address:
            on_ready(address, f"{', '.join(devices.names())}; untimed at once: {limits.concurrency}")
            await stop_event.wait()


def make_evaluator(settings: KernelSettings, devices: DeviceTable | None = None) -> Any:
    """Make this machine's evaluator; it isn't started yet. ``devices``: leased for timing; default: ``core_sets()``."""
    if settings.evaluator:
        return import_function(settings.evaluator, "--evaluator", ())(settings)
    from headway.kernels.evaluator import EvaluatorSettings, KernelEvaluator
    from headway.kernels.operators import check_operators
    from headway.kernels.timing import TimingSettings

    def check(submission: KernelSubmission) -> str:
        findings = check_operators(submission.source, submission.task.backend, submission.task)
        return findings[0].text if findings else ""

    devices = devices or DeviceTable.of_cores(list(settings.core_sets()))
    default_timing = TimingSettings()
    scale = (default_timing.most_s / settings.timing_s) ** 0.5  # less time, wider: as 1 / sqrt(time)
    timing = TimingSettings(
        most_s=settings.timing_s, width=default_timing.width * scale, refused_width=default_timing.refused_width * scale
    )
    # Some evaluations compile while others are timed, and some aren't timed at all.
    max_evaluations = 2 * settings.limits().concurrency + devices.usable("cpu")
    return KernelEvaluator(EvaluatorSettings(concurrent=max_evaluations, timing=timing), check=check, devices=devices)
