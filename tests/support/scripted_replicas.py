"""A pool of generators whose workers do what a test says, under the virtual clock."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from headway.config.load import validate_experiment
from headway.generator.client import GeneratorPool
from headway.records.errors import RemoteError, WorkerDied
from headway.records.generation import (
    AppliedWeights,
    EngineStatistics,
    GenerationRequest,
    PublishedWeights,
    SamplingParameters,
    TokenDelta,
)
from headway.records.tokens import decoder
from headway.runtime.bounded_queue import BoundedQueue
from headway.runtime.clock import Clock
from headway.runtime.process_worker import Death
from headway.runtime.workers import WorkerSpec

REQUESTS = decoder(list[GenerationRequest])


class ScriptedWorker:
    """Notes what it is told; the test says what it answers."""

    def __init__(self, spec: WorkerSpec, pid: int) -> None:
        self.name, self.pid = spec.name, pid
        self.events: BoundedQueue[Any] = BoundedQueue(64)
        self.died = Death()
        self.log: list[tuple[str, Any]] = []
        self.open: dict[str, GenerationRequest] = {}
        self.update_error: Exception | None = None
        self.update_s = 0.0
        self.damage = ""
        self.version = 0

    @property
    def alive(self) -> bool:
        return not self.died.done()

    async def call(self, method: str, *args: Any, timeout_s: float | None = None, **named: Any) -> Any:
        if not self.alive:
            raise self.died.result()
        async with asyncio.timeout(timeout_s):
            return await self.answer(method, *args)

    async def answer(self, method: str, *args: Any) -> Any:
        if method == "submit":
            batch = REQUESTS.decode(args[0])
            self.log.append(("submit", [request.partial.ids for request in batch]))
            self.open |= {request.request_id: request for request in batch}
        elif method == "abort":
            self.log.append(("abort", len(args[0])))
            for request_id in args[0]:
                self.say(request_id, reason="abort")
        elif method == "update_weights":
            self.log.append(("update", args[0].version))
            await asyncio.sleep(self.update_s)
            if self.update_error is not None:
                raise RemoteError(self.name, method, "x", "") from self.update_error
            if not self.alive:
                raise self.died.result()
            self.version = args[0].version
            return AppliedWeights(version=self.version, damage=self.damage)
        elif method == "statistics":
            return EngineStatistics(generated_tokens=10, running=len(self.open))
        return None

    def say(self, request_id: str, *ids: int, reason: Any = None) -> None:
        """Stream tokens of a request."""
        delta = TokenDelta.of(request_id, ids, (-1.0,) * len(ids), version=self.version, finish_reason=reason)
        self.events.put_nowait(msgspec.msgpack.encode([delta]))
        if reason is not None:
            self.open.pop(request_id, None)

    def finish_all(self) -> None:
        for request_id in list(self.open):
            self.say(request_id, 9, reason="stop")

    def kill(self, reason: str = "killed") -> None:
        self.died.set(WorkerDied(self.name, reason))
        self.events.close()

    async def stop(self, grace_s: float = 5.0) -> None:
        self.kill()


class ScriptedLauncher:
    def __init__(self) -> None:
        self.started: list[ScriptedWorker] = []
        self.refuse = False
        self.error: Exception | None = None
        self.start_s = 1.0
        self.prepare = lambda worker: None

    async def start(self, spec: WorkerSpec) -> ScriptedWorker:
        await asyncio.sleep(self.start_s)
        if self.refuse:
            raise self.error or RemoteError(spec.name, "start", "no such file", "")
        self.started.append(ScriptedWorker(spec, len(self.started)))
        self.prepare(self.started[-1])
        return self.started[-1]


def make_pool(clock: Clock, launcher: ScriptedLauncher, replicas: int = 2, **options: Any):
    experiment = validate_experiment(
        {
            "run": {"directory": "r"},
            "model": {"path": "m"},
            "tasks": {"train": {"path": "t"}},
            "generator": {"devices": [f"cpu:{index}" for index in range(replicas)]},
        },
        "test",
    )
    events: list[str] = []

    def note(name: str, detail: str, **data: Any) -> None:
        if name.startswith("generator"):  # those of the router: test_generator_router.py
            events.append(name)

    pool = GeneratorPool(launcher, experiment, clock, **{"on_event": note, **options})
    return pool, events


def request(name: str, prompt: int = 3, max_tokens: int = 10) -> GenerationRequest:
    sampling = SamplingParameters(max_tokens=max_tokens)
    return GenerationRequest(request_id=name, prompt_ids=tuple(range(prompt)), sampling=sampling)


def published(version: int) -> PublishedWeights:
    return PublishedWeights(version=version, path="", checksum="", size_bytes=0)
