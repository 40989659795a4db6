"""The router in its pool, over fake replicas under the virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fake_worker import FakeLauncher

from headway.config.load import validate_experiment
from headway.config.router import RouterConfig
from headway.generator.client import GeneratorPool
from headway.generator.fake_replica import ReplicaCosts
from headway.records.generation import GenerationRequest, GenerationResult, PublishedWeights, SamplingParameters
from headway.runtime.clock import Clock, run_virtual

PROMPT = tuple(range(100, 110))


class Setting:
    """A pool of fake replicas, and what it told."""

    def __init__(
        self,
        clock: Clock,
        replicas: int = 2,
        *,
        slots: int = 8,
        router: Any = None,
        mode: str = "keep",
        queue: Any = None,
        **options: Any,
    ) -> None:
        self.events: list[str] = []
        self.seen: list[str] = []  # sampling seeds in the order they reached a replica
        experiment = validate_experiment(
            {
                "run": {"directory": "r"},
                "model": {"path": "m"},
                "tasks": {"train": {"path": "t"}},
                "rollout": {"max_prompt_tokens": 20, "max_response_tokens": 100},
                "generator": {
                    "devices": [f"cpu:{index}" for index in range(replicas)],
                    "slots": slots,
                    "update_mode": mode,
                },
                "trainer": {"devices": ["cpu:1"]},
                "queue": queue or {},
            },
            "test",
        )
        settings = RouterConfig(**{"health_interval_s": 1.0, "health_timeout_s": 3.0, **(router or {})})
        costs = ReplicaCosts(token_s=0.1, slots=slots)
        self.launcher = FakeLauncher(
            clock,
            costs,
            **{"length_of": lambda one: one.sampling.seed % 100, "on_submit": self._note, **options},
        )
        self.pool = GeneratorPool(self.launcher, experiment, clock, on_event=self._event, router=settings)
        self.jobs: list[asyncio.Task[GenerationResult]] = []

    def _event(self, name: str, detail: str, /, **data: Any) -> None:
        self.events.append(f"{name} {detail.partition(':')[0]}")

    def _note(self, request: GenerationRequest) -> None:
        self.seen.append(str(request.sampling.seed))

    def ask(self, *requests: GenerationRequest) -> list[asyncio.Task[GenerationResult]]:
        jobs = [asyncio.create_task(self.pool.generate(one)) for one in requests]
        self.jobs += jobs
        return jobs

    @property
    def workers(self):
        return self.launcher.workers

    def open_requests(self) -> list[int]:
        """Of each live replica, in order of their names."""
        live = sorted((worker.name, worker) for worker in self.workers if worker.alive)
        return [worker.engine.core.open for _, worker in live]

    async def end(self) -> list[GenerationResult]:
        """All results; then nothing must be left."""
        results = list(await asyncio.gather(*self.jobs))
        routing = self.pool.routing()
        assert (routing.open_requests, routing.used_tokens, routing.waiters) == (0, 0, 0)
        assert all(replica.outstanding_tokens == 0 and not replica.calls for replica in self.pool._replicas)
        await self.pool.stop()
        return results


def request(name: str, length: int = 20, *, prompt: tuple[int, ...] = (), **fields: Any) -> GenerationRequest:
    sampling = SamplingParameters(max_tokens=100, seed=length)
    own = prompt or (*PROMPT, int.from_bytes(name.encode(), "big") % 997)
    return GenerationRequest(request_id=name, prompt_ids=own, sampling=sampling, **fields)


def requests(count: int, length: int = 20) -> list[GenerationRequest]:
    return [request(f"r{i}", length, prompt=(*PROMPT, i), priority=i) for i in range(count)]


def published(version: int) -> PublishedWeights:
    return PublishedWeights(version=version, path="", checksum="", size_bytes=0)


def playing(scene: Callable[[Clock], Any], limit_s: float = 1000.0) -> Any:
    return run_virtual(scene, limit_s=limit_s)
