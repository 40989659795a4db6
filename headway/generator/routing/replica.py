"""A generator replica as the pool sees it, and how its process is started."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.config.schema import Experiment
from headway.control.routing.breaker import Breaker
from headway.control.routing.replicas import ReplicaCondition, Standing, standing_of
from headway.generator.activity import ActivitySpan
from headway.generator.routing.calls import OpenRequest
from headway.records.errors import WorkerDied
from headway.records.generation import EngineStatistics
from headway.runtime.devices import lends
from headway.runtime.worker_slots import WorkerSlot
from headway.runtime.workers import Worker, WorkerSpec

_FACTORY = "headway.generator.service:GeneratorService"
# A replica serves calls between two decode steps. One that takes ten minutes over it is stuck, though its worker's
# health checks (another thread answers them) see nothing: better killed than waited for.
_CALL_TIMEOUT_S = 600.0


class Replica:
    """A replica: *starting* -> *live* -> *starting* again after a death, or *lost* when it died too often, or *left*
    when it was asked to leave."""

    def __init__(self, index: int, slot: WorkerSlot, experiment: Experiment) -> None:
        generator = experiment.generator
        self.index = index
        self.slot = slot
        self.shared = lends(slot.spec.device, experiment.trainer.devices)  # the trainer computes on its device as well
        self.breaker = Breaker(experiment.router)
        self.resting = False  # takes no requests while another is live
        self.lent = False  # the trainer computes on its device now
        self.silent = False  # its answer to a health check is overdue
        self.leaving = False  # takes no more requests
        self.left = False  # ... and is gone
        self.emptied = asyncio.Event()  # it is leaving and has no requests any more
        self.updating_since_s: float | None = None  # it applies weights
        self.told_behind = False  # that it is behind on versions has been said
        self.epoch = 0  # counts what made its KV void: other weights, another process
        self.live = False  # its weights are the newest that were announced when it started
        self.version = 0  # that it applied
        self.update = 0  # number of the update it applied last; 0: none, it has the model at the configured path
        self.calls: dict[str, OpenRequest] = {}  # by ticket
        self.outstanding_tokens = 0
        self.outbox: dict[str, OpenRequest] = {}  # by ticket: to be submitted in one call
        self.aborts: list[str] = []
        self.flushing = False
        self.past = EngineStatistics()  # counters of its dead incarnations
        self.present = EngineStatistics()  # last seen of the present one
        self._capacity_tokens = generator.kv_capacity_tokens or generator.slots * experiment.max_sequence_tokens

    @property
    def name(self) -> str:
        return self.slot.name

    @property
    def worker(self) -> Worker | None:
        """The process, dead or alive."""
        return self.slot.worker

    @property
    def gone(self) -> bool:
        """Never to come back."""
        return self.left or self.slot.lost is not None

    @property
    def capacity_tokens(self) -> int:
        """KV tokens it holds."""
        return self.present.kv_capacity_tokens or self._capacity_tokens

    def standing(self, now: float, newest_update: int, grace_s: float) -> Standing:
        """How it stands; at once where nothing is the matter, as for nearly every request."""
        matter = not self.live or self.leaving or self.silent or self.resting or self.lent
        if not matter and self.update >= newest_update and self.breaker.closed:
            return "serving"
        return standing_of(self._condition(now), newest_update, grace_s)

    def _condition(self, now: float) -> ReplicaCondition:
        """Return the conditions that decide whether the replica is given requests."""
        return ReplicaCondition(
            live=self.live,
            leaving=self.leaving,
            resting=self.resting,
            lent=self.lent,
            silent=self.silent,
            allowed=self.breaker.allows(now),
            update=self.update,
            updating_s=None if self.updating_since_s is None else now - self.updating_since_s,
        )


def replica_spec(index: int, device: str, experiment: Experiment, log_directory: str | Path | None) -> WorkerSpec:
    """The process of the replica on ``device``."""
    name = f"generator-{index}"
    settings = experiment.generator
    return WorkerSpec(
        name=name,
        factory=_FACTORY,
        arguments={
            "model_path": experiment.model.path,
            "dtype": settings.dtype,
            "native_kernels": settings.native_kernels,
            "prefill_tokens_per_step": settings.prefill_tokens_per_step,
            "slots": settings.slots,
            "max_context_tokens": experiment.max_sequence_tokens,
            "kv_capacity_tokens": settings.kv_capacity_tokens,
            "deterministic": experiment.run.deterministic,
            "engine": settings.engine,
            "engine_arguments": settings.engine_arguments,
            "probe_every_updates": settings.probe_every_updates,
            "exchange_directory": settings.exchange_directory,
        },
        device=device,
        log_path=Path(log_directory) / f"{name}.log" if log_directory is not None else None,
    )


async def call_replica(worker: Worker, method: str, *args: Any) -> Any:
    """Call a replica, which is killed when it doesn't answer. Raises WorkerDied or RemoteError."""
    try:
        return await worker.call(method, *args, timeout_s=_CALL_TIMEOUT_S)
    except TimeoutError:
        cause = f"{method} gave no result in {_CALL_TIMEOUT_S:g} s"
        worker.kill(cause)
        raise WorkerDied(worker.name, cause) from None


async def activity_of(worker: Worker) -> list[ActivitySpan]:
    """See `GeneratorService.activity`; nothing of a dead one."""
    with contextlib.suppress(WorkerDied):
        return await call_replica(worker, "activity")
    return []


def raise_but_deaths(outcomes: Sequence[object]) -> None:
    """Raise the first error of another kind: deaths are their keepers' business."""
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, WorkerDied):
            raise outcome
