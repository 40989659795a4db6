"""A generator replica as the pool sees it, and the specification of its process."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headway.config.adapter import AdapterConfig
from headway.config.router import RouterConfig
from headway.config.schema import Experiment
from headway.config.services.policy_sections import PolicySections
from headway.control.routing.replicas import ReplicaCondition, Standing, standing_of
from headway.generator.routing.open_request import OpenRequest
from headway.models.hf.pixels import FOLDER
from headway.models.routing import replayed_routing
from headway.records.errors import RemoteError, StorageFailed, WorkerDied
from headway.records.execution import MemoryMove
from headway.records.generation import POLICY_ADAPTER, EngineStatistics, Probe, ProbeScores, PromptLogprobs
from headway.records.tokens import TokenIds
from headway.records.trace import EngineSteps, Span
from headway.runtime.devices import native_kernels_enabled, parse_device
from headway.runtime.fork_server import MODEL_CODE
from headway.runtime.retries import Breaker
from headway.runtime.worker_slots import WorkerSlot, typed_cause
from headway.runtime.workers import WorkerHandle, WorkerSpec

_FACTORY = "headway.generator.service:GeneratorService"
# A replica serves calls between two decode steps. One that takes ten minutes is stuck and is killed, though its
# worker's health checks see nothing: another thread answers them.
_CALL_TIMEOUT_S = 600.0
_ANSWERED = 1 << 16


class Replica:
    """State of a replica: *starting* -> *live* -> *starting* again after a death, *lost* after too many deaths, or
    *removed* after it was drained."""

    def __init__(self, index: int, slot: WorkerSlot, experiment: Experiment, router: RouterConfig) -> None:
        settings = experiment.generator
        self.index = index
        self.slot = slot
        self.node = parse_device(slot.spec.device).node
        self.breaker = Breaker(router)
        self.idle = False  # takes no requests while another is live
        self.yielded = False  # paused: another worker computes on its device now
        self.onloaded = asyncio.Event()  # cleared while its memory is offloaded
        self.onloaded.set()
        self.silent = False  # its answer to a health check is overdue
        self.draining = False  # takes no more requests
        self.removed = False  # drained, and its process has ended
        self.emptied = asyncio.Event()  # set when it is draining and has no requests
        self.updating_since_s: float | None = None  # when the update in progress began
        self.reported_behind = False  # reported as behind on versions
        self.epoch = 0  # counts invalidations of its KV: weight updates and process deaths
        self.live = False  # its process runs with the newest weights announced by its start
        self.version = 0  # applied last
        self.update = 0  # number of the update it applied last; 0: none, it has the model at the configured path
        self.calls: dict[str, OpenRequest] = {}  # by ticket
        self.outstanding_tokens = 0
        self.answered = deque[str](maxlen=_ANSWERED)  # requests that have ended here since the last update
        self.outbox: dict[str, OpenRequest] = {}  # by ticket: to be submitted in one call
        self.aborts: list[str] = []
        self.flushing = False
        self.past = EngineStatistics()  # counters of its dead processes
        self.present = EngineStatistics()  # last statistics of its current process
        self._capacity_tokens = settings.kv_capacity_tokens or settings.slots * experiment.max_sequence_tokens

    @property
    def name(self) -> str:
        return self.slot.name

    @property
    def worker(self) -> WorkerHandle | None:
        """The replica's current process, dead or alive."""
        return self.slot.worker

    @property
    def gone(self) -> bool:
        """Whether the replica will never be live again."""
        return self.removed or self.slot.lost is not None

    @property
    def capacity_tokens(self) -> int:
        """KV capacity in tokens."""
        return self.present.kv_capacity_tokens or self._capacity_tokens

    async def change_adapter(self, name: str, folder: str) -> None:
        """Register an adapter, or remove it if ``folder`` is "". Raises WorkerDied, and ConfigurationError."""
        await (self._call_worker("add_adapter", name, folder) if folder else self._call_worker("remove_adapter", name))

    async def offload(self) -> list[MemoryMove]:
        """See `GeneratorService.offload`. Raises WorkerDied, and StorageFailed with the memory still on the device."""
        self.onloaded.clear()
        try:
            return await self._call_worker("offload")
        except StorageFailed:
            self.onloaded.set()
            raise

    async def onload(self) -> list[MemoryMove]:
        """See `GeneratorService.onload`. Raises WorkerDied."""
        self.onloaded.set()
        return await self._call_worker("onload")

    async def _call_worker(self, method: str, *arguments: Any) -> Any:
        if self.worker is None:
            raise WorkerDied(self.name, "not running")
        try:
            return await call_replica(self.worker, method, *arguments)
        except RemoteError as error:
            raise typed_cause(error) from None

    @staticmethod
    async def score_all(replicas: Iterable[Replica], probe: Probe) -> list[ProbeScores]:
        """Return the scores of live ``replicas`` that don't die meanwhile; see `GeneratorService.score`."""
        score_coroutines = (replica._score(probe) for replica in replicas if replica.live)
        outcomes = await asyncio.gather(*score_coroutines, return_exceptions=True)
        raise_but_deaths(outcomes)
        return [outcome for outcome in outcomes if isinstance(outcome, ProbeScores)]

    async def prompt_logprobs(
        self, ids: TokenIds, top: int, adapter: str, targets: np.ndarray | None = None
    ) -> PromptLogprobs:
        """See `GeneratorService.prompt_logprobs`. Raises WorkerDied, and ConfigurationError for a prompt that
        can't be computed."""
        await self.onloaded.wait()
        return await self._call_worker("prompt_logprobs", ids, top, adapter, targets)

    async def _score(self, probe: Probe) -> ProbeScores:
        await self.onloaded.wait()
        return await self._call_worker("score", probe)

    def standing(self, now: float, newest_update: int, grace_s: float, oldest_version: int) -> Standing:
        """The replica's standing for routing. ``oldest_version``: that takes requests where there are newer ones."""
        return standing_of(self._condition(now, oldest_version), newest_update, grace_s)

    def _condition(self, now: float, oldest_version: int) -> ReplicaCondition:
        """The replica's state as the rules of ``control.routing.replicas`` take it."""
        return ReplicaCondition(
            live=self.live,
            draining=self.draining,
            idle=self.idle,
            yielded=self.yielded,
            silent=self.silent,
            allowed=self.breaker.allows(now),
            update=self.update,
            outdated=self.version < oldest_version,
            updating_s=None if self.updating_since_s is None else now - self.updating_since_s,
        )


def replica_spec(
    index: int,
    device: str,
    experiment: PolicySections,
    log_directory: str | Path | None,
    adapters: Mapping[str, AdapterConfig] | None = None,
    role: str = "generator",
) -> WorkerSpec:
    """Make the worker specification of a replica on ``device``; ``adapters``: by name, beside the experiment's."""
    replica_name = f"{role}-{index}"
    settings, model = experiment.generator, experiment.model
    uses_sleep_mode = settings.engine == "vllm" and experiment.run.offload
    policy_adapters = {} if model.adapter is None else {POLICY_ADAPTER: model.adapter}
    return WorkerSpec(
        name=replica_name,
        factory=_FACTORY,
        arguments={
            "model_path": model.path,
            "chat": experiment.uses_chat,
            "implementation": model.implementation,
            "trust_remote_code": model.trust_remote_code,
            "quantization": model.quantization,
            "adapters": {**policy_adapters, **(adapters or {})},
            "seed": experiment.run.seed,
            "adapter_revisions": experiment.queue.budget + 2,
            "dtype": settings.dtype,
            "native_kernels": native_kernels_enabled(),
            "prefill_tokens_per_step": settings.prefill_tokens_per_step,
            "slots": settings.slots,
            "max_context_tokens": experiment.max_sequence_tokens,
            "kv_capacity_tokens": settings.kv_capacity_tokens,
            "deterministic": experiment.run.deterministic,
            "engine": settings.engine,
            "engine_arguments": settings.engine_arguments | ({"enable_sleep_mode": True} if uses_sleep_mode else {}),
            "probe_every_updates": settings.probe_every_updates,
            "exchange_directory": experiment.weights.exchange,
            "offload_directory": experiment.run.directory,
            "pixels_directory": str(Path(experiment.run.directory) / FOLDER),
            "return_experts": replayed_routing(experiment) is not None,
        },
        device=device,
        preload=MODEL_CODE if settings.engine == "torch" else (),
        log_path=Path(log_directory) / f"{replica_name}.log" if log_directory is not None else None,
    )


async def call_replica(worker: WorkerHandle, method: str, *args: Any) -> Any:
    """Call a replica's worker; kills it when it doesn't answer in time. Raises WorkerDied or RemoteError."""
    try:
        return await worker.call(method, *args, timeout_s=_CALL_TIMEOUT_S)
    except TimeoutError:
        kill_reason = f"{method} gave no result in {_CALL_TIMEOUT_S:g} s"
        worker.kill(kill_reason)
        raise WorkerDied(worker.name, kill_reason) from None


async def activity_of(name: str, worker: WorkerHandle) -> list[Span | EngineSteps]:
    """See `GeneratorPool.activity`; empty for a dead worker."""
    with contextlib.suppress(WorkerDied):
        raw_spans, step_rows = await call_replica(worker, "activity")
        shift_s = worker.clock_offset_s
        records = [Span(track=name, name=state, start_s=s + shift_s, end_s=e + shift_s) for state, s, e in raw_spans]
        return records + ([EngineSteps(track=name, rows=tuple(step_rows)).shifted(shift_s)] if step_rows else [])
    return []


def raise_but_deaths(outcomes: Sequence[object]) -> None:
    """Raise the first error that isn't a WorkerDied: each replica's supervisor handles its death."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, WorkerDied):
            raise outcome
