"""The kernel service on a loopback port, over an evaluator that does what a candidate's comments say."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from headway.config.endpoint import EndpointConfig
from headway.generator.endpoint.api_keys import ApiKeys
from headway.generator.endpoint.server import serving
from headway.kernels.device_queries import KernelDevice
from headway.kernels.devices import DeviceTable
from headway.records.errors import ConfigurationError
from headway.records.kernels import KernelEvaluation, KernelSubmission, KernelTask, KernelTiming
from headway.runtime.clock import RealClock
from headway.services.kernel_api import KernelApi
from headway.services.kernel_dispatch import KernelDispatch, KernelLimits
from headway.services.kernel_requests import KernelRequests

REFERENCE = "class Model: ...\ndef get_inputs(): ...\ndef get_init_inputs(): ...\n"
HOST = KernelDevice(name="cpu:0", vendor="cpu", model="a core")


def candidate(**told: object) -> str:
    """A candidate; ``told``: what comes of it, see ScriptedJudge."""
    return "".join(f"# {name}: {value}\n" for name, value in told.items()) + "class ModelNew: ...\n"


def submission(source: str, **fields: Any) -> KernelSubmission:
    backend = fields.pop("backend", "torch")
    task = KernelTask(name="t", source=REFERENCE, backend=backend)
    return KernelSubmission(task=task, source=source, **{"timeout_s": 30.0, **fields})


@dataclass
class ScriptedJudge:
    """Judges by comments: fault, cheat, speedup, seconds, fails (so many times, as infrastructure), raises, task_fails,
    gate (waits until it is opened)."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    seen: list[KernelSubmission] = field(default_factory=list)
    cancelled: int = 0
    running: Counter[str] = field(default_factory=Counter)  # by device
    peaks: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)  # by source
    closed_file: Path | None = None

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        if self.closed_file is not None:
            self.closed_file.write_text(f"{self.cancelled} cancelled")

    async def evaluate(self, submission: KernelSubmission) -> KernelEvaluation:
        told = dict(re.findall(r"^# (\w+): (.*)$", submission.source, re.MULTILINE))
        self.seen.append(submission)
        self.running[submission.device] += 1
        self.peaks[submission.device] = max(self.peaks[submission.device], self.running[submission.device])
        try:
            if "gate" in told:
                await self.gate.wait()
            await asyncio.sleep(float(told.get("seconds", 0)))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running[submission.device] -= 1
        if "task_fails" in told:
            raise ConfigurationError(told["task_fails"])
        if "raises" in told:
            raise RuntimeError(told["raises"])
        if self.failed[submission.source] < int(told.get("fails", 0)):
            self.failed[submission.source] += 1
            return KernelEvaluation(infrastructure="the zygote has died")
        return self._judged(submission, told)

    def _judged(self, submission: KernelSubmission, told: dict[str, str]) -> KernelEvaluation:
        fault: Any = told.get("fault")
        trials = submission.correct_trials
        speedup = float(told.get("speedup", 1.5)) if submission.timed and fault is None else None
        timing = KernelTiming(mean=2.0, std=0.1, min=1.9, max=2.1, calls=submission.timed_trials)
        return KernelEvaluation(
            compiled=fault not in ("syntax_error", "triton_compilation_error"),
            passed=0 if fault else trials,
            trials=trials,
            fault=fault,
            cheat=told.get("cheat", ""),
            text=fault or "",
            device=submission.device,
            timing=None if speedup is None else timing,
            speedup=speedup,
        )


@dataclass
class ServedKernels:
    address: str
    judge: ScriptedJudge
    dispatch: KernelDispatch
    devices: DeviceTable
    http: httpx.AsyncClient
    gpus: list[KernelDevice]  # as the driver lists them now
    events: list[tuple[str, str]]

    async def eval(self, source: str, **fields: Any) -> httpx.Response:
        body = {"original_model_src": REFERENCE, "custom_model_src": source, "backend": "torch", **fields}
        return await self.http.post("/eval", json={name: value for name, value in body.items() if value != "absent"})


@asynccontextmanager
async def served_kernels(
    *,
    cores: Sequence[str] = ("cpu:0", "cpu:1"),
    gpus: Sequence[KernelDevice] = (),
    keys: Sequence[str] = (),
    max_source_bytes: int = 100_000,
    memory_faults: int = 3,
    leases_cores: bool = False,
    **limits: Any,
) -> AsyncIterator[ServedKernels]:
    judge, events, listed = ScriptedJudge(), list[tuple[str, str]](), list(gpus)

    def on_event(name: str, detail: str) -> None:
        events.append((name, detail))

    table = [KernelDevice(name=name, vendor="cpu", model="a core") for name in cores]
    devices = DeviceTable(table, lambda: tuple(listed), on_event, memory_faults)
    await devices.refresh()
    chosen = KernelLimits(**{"concurrency": 4, "timeout_s": 60.0, **limits})
    dispatch = KernelDispatch(judge, devices, chosen, RealClock(), on_event, leases_cores=leases_cores)
    requests = KernelRequests(devices, chosen.timeout_s, max_source_bytes)
    settings = EndpointConfig(address="127.0.0.1:0", max_body_bytes=4 * max_source_bytes)
    app = KernelApi(dispatch, devices, requests, settings, ApiKeys(keys))
    headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
    async with (
        serving(app, settings) as address,
        httpx.AsyncClient(base_url=address, headers=headers, timeout=30, trust_env=False) as http,
    ):
        yield ServedKernels(address, judge, dispatch, devices, http, listed, events)


async def reached(condition: Any, limit_s: float = 10.0) -> None:
    """Wait for something that comes from the other side of a connection."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def make_judge(settings: Any) -> ScriptedJudge:
    """For `headway serve-kernels --evaluator kernel_service:make_judge`; its end is noted in a file."""
    import os

    return ScriptedJudge(closed_file=Path(os.environ["JUDGE_CLOSED"]) if "JUDGE_CLOSED" in os.environ else None)
