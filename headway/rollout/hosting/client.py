"""The pool of workers that run environments: assignment of rollouts to workers, restarts, and worker deaths."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from headway.config.endpoint import EnvironmentConfig
from headway.config.sandbox import SandboxConfig
from headway.records.environment import WORKER_EVENT, EnvironmentState, EpisodeScore, NextTurn, Reply
from headway.records.errors import HeadwayError, WorkerDied
from headway.records.rollout import Failure
from headway.records.sandbox_statistics import SandboxStatistics
from headway.records.task import Task
from headway.records.trace import WorkerState
from headway.runtime.bounded_queue import QueueClosed
from headway.runtime.clock import Clock
from headway.runtime.devices import every_core_round_robin
from headway.runtime.fork_server import VERIFIER_CODE
from headway.runtime.worker_slots import WorkerSlot, start_all, stop_all
from headway.runtime.workers import EventCallback, Launcher, WorkerHandle, WorkerSpec

_FACTORY = "headway.rollout.hosting.service:EnvironmentService"
_STOP_GRACE_S = 25.0  # time for sandboxes to end
_STUCK_S = 300.0  # time for a worker with an overdue answer to prove that its event loop runs
_MAX_STARTS = 5  # failed starts in a row; the run ends when all workers have reached it and none is live
_RESTART_WAIT_S = 30.0  # a rollout's wait for one worker's start, before it goes to another live worker
_STATISTICS_TIMEOUT_S = 2.0  # of a request for sandbox statistics; a busy worker's last ones are used


class EnvironmentDied(HeadwayError):
    """Raised where the worker that ran a rollout has died, and its sandbox with it."""


class _WorkerClient:
    """A worker's slot with its open requests and their answers."""

    def __init__(
        self, spec: WorkerSpec, launcher: Launcher, clock: Clock, on_event: EventCallback, on_stuck: Callable[[], None]
    ) -> None:
        self.episodes = 0
        self.stuck = False  # a thread of the worker hangs and can't be ended
        self._on_event, self._on_stuck = on_event, on_stuck
        self.slot = WorkerSlot(
            spec, launcher, clock, on_event, limit=_MAX_STARTS, prepare=self._attach, held=lambda: self.episodes
        )
        self.name = spec.name
        self.late = False  # its start takes longer than _RESTART_WAIT_S
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._latest = SandboxStatistics()  # of the worker, at the last request for them
        self._ended = SandboxStatistics()  # counters of the workers that died

    async def _attach(self, worker: WorkerHandle) -> None:
        self._ended = SandboxStatistics.total([self._ended, self._latest.counted()])
        self._latest = SandboxStatistics()  # the new one counts from zero
        self.stuck = False
        self._reader = asyncio.create_task(self._read(worker), name=f"{self.name}-events")

    async def ask(self, worker: WorkerHandle, method: str, *arguments: Any) -> tuple[Any, float]:
        """Return the worker's answer to a request, and the seconds that the worker spent on it. Raises EnvironmentDied;
        RuntimeError with the worker's traceback for a bug in it."""
        self.slot.reset_failures()  # a death from now on is attributed to the rollout, which isn't retried for ever
        return await self._submit(worker, "submit", method, arguments)

    async def answers(self, worker: WorkerHandle) -> bool:
        """Return whether the worker's event loop still runs. Raises EnvironmentDied."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STUCK_S):
                await self._submit(worker, "submit_sandboxes")
                return True
        return False

    async def sandboxes(self) -> SandboxStatistics:
        """Return the sandbox statistics of this client's worker and its predecessors."""
        worker = self.slot.live
        if worker is not None:
            with contextlib.suppress(EnvironmentDied, TimeoutError):
                async with asyncio.timeout(_STATISTICS_TIMEOUT_S):
                    statistics, _ = await self._submit(worker, "submit_sandboxes")
                if worker is self.slot.worker:
                    self._latest = statistics
        return SandboxStatistics.total([self._ended, self._latest if self.slot.live else self._latest.counted()])

    async def _submit(self, worker: WorkerHandle, method: str, *arguments: Any) -> tuple[Any, float]:
        request_number = next(self._numbers)
        answer_future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[request_number] = answer_future
        try:
            await worker.call(method, request_number, *arguments)
            # The first arguments of a request are its method and the rollout's name; one for statistics has neither.
            request_name, rollout_name = (arguments[0], arguments[1][0]) if arguments else ("sandboxes", "")
            waiter = f"rollout {rollout_name}" if rollout_name else "the orchestrator"
            with worker.waits.on(f"environment.{request_name}", self.name, waiter):
                return await answer_future
        except WorkerDied as error:
            raise EnvironmentDied(f"{self.name} died: {error.cause}") from None
        finally:
            self._waiting.pop(request_number, None)

    async def _read(self, worker: WorkerHandle) -> None:
        """Consumes and waits for the worker's answers; is unblocked by its death."""
        try:
            while True:
                request_number, succeeded, payload, seconds = await worker.events.get()
                if request_number == WORKER_EVENT:
                    event_name, event_text, event_fields = payload
                    self._on_event(event_name, f"{self.name}: {event_text}", worker=self.name, **event_fields)
                    if event_name == "tool_stuck":
                        self.stuck = True
                        self._on_stuck()
                    continue
                answer_future = self._waiting.get(request_number)
                if answer_future is None or answer_future.done():
                    continue  # its caller was cancelled
                if succeeded:
                    answer_future.set_result((payload, seconds))
                else:
                    answer_future.set_exception(RuntimeError(payload))
        except QueueClosed:
            for answer_future in self._waiting.values():
                if not answer_future.done():
                    answer_future.set_exception(EnvironmentDied(f"{self.name} died: {worker.died.result().cause}"))


class WorkerLease:
    """A rollout's handle on the worker that runs it."""

    def __init__(self, client: _WorkerClient, worker: WorkerHandle, name: str, limit_s: float) -> None:
        """``limit_s``: time without an answer after which the worker is checked for being stuck."""
        self._client = client
        self._worker = worker
        self._name = name
        self._limit_s = limit_s
        self.working_s = 0.0  # the worker's time for replies and scores
        self._park_undelivered = False  # a park's caller was cancelled before its answer

    async def begin(self, task: Task, seed: int) -> Reply:
        return self._with_local_times(await self._ask("begin", task, seed))

    async def restore(
        self, task: Task, saved: EnvironmentState, asked: NextTurn, messages: Mapping[str, Sequence[dict[str, Any]]]
    ) -> Failure | None:
        return await self._ask("restore", task, saved, asked, dict(messages))

    async def reply(self, message: Mapping[str, Any], speaker: str, cut: bool) -> Reply:
        return self._with_local_times(await self._ask("reply", dict(message), speaker, cut))

    async def score(self) -> EpisodeScore:
        return await self._ask("score")

    async def park(self) -> EnvironmentState | Failure:
        self._park_undelivered = True
        parked = await self._ask("park")
        self._park_undelivered = False
        return parked

    async def unpark(self) -> Failure | None:
        return await self._ask("unpark")

    async def end(self) -> None:
        await self._ask("end", self._park_undelivered)

    def _with_local_times(self, reply: Reply) -> Reply:
        """Return a worker's reply with its times shifted to this machine's clock."""
        if not (shift_s := self._worker.clock_offset_s):
            return reply
        shifted_times = [
            msgspec.structs.replace(times, start_s=times.start_s + shift_s, end_s=times.end_s + shift_s)
            for times in reply.tool_times
        ]
        return msgspec.structs.replace(reply, tool_times=tuple(shifted_times))

    async def _ask(self, method: str, *arguments: Any) -> Any:
        call_task = asyncio.ensure_future(self._client.ask(self._worker, method, self._name, *arguments))
        call_task.add_done_callback(lambda done: done.cancelled() or done.exception())  # its caller may be cancelled
        try:
            while not call_task.done():
                done_calls, _ = await asyncio.wait((call_task,), timeout=self._limit_s)
                if not done_calls and not await self._client.answers(self._worker):
                    took_s = self._limit_s + _STUCK_S
                    reason = f"no answer to {method} in {took_s:g} s: an environment blocks its worker"
                    self._worker.kill(reason)
                    raise EnvironmentDied(f"{self._client.name} died: {reason}")
            answer, seconds = call_task.result()
            if method in ("reply", "score"):
                self.working_s += seconds
            return answer
        finally:
            call_task.cancel()


class EnvironmentPool:
    """A pool of ``environment.workers`` processes, each with its share of the sandboxes.

    A rollout runs in the worker with the fewest rollouts. When a worker dies, its rollouts are lost: all of their calls
    raise EnvironmentDied, and the next rollout starts another worker. While that can't be started, rollouts go to the
    others, and the start is retried at growing intervals. When no worker is left, ``lease`` raises WorkerDied. A worker
    with a stuck thread gets no further rollout: a successor replaces it, and it ends after its current rollouts.
    """

    def __init__(
        self,
        launcher: Launcher,
        environment: EnvironmentConfig,
        sandbox: SandboxConfig,
        clock: Clock,
        *,
        sandboxes: str,
        run: str = "",
        snapshots: Path | None = None,
        seed: int = 0,
        log_folder: Path | None = None,
        on_event: EventCallback = lambda name, detail, /, **data: None,
    ) -> None:
        """``sandboxes``: the ``module:function`` that makes a worker's pool of sandboxes; ``snapshots``: the folder of
        parked ones. ``on_event`` receives deaths, restarts and losses of workers."""
        self._environment = environment
        self._clock = clock
        arguments = {
            "environment": environment.model_dump(),
            "sandboxes": sandboxes,
            "run": run,
            "snapshots": str(snapshots) if snapshots else "",
            "seed": seed,
        }
        sandbox_shares, worker_numbers = _shares(sandbox, environment.workers), itertools.count()

        def make_client(index: int) -> _WorkerClient:
            worker_number = next(worker_numbers)
            spec = WorkerSpec(
                name=f"environment-{worker_number}",
                factory=_FACTORY,
                arguments={**arguments, "sandbox": sandbox_shares[index].model_dump()},
                device=every_core_round_robin(environment.nodes, index),
                preload=VERIFIER_CODE,  # as verifiers
                log_path=str(log_folder / f"environment-{worker_number}.log") if log_folder else None,
            )
            return _WorkerClient(spec, launcher, clock, on_event, self._replace_stuck)

        self._make_client = make_client
        self._clients = [make_client(index) for index in range(environment.workers)]
        self._draining: dict[int, _WorkerClient] = {}  # stuck clients that still have rollouts, by their index
        self._former: list[_WorkerClient] = []  # all stuck clients, ended ones too
        self._ending: list[asyncio.Task[None]] = []
        concurrency = environment.concurrency
        self._permits = asyncio.Semaphore(concurrency) if concurrency else contextlib.nullcontext()
        self._stopped = False

    async def start(self) -> None:
        """Start all workers. Raises ConfigurationError for an environment that can't be loaded."""
        try:
            await start_all([client.slot for client in self._clients])
        except BaseException:
            await self.stop()
            raise

    @asynccontextmanager
    async def lease(self, name: str) -> AsyncIterator[WorkerLease]:
        """Yield a lease for rollout ``name`` when ``environment.concurrency`` permits; the rollout ends with the block.
        Raises EnvironmentDied; WorkerDied when no worker can be started any more."""
        async with self._permits, self._choose_worker() as (client, worker):
            lease = WorkerLease(client, worker, name, self._environment.timeout_s)
            try:
                yield lease
            finally:
                if worker.alive:
                    await asyncio.shield(asyncio.ensure_future(_end_rollout(lease)))

    async def stop(self) -> None:
        """End all workers, the rollouts in them and their sandboxes."""
        self._stopped = True
        await stop_all([client.slot for client in (*self._clients, *self._former)], _STOP_GRACE_S)
        await asyncio.gather(*self._ending)

    async def sandboxes(self) -> SandboxStatistics:
        """Return the statistics of all workers' sandboxes since the pool was started: counters of dead workers stay
        included. Empty where the environment uses no sandboxes."""
        clients = (*self._clients, *self._former)
        return SandboxStatistics.total(await asyncio.gather(*(client.sandboxes() for client in clients)))

    @property
    def worker_states(self) -> list[WorkerState]:
        """Every worker's health; one that died is replaced when the next rollout needs it."""
        return [client.slot.state for client in self._clients]

    @asynccontextmanager
    async def _choose_worker(self) -> AsyncIterator[tuple[_WorkerClient, WorkerHandle]]:
        """Yield the client with the fewest rollouts, which counts one more inside the block, and its live worker."""
        while True:
            client = self._least_loaded()
            client.episodes += 1
            try:
                if client.slot.live is None:
                    await client.slot.restart(timeout_s=_RESTART_WAIT_S)
                client.late = client.slot.restarting
                if (worker := client.slot.live) is not None:
                    yield client, worker
                    return
            finally:
                client.episodes -= 1
                self._replace_stuck()

    def _replace_stuck(self) -> None:
        """Replace the client of a stuck worker, and end the stuck one after its last rollout. Each index drains one
        client at a time: a successor that is stuck too waits for the end of the former."""
        for index, client in enumerate(self._clients):
            if client.stuck and index not in self._draining and not self._stopped:
                self._draining[index], self._clients[index] = client, self._make_client(index)
                self._clients[index].slot.begin_restart()
                self._former.append(client)
            if (stuck_client := self._draining.get(index)) is not None and not stuck_client.episodes:
                del self._draining[index]
                self._ending.append(asyncio.create_task(_stop_client(stuck_client), name=f"{stuck_client.name}-end"))

    def _least_loaded(self) -> _WorkerClient:
        """Return the client with the fewest rollouts among those that are live or likely to be restarted soon, or else
        among all. Restarts dead workers in the background. Raises WorkerDied where none is live and none can be
        started."""
        if self._stopped:
            raise EnvironmentDied("the workers of environments are stopped")
        if not any(client.slot.live for client in self._clients):
            slot = min((client.slot for client in self._clients), key=lambda slot: slot.failures)
            if slot.exhausted:
                raise slot.give_up(f"gave up after {_MAX_STARTS} starts; last: {slot.fault}") from slot.fault
        for client in self._clients:
            if client.slot.live is None:
                client.slot.begin_restart()
        sound_clients = [
            client
            for client in self._clients
            if client.slot.live is not None or not (client.slot.failures > 1 or client.late)
        ]
        return min(sound_clients or self._clients, key=lambda candidate: candidate.episodes)


def _shares(sandbox: SandboxConfig, workers: int) -> list[SandboxConfig]:
    """Return the workers' shares of ``live`` and ``starts`` in ``sandbox``: at least 1 each, which exceeds a total
    that is below the number of workers (runs with sandboxes refuse such a ``live``)."""

    def share(of: int, worker: int) -> int:
        return max(1, of // workers + (worker < of % workers))

    return [
        sandbox.model_copy(update={"live": share(sandbox.live, index), "starts": share(sandbox.starts, index)})
        for index in range(workers)
    ]


async def _stop_client(client: _WorkerClient) -> None:
    """Stop a worker without rollouts, after a last request for its sandbox statistics."""
    await client.sandboxes()
    await client.slot.stop(_STOP_GRACE_S)


async def _end_rollout(lease: WorkerLease) -> None:
    try:
        await lease.end()
    except EnvironmentDied:
        return  # the rollout ended with its worker
