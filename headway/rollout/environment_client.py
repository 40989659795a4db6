"""The workers that environments live in, behind one handle: who plays where, and what a dead worker means."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headway.config.endpoint import Environment
from headway.config.sandbox import Sandbox
from headway.records.environment import Asked, EnvironmentState, Reply, Scored
from headway.records.errors import ConfigurationError, HeadwayError, RemoteError, WorkerDied
from headway.records.rollout import Failure
from headway.records.sandbox_statistics import SandboxStatistics
from headway.records.task import Task
from headway.records.trace import WorkerState
from headway.runtime.channel import ChannelClosed
from headway.runtime.clock import Clock
from headway.runtime.devices import every_core
from headway.runtime.workers import Launcher, Worker, WorkerSpec

_FACTORY = "headway.rollout.environment_service:EnvironmentService"
_STOP_GRACE_S = 25.0  # sandboxes end in that time
_STUCK_S = 300.0  # that a worker which should have answered long since has to show that its loop turns
_LOOK_S = 2.0  # for a look at a worker's sandboxes; one that is busy is taken to be as it was


class EnvironmentDied(HeadwayError):
    """The worker that a rollout was played in is gone, and its sandbox with it."""


class _Seat:
    """One worker: its requests, and what became of them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.worker: Worker | None = None
        self.episodes = 0
        self.restarts = -1
        self.starting = asyncio.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._seen = SandboxStatistics()  # of the worker, at the last look
        self._gone = SandboxStatistics()  # counted by those that died

    def take(self, worker: Worker) -> None:
        self._gone = SandboxStatistics.total([self._gone, self._seen.counted()])
        self._seen = SandboxStatistics()  # the new one counts from zero
        self.worker = worker
        self.restarts += 1
        self._reader = asyncio.create_task(self._read(worker), name=f"{self.name}-events")

    async def ask(self, worker: Worker, method: str, *arguments: Any) -> Any:
        """Raises EnvironmentDied; RuntimeError with the worker's traceback for a fault of ours."""
        return await self._submit(worker, "submit", method, arguments)

    async def answers(self, worker: Worker) -> bool:
        """Whether it does anything at all; raises EnvironmentDied."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STUCK_S):
                await self._submit(worker, "submit_sandboxes")
                return True
        return False

    async def sandboxes(self) -> SandboxStatistics:
        """Of its worker, and of those before it."""
        worker = self.worker
        alive = worker is not None and worker.alive
        if worker is not None and alive:
            with contextlib.suppress(EnvironmentDied, TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    seen = await self._submit(worker, "submit_sandboxes")
                if worker is self.worker:
                    self._seen = seen
            alive = self.worker is not None and self.worker.alive
        return SandboxStatistics.total([self._gone, self._seen if alive else self._seen.counted()])

    async def _submit(self, worker: Worker, method: str, *arguments: Any) -> Any:
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            await worker.call(method, number, *arguments)
            return await answer
        except WorkerDied as error:
            raise EnvironmentDied(f"{self.name} died: {error.cause}") from None
        finally:
            self._waiting.pop(number, None)

    async def _read(self, worker: Worker) -> None:
        """Consumes the worker's answers, waits for them, is unblocked by its death."""
        try:
            while True:
                number, well, value = await worker.events.get()
                answer = self._waiting.get(number)
                if answer is None or answer.done():
                    continue  # nobody waits for it any more
                if well:
                    answer.set_result(value)
                else:
                    answer.set_exception(RuntimeError(value))
        except ChannelClosed:
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(EnvironmentDied(f"{self.name} died: {worker.died.result().cause}"))


class Seated:
    """One rollout in the worker it is played in."""

    def __init__(self, seat: _Seat, worker: Worker, name: str, limit_s: float) -> None:
        """``limit_s``: after so long without an answer it is seen whether its worker still does anything at all."""
        self._seat = seat
        self._worker = worker
        self._name = name
        self._limit_s = limit_s
        self._unheard = False  # a park whose answer nobody waited for

    async def begin(self, task: Task, seed: int) -> Reply:
        return await self._ask("begin", task, seed)

    async def restore(
        self, task: Task, saved: EnvironmentState, asked: Asked, messages: Mapping[str, Sequence[dict[str, Any]]]
    ) -> Failure | None:
        return await self._ask("restore", task, saved, asked, dict(messages))

    async def reply(self, message: Mapping[str, Any], speaker: str, cut: bool) -> Reply:
        return await self._ask("reply", dict(message), speaker, cut)

    async def score(self) -> Scored:
        return await self._ask("score")

    async def park(self) -> EnvironmentState | Failure:
        self._unheard = True
        kept = await self._ask("park")
        self._unheard = False
        return kept

    async def unpark(self) -> Failure | None:
        return await self._ask("unpark")

    async def end(self) -> None:
        await self._ask("end", self._unheard)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        asking = asyncio.ensure_future(self._seat.ask(self._worker, method, self._name, *arguments))
        asking.add_done_callback(lambda asked: asked.cancelled() or asked.exception())  # its caller may have gone
        try:
            while not asking.done():
                done, _ = await asyncio.wait((asking,), timeout=self._limit_s)
                if not done and not await self._seat.answers(self._worker):
                    took_s = self._limit_s + _STUCK_S
                    what = f"no answer to {method} in {took_s:g} s: an environment holds its worker up"
                    self._worker.kill(what)
                    raise EnvironmentDied(f"{self._seat.name} died: {what}")
            return asking.result()
        finally:
            asking.cancel()


class EnvironmentPool:
    """``environment.workers`` processes, each with its share of the sandboxes.

    A rollout is played in one of them, the one with the fewest. A worker that dies takes its rollouts along: each of
    their calls raises EnvironmentDied, and the next rollout starts another worker.
    """

    def __init__(
        self,
        launcher: Launcher,
        environment: Environment,
        sandbox: Sandbox,
        clock: Clock,
        *,
        sandboxes: str,
        run: str = "",
        snapshots: Path | None = None,
        seed: int = 0,
        device: str | None = None,
        log_folder: Path | None = None,
    ) -> None:
        """``sandboxes``: what makes a worker's pool of them, ``module:function``; ``snapshots``: the folder of parked
        ones."""
        self._launcher = launcher
        self._environment = environment
        self._share = sandbox.model_copy(
            update={
                "live": max(1, sandbox.live // environment.workers),
                "starts": max(1, sandbox.starts // environment.workers),
            }
        )
        self._clock = clock
        self._sandboxes = sandboxes
        self._run = run
        self._seed = seed
        self._snapshots = snapshots
        self._device = device
        self._log_folder = log_folder
        self._seats = [_Seat(f"environment-{index}") for index in range(environment.workers)]
        self._places = asyncio.Semaphore(environment.concurrency) if environment.concurrency else None
        self._next_start_s = 0.0
        self._stopped = False

    async def start(self) -> None:
        """Start all workers. Raises ConfigurationError for an environment that can't be had."""
        starts = (self._ready(seat) for seat in self._seats)
        for error in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(error, BaseException):
                await self.stop()
                raise error.__cause__ if isinstance(error.__cause__, ConfigurationError) else error

    @asynccontextmanager
    async def seated(self, name: str) -> AsyncIterator[Seated]:
        """A place for the rollout of this name, once there is one and it may begin; it ends with the block. Raises
        EnvironmentDied."""
        if self._places is not None:
            await self._places.acquire()
        try:
            await self._start_time()
            seat = min(self._seats, key=lambda one: one.episodes)
            seat.episodes += 1
            try:
                worker = await self._ready(seat)
                seated = Seated(seat, worker, name, self._environment.timeout_s)
                try:
                    yield seated
                finally:
                    if worker.alive:
                        await asyncio.shield(asyncio.ensure_future(_ended(seated)))
            finally:
                seat.episodes -= 1
        finally:
            if self._places is not None:
                self._places.release()

    async def stop(self) -> None:
        """End all workers, the rollouts in them and their sandboxes."""
        self._stopped = True
        workers = [seat.worker for seat in self._seats if seat.worker is not None]
        await asyncio.gather(*(worker.stop(_STOP_GRACE_S) for worker in workers))

    async def sandboxes(self) -> SandboxStatistics:
        """All workers' sandboxes, counted since the pool was started: no counter goes back when a worker dies. Empty
        where the environment uses none."""
        return SandboxStatistics.total(await asyncio.gather(*(seat.sandboxes() for seat in self._seats)))

    @property
    def worker_states(self) -> list[WorkerState]:
        """Every worker's health; one that died is replaced when the next rollout needs it."""
        return [
            WorkerState(
                name=seat.name,
                up=seat.worker is not None and seat.worker.alive,
                restarts=max(0, seat.restarts),
            )
            for seat in self._seats
        ]

    async def _start_time(self) -> None:
        """Wait for this start's turn."""
        rate = self._environment.starts_per_s
        if rate is None:
            return
        now = self._clock.now()
        at = max(now, self._next_start_s)
        self._next_start_s = at + 1 / rate
        if at > now:
            await self._clock.sleep(at - now)

    async def _ready(self, seat: _Seat) -> Worker:
        """The seat's live worker, started anew when it is dead. Raises EnvironmentDied."""
        async with seat.starting:
            if seat.worker is not None and seat.worker.alive:
                return seat.worker
            if self._stopped:
                raise EnvironmentDied(f"{seat.name} is stopped")
            spec = WorkerSpec(
                name=seat.name,
                factory=_FACTORY,
                arguments={
                    "environment": self._environment.model_dump(),
                    "sandbox": self._share.model_dump(),
                    "sandboxes": self._sandboxes,
                    "run": self._run,
                    "snapshots": str(self._snapshots) if self._snapshots else "",
                    "seed": self._seed,
                },
                device=self._device or every_core(),
                log_path=str(self._log_folder / f"{seat.name}.log") if self._log_folder else None,
            )
            first = seat.worker is None
            try:
                worker = await self._launcher.start(spec)
            except (WorkerDied, RemoteError, TimeoutError) as error:
                if first:
                    raise
                raise EnvironmentDied(f"{seat.name} could not be started again: {error}") from error
            seat.take(worker)
            return worker


async def _ended(seated: Seated) -> None:
    try:
        await seated.end()
    except EnvironmentDied:
        return  # with all that was in it
