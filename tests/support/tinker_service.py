"""A Tinker service on stand-ins: a trainer whose states are the history of what was applied, and a sampler that counts.

Both die when they are told to, and forget all that isn't durable, as processes do.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headway.config.endpoint import EndpointConfig
from headway.config.services.tinker import TinkerConfig
from headway.records.errors import InfrastructureError
from headway.records.tenants.protocols import (
    AdapterNotLoaded,
    AppliedState,
    BaseDescription,
    CheckpointKind,
    PassOutcome,
    TenantAdapter,
    TenantRefused,
    TenantSample,
    TenantSampleOutcome,
    TenantSampleRequest,
    TenantsUnavailable,
    TrainingPass,
)
from headway.records.training import OptimiserSettings
from headway.runtime.clock import Clock
from headway.services.tinker.app import TinkerApp
from headway.services.tinker.catalogue import TinkerCatalogue
from headway.services.tinker.dispatch import TinkerDispatch
from headway.services.tinker.log import TinkerLog
from headway.services.tinker.tenants import TenantKeys

BASE = BaseDescription(
    name="tiny", digest="b1", architecture="qwen3", tokenizer="tiny", vocabulary=100, max_context_tokens=64
)


def digest_of(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


@dataclass
class Disk:
    """What survives: the states of models, and saved folders."""

    states: dict[str, tuple[int, TenantAdapter, tuple[Any, ...], dict[str, float]]] = field(default_factory=dict)
    folders: dict[str, tuple[Any, ...]] = field(default_factory=dict)


class HistoryTrainer:
    """Each model's state is the tuple of what was applied to it; gradients are the digests of passes."""

    def __init__(self, disk: Disk, clock: Clock, step_s: float = 1.0) -> None:
        self.disk = disk
        self.calls: Counter[str] = Counter()
        self.faults: list[str] = []  # names of points, "CALL:before" or "CALL:after", at which it dies next
        self.unavailable = False
        self.busy = asyncio.Event()  # it has applied eight steps
        self._clock = clock
        self._step_s = step_s
        self.loaded: dict[str, list[str]] = {}  # model -> accumulated gradients

    async def _point(self, name: str) -> None:
        if self.unavailable:
            raise TenantsUnavailable("the trainer is starting")
        await self._clock.sleep(self._step_s)
        if name in self.faults:
            self.faults.remove(name)
            self.loaded.clear()
            raise InfrastructureError(f"killed at {name}")
        self.calls[name] += 1

    def _gradients(self, model_id: str) -> list[str]:
        if model_id not in self.loaded:
            raise AdapterNotLoaded(model_id)
        return self.loaded[model_id]

    async def create(self, model_id: str, sequence: int, adapter: TenantAdapter) -> None:
        await self._point("create:before")
        self.disk.states[model_id] = (sequence, adapter, (("create", adapter.rank, adapter.seed),), {})
        self.loaded[model_id] = []
        await self._point("create:after")

    async def restore(self, model_id: str) -> AppliedState | None:
        await self._point("restore:before")
        if model_id not in self.disk.states:
            return None
        self.loaded[model_id] = []
        sequence, adapter, _, metrics = self.disk.states[model_id]
        return AppliedState(sequence=sequence, adapter=adapter, metrics=metrics)

    async def forward_backward(self, model_id: str, training_pass: TrainingPass) -> PassOutcome:
        await self._point("forward_backward:before")
        gradients = self._gradients(model_id)
        number = digest_of(
            [
                (datum.token_ids_n.tolist(), {k: v.tolist() for k, v in datum.inputs.items()})
                for datum in training_pass.data
            ],
            training_pass.loss,
            training_pass.settings,
        )
        if not training_pass.forward_only:
            gradients.append(number)
        state = int(digest_of(self.disk.states[model_id][2])[:6], 16) / 1e6
        logprobs = tuple(np.full(datum.inputs["target_tokens"].shape, -state, "f4") for datum in training_pass.data)
        await self._point("forward_backward:after")
        return PassOutcome(logprobs=logprobs, metrics={"loss:sum": state})

    async def optim_step(self, model_id: str, sequence: int, optimiser: OptimiserSettings) -> dict[str, float]:
        await self._point("optim_step:before")
        gradients = tuple(self._gradients(model_id))
        _, adapter, history, _ = self.disk.states[model_id]
        metrics = {"gradients:sum": float(len(gradients))}
        self.disk.states[model_id] = (sequence, adapter, (*history, (gradients, optimiser.learning_rate)), metrics)
        self.loaded[model_id] = []
        await self._point("optim_step:after")
        if self.calls["optim_step:after"] == 8:
            self.busy.set()
        return metrics

    async def load(self, model_id: str, sequence: int, path: str, adapter: TenantAdapter, *, optimiser: bool) -> None:
        await self._point("load:before")
        history = self.disk.folders[path]
        self.disk.states[model_id] = (sequence, adapter, (*history, ("load", optimiser)), {})
        self.loaded[model_id] = []
        await self._point("load:after")

    async def save(self, model_id: str, path: str, kind: CheckpointKind) -> int:
        await self._point("save:before")
        self._gradients(model_id)
        self.disk.folders[path] = self.disk.states[model_id][2]
        await self._point("save:after")
        return 123

    async def evict(self, model_id: str) -> None:
        self.calls["evict"] += 1
        self.loaded.pop(model_id, None)

    async def delete(self, path: str) -> None:
        self.disk.folders.pop(path, None)


class CountingSampler:
    """Samples the tokens 1, 2, 3 … after the prompt's last one; their log-probability is the revision's number."""

    def __init__(self, disk: Disk, clock: Clock, step_s: float = 1.0) -> None:
        self.disk = disk
        self.registered: dict[str, str | None] = {}
        self.requests: list[TenantSampleRequest] = []
        self.cancelled: list[str] = []
        self._clock = clock
        self._step_s = step_s

    async def register(self, sampler_id: str, path: str | None, *, inflight: bool) -> None:
        await self._clock.sleep(self._step_s)
        if path is not None and path not in self.disk.folders:
            raise TenantRefused(f"nothing is saved under {path}")
        self.registered[sampler_id] = path

    async def sample(self, request: TenantSampleRequest) -> TenantSampleOutcome:
        await self._clock.sleep(self._step_s)
        if request.sampler_id not in self.registered:
            raise AdapterNotLoaded(request.sampler_id)
        self.requests.append(request)
        path = self.registered[request.sampler_id]
        logprob = -float(len(self.disk.folders[path])) if path else 0.0
        length = min(request.sampling.max_tokens, 3)
        ids = (np.arange(1, length + 1) + request.prompt_ids[-1]) % BASE.vocabulary
        sample = TenantSample(token_ids=ids.astype("i4"), logprobs=np.full(length, logprob, "f4"), stopped=False)
        prompt = None
        if request.prompt_logprobs:
            prompt = np.array([np.nan] + [logprob] * (len(request.prompt_ids) - 1), "f4")
        return TenantSampleOutcome(samples=(sample,) * request.samples, prompt_logprobs=prompt)

    async def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    async def release(self, sampler_id: str) -> None:
        self.registered.pop(sampler_id, None)

    def statistics(self) -> Mapping[str, float]:
        return {"samplers": len(self.registered)}


class EveryKey(TenantKeys):
    def tenant_of(self, key: str, scope: str = "") -> str:
        return key.removeprefix("tml-")


class Service:
    """A service on a store; `kill` drops all that it has in memory."""

    def __init__(
        self,
        store: Path,
        trainer: HistoryTrainer,
        sampler: CountingSampler,
        clock: Clock,
        wall: Callable[[], float],
        settings: TinkerConfig | None = None,
        endpoint: EndpointConfig | None = None,
        keys: TenantKeys | None = None,
    ) -> None:
        self.log = TinkerLog(store, BASE)
        settings = settings or TinkerConfig(store=str(store))
        self.dispatch = TinkerDispatch(self.log, trainer, sampler, BASE, settings, clock, wall)
        operations = self.dispatch.operations
        catalogue = TinkerCatalogue(self.log, operations, BASE, store, wall)
        endpoint = endpoint or EndpointConfig(address="127.0.0.1:0")
        self.app = TinkerApp(self.log, self.dispatch, operations, catalogue, BASE, endpoint, keys or EveryKey(""), wall)
        self._task = asyncio.ensure_future(self.dispatch.run())

    async def kill(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled() and (error := self._task.exception()) is not None:
            raise error
        self.log.close()

    async def post(self, path: str, fields: Mapping[str, Any] | bytes = b"", **options: Any) -> tuple[int, Any]:
        """Call the application without a socket; returns the status and the body, decoded if it is JSON."""
        if self._task.done():
            self._task.result()
        return await call(self.app, "POST", path, fields, **options)


async def call(
    app: TinkerApp,
    method: str,
    path: str,
    fields: Mapping[str, Any] | bytes = b"",
    *,
    key: str = "tml-a",
    query: str = "",
    headers: Mapping[str, str] = {},
    prefix: str = "/api/v1/",
) -> tuple[int, Any]:
    body = fields if isinstance(fields, bytes) else msgspec.json.encode(fields)
    sent: list[Any] = []
    answered = asyncio.Event()
    messages = [{"type": "http.request", "body": body}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await answered.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    all_headers = {"x-api-key": key, **headers}
    scope = {
        "type": "http",
        "method": method,
        "path": f"{prefix}{path}",
        "query_string": query.encode(),
        "headers": [(name.encode(), text.encode()) for name, text in all_headers.items()],
    }
    await app(scope, receive, send)
    answered.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    content = b"".join(message.get("body", b"") for message in sent[1:])
    kinds = dict(sent[0]["headers"])
    return sent[0]["status"], msgspec.json.decode(content) if kinds[b"content-type"] == b"application/json" else content
