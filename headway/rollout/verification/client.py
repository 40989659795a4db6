"""A pool of verifier processes behind one handle (records.clients.Verifier), with timeouts that kill a worker."""

from __future__ import annotations

import asyncio
import functools
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headway.config import schema
from headway.config.sources import VerifierSettings
from headway.records.errors import HeadwayError, WorkerDied
from headway.records.rollout import Verdict
from headway.records.task import Task
from headway.records.trace import Span, WorkerState
from headway.rollout.verification.verdicts import failed_verdict
from headway.runtime.bounded_queue import BoundedQueue, QueueClosed, QueueStatistics
from headway.runtime.clock import Clock
from headway.runtime.devices import every_core_round_robin, machine_cores
from headway.runtime.fork_server import VERIFIER_CODE
from headway.runtime.nodes.conditions import machine_memory
from headway.runtime.retries import backoff_s
from headway.runtime.supervision import cancel_all
from headway.runtime.worker_slots import WorkerSlot, live_pids, start_all, stop_all
from headway.runtime.workers import EventCallback, Launcher, WorkerHandle, WorkerSpec

_FACTORY = "headway.rollout.verification.service:VerifierService"
_WATCHDOG = 1.1  # the worker's watchdog ends a hang at the latest after this multiple of a response's limit
_BACKSTOP_GRACE_S = 5.0  # the worker's own watchdog comes first; the parent's limit is for a worker that is stuck
_STOP_GRACE_S = 1.0
_RETRY_S = 0.5  # before a retry after an infrastructure failure; doubles each time
_WORKER_BYTES = 256 << 20  # free memory that one more worker needs: an idle one takes a fourth of it
_RESTART_WAIT_S = 5.0  # for a worker's restart; then another live worker gets its job


class _Job(msgspec.Struct, kw_only=True, eq=False):
    task: Task
    responses: tuple[str, ...] = ()
    tasks: tuple[Task, ...] = ()  # instead of responses: score these tasks' references
    verdicts: asyncio.Future[list[Verdict]]
    reassignments: int = 0  # to another worker


class _WorkerUnavailable(Exception):
    """Raised where the slot has no worker but other slots have: its node is unavailable, for example."""


@dataclass(eq=False)
class _WorkerLost(Exception):
    """Raised where the worker died during a job; ``hung``: because the job took too long."""

    cause: str
    hung: bool
    elapsed_s: float


class VerifierPool:
    """A pool of verifier processes that share one bounded queue of groups; ``set_workers`` changes their number.

    A group is scored in one call. When its worker hangs or dies, the worker is replaced and the group's responses are
    scored one by one, so that only the guilty one fails: "timed out after 10 s; job killed" (not
    infrastructure) for a hang. A death for another reason, or a verdict that failed as infrastructure, is retried
    ``retries`` times and then fails as infrastructure. Workers are replaced when the next job needs one. Their jobs go
    to others when that takes long, because a node is unavailable, say; the pool stays usable throughout.

    ``named``: the verifiers that tasks choose, by ``Task.verifier``; ``verifier`` scores the others. Every worker can
    score with all of them.
    """

    def __init__(
        self,
        launcher: Launcher,
        verifier: schema.VerifierConfig,
        clock: Clock,
        *,
        named: Mapping[str, VerifierSettings] | None = None,
        log_folder: Path | None = None,
        retries: int = 2,
        queue_groups: int | None = None,
        observe: Callable[[Span], None] | None = None,
        on_event: EventCallback = lambda name, detail, /, **data: None,
    ) -> None:
        """``observe`` receives every call of a worker, ``on_event`` deaths and restarts of workers."""
        self._observe = observe
        self._verifier = verifier
        self._named = dict(named or {})
        self._clock = clock
        self._retries = retries
        self._jobs: BoundedQueue[_Job] = BoundedQueue(queue_groups or 16 * verifier.workers, "verify", clock)
        self._arguments = {
            "verifier": verifier.model_dump(),
            "named": {name: settings.model_dump() for name, settings in self._named.items()},
        }
        self._launcher, self._log_folder, self._on_event = launcher, log_folder, on_event
        self._numbers = itertools.count()
        self.start_s = 0.0
        self._scoring: dict[str, int] = {}  # worker -> responses in its open call
        self._slots = [self._slot() for _ in range(verifier.workers)]
        self._draining: list[WorkerSlot] = []  # excess slots, which end after their current group
        self._idle: set[WorkerSlot] = set()  # slots without a group
        self._feeders: dict[WorkerSlot, asyncio.Task[None]] = {}
        self._open: set[asyncio.Future[list[Verdict]]] = set()

    async def start(self) -> None:
        """Start all workers. Raises ConfigurationError when the verifier can't be imported or refuses a parameter."""
        began_s = self._clock.now()
        try:
            await start_all(self._slots)
        except BaseException:
            await self.stop()
            raise
        self.start_s = self._clock.now() - began_s
        for slot in self._slots:
            self._feed(slot)

    def max_workers(self) -> int:
        """Return the number of workers that this machine can have now: one for each core, limited by its free memory.
        There is no limit where they run on nodes."""
        if any(self._verifier.nodes):
            return sys.maxsize
        total_and_free = machine_memory()
        memory_limit = len(self._slots) + total_and_free[1] // _WORKER_BYTES if total_and_free else sys.maxsize
        return min(len(machine_cores()), memory_limit)

    def set_workers(self, count: int) -> None:
        """Set the number of workers to ``count``, 1 or more. A new worker takes groups when it has started; a failed
        start is retried at growing intervals, while the others score. Without effect once the pool is stopped."""
        if self._jobs.closed:
            return
        for _ in range(count - len(self._slots)):
            slot = self._slot()
            self._slots.append(slot)
            self._feed(slot)
        self._slots, draining_slots = self._slots[:count], self._slots[count:]
        self._draining += draining_slots
        for slot in draining_slots:
            if slot in self._idle:
                self._feeders[slot].cancel()

    async def verify(self, task: Task, responses: Sequence[str]) -> list[Verdict]:
        """Score ``responses`` to ``task``: one Verdict each, in order. Waits while the queue is full."""
        return await self._submit(task, responses=tuple(responses)) if responses else []

    async def prove(self, tasks: Sequence[Task]) -> list[Verdict]:
        """Score the reference answers of ``tasks``, one or more with the same verifier (`ReferenceProver`): one Verdict
        each, in order. Hangs are handled as by ``verify``."""
        return await self._submit(tasks[0], tasks=tuple(tasks))

    async def _submit(self, task: Task, **fields: Any) -> list[Verdict]:
        verdicts: asyncio.Future[list[Verdict]] = asyncio.get_running_loop().create_future()
        self._open.add(verdicts)
        try:
            await self._jobs.put(_Job(task=task, verdicts=verdicts, **fields))
            return await verdicts
        except QueueClosed:
            raise HeadwayError("the verifier pool is stopped") from None
        finally:
            self._open.discard(verdicts)

    async def stop(self) -> None:
        """Stop all workers; callers that still wait for a verdict get HeadwayError."""
        self._jobs.close()
        await cancel_all(*self._feeders.values())
        for verdicts in self._open:
            if not verdicts.done():
                verdicts.set_exception(HeadwayError("the verifier pool is stopped"))
        await stop_all([*self._slots, *self._draining], _STOP_GRACE_S)

    @property
    def restarts(self) -> int:
        """The number of workers replaced so far."""
        return sum(slot.restarts for slot in self._slots)

    def statistics(self) -> QueueStatistics:
        """The queue's statistics: used, capacity, peak, waiters, age of the oldest group."""
        return self._jobs.statistics()

    @property
    def worker_states(self) -> list[WorkerState]:
        """Every worker's health; one that died is replaced when the next job needs it."""
        return [slot.state for slot in self._slots]

    @property
    def pids(self) -> list[int]:
        """Process ids of the live workers."""
        return live_pids([*self._slots, *self._draining])

    # --- one slot: a worker and the loop that feeds it ---------------------------------------------------

    def _slot(self) -> WorkerSlot:
        index = next(self._numbers)
        name, folder = f"verifier-{index}", self._log_folder
        limits_s = [self._verifier.timeout_s, *(settings.timeout_s for settings in self._named.values())]
        spec = WorkerSpec(
            name=name,
            factory=_FACTORY,
            arguments=self._arguments,
            device=every_core_round_robin(self._verifier.nodes, index),
            preload=VERIFIER_CODE,
            log_path=str(folder / f"{name}.log") if folder else None,
            longest_silence_s=_WATCHDOG * max(limits_s) + _BACKSTOP_GRACE_S,
        )
        count_held = functools.partial(self._scoring.get, name, 0)
        return WorkerSlot(spec, self._launcher, self._clock, self._on_event, limit=self._retries + 1, held=count_held)

    def _feed(self, slot: WorkerSlot) -> None:
        self._feeders[slot] = asyncio.create_task(self._serve_until_drained(slot), name=slot.name)

    async def _serve_until_drained(self, slot: WorkerSlot) -> None:
        """Run a slot: start its worker where it has none yet, serve groups, and stop it once it is in excess."""
        try:
            self._idle.add(slot)
            began_s = self._clock.now()
            while slot.worker is None and slot in self._slots:
                if await slot.restart() is not None:
                    self.start_s = self._clock.now() - began_s
            await self._serve(slot)
        except asyncio.CancelledError:
            if self._jobs.closed or slot not in self._draining:
                raise  # the pool is being stopped, and its slots with it
        if not self._jobs.closed:
            await slot.stop(_STOP_GRACE_S)
            self._draining.remove(slot)
            del self._feeders[slot]

    async def _serve(self, slot: WorkerSlot) -> None:
        """Consumes groups from the queue; waits for their scores; is unblocked by ``verify``."""
        while slot in self._slots:
            self._idle.add(slot)
            try:
                job = await self._jobs.get()
            except QueueClosed:
                return
            finally:
                self._idle.discard(slot)
            if job.verdicts.done():
                continue  # its caller gave up while it was queued
            try:
                verdicts = await self._score_group(slot, job)
            except _WorkerUnavailable:
                await self._jobs.put(job)
                while slot.live is None and slot in self._slots:
                    await slot.restart()
                continue
            except Exception as error:  # a bug of the pool itself must reach the caller, not end the loop silently
                if not job.verdicts.done():
                    job.verdicts.set_exception(error)
                continue
            if not job.verdicts.done():
                job.verdicts.set_result(verdicts)

    async def _score_group(self, slot: WorkerSlot, job: _Job) -> list[Verdict]:
        """Score all responses in one call, or one by one once that killed the worker. Infrastructure failures are
        scored again after a pause, which delays the queue: while a service is down, other groups would fail as well."""
        verdict_by_index: dict[int, Verdict] = {}
        remaining_indices = list(range(len(job.tasks or job.responses)))
        is_joint, attempts = True, 0
        while True:
            if is_joint and len(remaining_indices) > 1:  # a single response is scored alone at once
                try:
                    new_verdicts = await self._call(slot, job, remaining_indices)
                except _WorkerLost as loss:
                    is_joint, attempts = False, attempts + (0 if loss.hung else 1)
                    continue
            else:
                new_verdicts = [await self._score_single(slot, job, i) for i in remaining_indices]
            for i, verdict in zip(remaining_indices, new_verdicts, strict=True):
                verdict_by_index[i] = _add_costs(verdict, verdict_by_index.get(i))
            remaining_indices = [i for i in remaining_indices if _is_retryable(verdict_by_index[i])]
            attempts += 1
            if not remaining_indices or attempts > self._retries:
                break
            await self._clock.sleep(backoff_s(attempts, _RETRY_S))
        return [_with_attempts(v, attempts) if _is_retryable(v) else v for _, v in sorted(verdict_by_index.items())]

    async def _score_single(self, slot: WorkerSlot, job: _Job, index: int) -> Verdict:
        try:
            return (await self._call(slot, job, [index]))[0]
        except _WorkerLost as loss:
            if loss.hung:
                cause = f"timed out after {self._timeout_s(job.task):g} s; job killed"
            else:
                cause = "the verifier's process died during it"
            return failed_verdict(cause, infrastructure=not loss.hung, detail=loss.cause, verify_s=loss.elapsed_s)

    async def _call(self, slot: WorkerSlot, job: _Job, indices: Sequence[int]) -> list[Verdict]:
        """Score on this slot's worker. Raises _WorkerLost, after which the next call starts another worker, and
        _WorkerUnavailable."""
        worker, task = await self._worker(slot, job), job.task
        started_s = self._clock.now()
        backstop_s = _WATCHDOG * self._timeout_s(task) * len(indices) + _BACKSTOP_GRACE_S
        self._scoring[slot.name] = len(indices)
        if job.tasks:
            call: tuple[Any, ...] = "prove", tuple(job.tasks[i] for i in indices)
        else:
            call = "score", task, tuple(job.responses[i] for i in indices)
        try:
            async with asyncio.timeout(backstop_s):
                verdicts = await worker.call(*call)
            self._scoring[slot.name] = 0
            if self._observe is not None:
                start_s, end_s = round(started_s, 6), round(self._clock.now(), 6)
                self._observe(Span(track=worker.name, name=f"{call[0]} {len(indices)}", start_s=start_s, end_s=end_s))
            return verdicts
        except TimeoutError:
            elapsed_s = self._clock.now() - started_s
            cause = f"no answer after {elapsed_s:.1f} s"
            worker.kill(cause)
            await worker.died
            raise _WorkerLost(cause, True, elapsed_s) from None
        except WorkerDied as error:
            elapsed_s = self._clock.now() - started_s
            # the watchdog in the worker ends it no sooner than the limit; an earlier death had another cause
            raise _WorkerLost(error.cause, elapsed_s >= self._timeout_s(task), elapsed_s) from None
        except asyncio.CancelledError:
            slot.kill()  # the pool is being stopped in mid-job: don't wait for the job
            raise

    def _timeout_s(self, task: Task) -> float:
        return self._named.get(task.verifier, self._verifier).timeout_s

    async def _worker(self, slot: WorkerSlot, job: _Job) -> WorkerHandle:
        """Return the slot's live worker, restarted when it is dead. Raises HeadwayError when that fails,
        _WorkerUnavailable when it takes long."""
        while (worker := slot.live) is None:
            if slot.exhausted:
                slot.reset_failures()  # the next job tries again
                raise HeadwayError(f"{slot.name} could not be restarted: {slot.fault}") from slot.fault
            self._scoring[slot.name] = 0
            await slot.restart(_RESTART_WAIT_S)
            if slot.restarting and job.reassignments <= self._retries and any(other.live for other in self._slots):
                job.reassignments += 1
                raise _WorkerUnavailable
        slot.reset_failures()
        return worker


def _is_retryable(verdict: Verdict) -> bool:
    """Return whether a verdict failed for a reason independent of the response."""
    return verdict.failure is not None and verdict.failure.infrastructure


def _add_costs(verdict: Verdict, earlier: Verdict | None) -> Verdict:
    """Return ``verdict`` with the costs of its earlier attempts added."""
    if earlier is None or not earlier.judge_tokens:
        return verdict
    return msgspec.structs.replace(
        verdict,
        judge_tokens=verdict.judge_tokens + earlier.judge_tokens,
        judge_cost=verdict.judge_cost + earlier.judge_cost,
    )


def _with_attempts(verdict: Verdict, attempts: int) -> Verdict:
    assert verdict.failure is not None
    cause = f"{verdict.failure.cause}; attempts: {attempts}"
    return msgspec.structs.replace(verdict, failure=msgspec.structs.replace(verdict.failure, cause=cause))
