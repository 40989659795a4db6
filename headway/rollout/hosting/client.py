"""The pool of workers that run environments: which rollout is played where, and what a dead worker means."""

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
from headway.runtime.devices import every_core_in_turn
from headway.runtime.fork_server import SCORING
from headway.runtime.worker_slots import WorkerSlot, start_all, stop_all
from headway.runtime.workers import EventCallback, Launcher, WorkerHandle, WorkerSpec

_FACTORY = "headway.rollout.hosting.service:EnvironmentService"
_STOP_GRACE_S = 25.0  # sandboxes end in that time
_STUCK_S = 300.0  # that a worker which should have answered long since has to show that its loop turns
_STARTS = 5  # in a row that came to nothing; when no seat has had fewer, and none lives, the run is over
_SOON_S = 30.0  # that a rollout waits for one worker's start, until it goes where another lives
_LOOK_S = 2.0  # for a look at a worker's sandboxes; one that is busy is taken to be as it was


class EnvironmentDied(HeadwayError):
    """Raised where the worker that a rollout was played in has died, and its sandbox with it."""


class _Seat:
    """A worker's slot: its requests, and their answers."""

    def __init__(
        self, spec: WorkerSpec, launcher: Launcher, clock: Clock, on_event: EventCallback, on_stuck: Callable[[], None]
    ) -> None:
        self.episodes = 0
        self.stuck = False  # a thread of the worker can't be had back
        self._on_event, self._on_stuck = on_event, on_stuck
        self.slot = WorkerSlot(
            spec, launcher, clock, on_event, limit=_STARTS, prepare=self._take, held=lambda: self.episodes
        )
        self.name = spec.name
        self.late = False  # its start takes long
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._seen = SandboxStatistics()  # of the worker, at the last look
        self._gone = SandboxStatistics()  # counted by those that died

    async def _take(self, worker: WorkerHandle) -> None:
        self._gone = SandboxStatistics.total([self._gone, self._seen.counted()])
        self._seen = SandboxStatistics()  # the new one counts from zero
        self.stuck = False
        self._reader = asyncio.create_task(self._read(worker), name=f"{self.name}-events")

    async def ask(self, worker: WorkerHandle, method: str, *arguments: Any) -> tuple[Any, float]:
        """The worker's answer to a request, and the seconds for which it had that. Raises EnvironmentDied; RuntimeError
        with its traceback for a bug in it."""
        self.slot.forgive()  # should it die of this, it is the rollout's doing, which isn't tried for ever
        return await self._submit(worker, "submit", method, arguments)

    async def answers(self, worker: WorkerHandle) -> bool:
        """Whether the worker's event loop still turns; raises EnvironmentDied."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STUCK_S):
                await self._submit(worker, "submit_sandboxes")
                return True
        return False

    async def sandboxes(self) -> SandboxStatistics:
        """Sandbox statistics of this seat's worker and its predecessors."""
        worker = self.slot.live
        if worker is not None:
            with contextlib.suppress(EnvironmentDied, TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    seen, _ = await self._submit(worker, "submit_sandboxes")
                if worker is self.slot.worker:
                    self._seen = seen
        return SandboxStatistics.total([self._gone, self._seen if self.slot.live else self._seen.counted()])

    async def _submit(self, worker: WorkerHandle, method: str, *arguments: Any) -> tuple[Any, float]:
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            await worker.call(method, number, *arguments)
            # A request has its method and the rollout's name first, a look at the sandboxes neither.
            request, rollout = (arguments[0], arguments[1][0]) if arguments else ("sandboxes", "")
            waiter = f"rollout {rollout}" if rollout else "the orchestrator"
            with worker.waits.on(f"environment.{request}", self.name, waiter):
                return await answer
        except WorkerDied as error:
            raise EnvironmentDied(f"{self.name} died: {error.cause}") from None
        finally:
            self._waiting.pop(number, None)

    async def _read(self, worker: WorkerHandle) -> None:
        """Consumes the worker's answers, waits for them, is unblocked by its death."""
        try:
            while True:
                number, well, value, seconds = await worker.events.get()
                if number == WORKER_EVENT:
                    name, what, data = value
                    self._on_event(name, f"{self.name}: {what}", worker=self.name, **data)
                    if name == "tool_stuck":
                        self.stuck = True
                        self._on_stuck()
                    continue
                answer = self._waiting.get(number)
                if answer is None or answer.done():
                    continue  # nobody waits for it any more
                if well:
                    answer.set_result((value, seconds))
                else:
                    answer.set_exception(RuntimeError(value))
        except QueueClosed:
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(EnvironmentDied(f"{self.name} died: {worker.died.result().cause}"))


class WorkerLease:
    """A rollout's handle on the worker it is played in."""

    def __init__(self, seat: _Seat, worker: WorkerHandle, name: str, limit_s: float) -> None:
        """``limit_s``: after so long without an answer the worker is checked for being stuck."""
        self._seat = seat
        self._worker = worker
        self._name = name
        self._limit_s = limit_s
        self.working_s = 0.0  # that the worker had its answers, until it had replied to them and scored them
        self._unheard = False  # a park whose answer nobody waited for

    async def begin(self, task: Task, seed: int) -> Reply:
        return self._on_our_clock(await self._ask("begin", task, seed))

    async def restore(
        self, task: Task, saved: EnvironmentState, asked: NextTurn, messages: Mapping[str, Sequence[dict[str, Any]]]
    ) -> Failure | None:
        return await self._ask("restore", task, saved, asked, dict(messages))

    async def reply(self, message: Mapping[str, Any], speaker: str, cut: bool) -> Reply:
        return self._on_our_clock(await self._ask("reply", dict(message), speaker, cut))

    async def score(self) -> EpisodeScore:
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

    def _on_our_clock(self, reply: Reply) -> Reply:
        """The reply of a worker, whose machine may be another."""
        if not (shift_s := self._worker.clock_offset_s):
            return reply
        moved = [
            msgspec.structs.replace(one, start_s=one.start_s + shift_s, end_s=one.end_s + shift_s)
            for one in reply.tool_times
        ]
        return msgspec.structs.replace(reply, tool_times=tuple(moved))

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
            result, seconds = asking.result()
            if method in ("reply", "score"):
                self.working_s += seconds
            return result
        finally:
            asking.cancel()


class EnvironmentPool:
    """``environment.workers`` processes, each with its share of the sandboxes.

    A rollout is played in one of them, the one with the fewest. A worker that dies takes its rollouts along: each of
    their calls raises EnvironmentDied, and the next rollout starts another worker. While that can't be started,
    rollouts go to the others, and it is tried again, ever more rarely. When none is left, ``seated`` raises WorkerDied.
    One with a stuck thread gets no further rollout: a successor takes its place, and it ends when its own are over.
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
        """``sandboxes``: what makes a worker's pool of them, ``module:function``; ``snapshots``: the folder of parked
        ones. ``on_event`` receives deaths, restarts and losses of workers."""
        self._environment = environment
        self._clock = clock
        arguments = {
            "environment": environment.model_dump(),
            "sandboxes": sandboxes,
            "run": run,
            "snapshots": str(snapshots) if snapshots else "",
            "seed": seed,
        }
        shares, numbers = _shares(sandbox, environment.workers), itertools.count()

        def seat(place: int) -> _Seat:
            number = next(numbers)
            spec = WorkerSpec(
                name=f"environment-{number}",
                factory=_FACTORY,
                arguments={**arguments, "sandbox": shares[place].model_dump()},
                device=every_core_in_turn(environment.nodes, place),
                preload=SCORING,  # as verifiers
                log_path=str(log_folder / f"environment-{number}.log") if log_folder else None,
            )
            return _Seat(spec, launcher, clock, on_event, self._renew)

        self._seat = seat
        self._seats = [seat(place) for place in range(environment.workers)]
        self._leaving: dict[int, _Seat] = {}  # stuck ones that still have rollouts, by their place
        self._former: list[_Seat] = []  # they, and those that had
        self._ending: list[asyncio.Task[None]] = []
        most = environment.concurrency
        self._places = asyncio.Semaphore(most) if most else contextlib.nullcontext()
        self._stopped = False

    async def start(self) -> None:
        """Start all workers. Raises ConfigurationError for an environment that can't be had."""
        try:
            await start_all([seat.slot for seat in self._seats])
        except BaseException:
            await self.stop()
            raise

    @asynccontextmanager
    async def seated(self, name: str) -> AsyncIterator[WorkerLease]:
        """Yield a lease for rollout ``name`` once there is a place and it may begin; the rollout ends with the block.
        Raises EnvironmentDied; WorkerDied when no worker can be started any more."""
        async with self._places, self._chosen() as (seat, worker):
            seated = WorkerLease(seat, worker, name, self._environment.timeout_s)
            try:
                yield seated
            finally:
                if worker.alive:
                    await asyncio.shield(asyncio.ensure_future(_ended(seated)))

    async def stop(self) -> None:
        """End all workers, the rollouts in them and their sandboxes."""
        self._stopped = True
        await stop_all([seat.slot for seat in (*self._seats, *self._former)], _STOP_GRACE_S)
        await asyncio.gather(*self._ending)

    async def sandboxes(self) -> SandboxStatistics:
        """All workers' sandboxes, counted since the pool was started: no counter goes back when a worker dies. Empty
        where the environment uses none."""
        seats = (*self._seats, *self._former)
        return SandboxStatistics.total(await asyncio.gather(*(seat.sandboxes() for seat in seats)))

    @property
    def worker_states(self) -> list[WorkerState]:
        """Every worker's health; one that died is replaced when the next rollout needs it."""
        return [seat.slot.state for seat in self._seats]

    @asynccontextmanager
    async def _chosen(self) -> AsyncIterator[tuple[_Seat, WorkerHandle]]:
        """The seat with the fewest rollouts, counted there inside the block, and its live worker."""
        while True:
            seat = self._best()
            seat.episodes += 1
            try:
                if seat.slot.live is None:
                    await seat.slot.restart(timeout_s=_SOON_S)
                seat.late = seat.slot.restarting
                if (worker := seat.slot.live) is not None:
                    yield seat, worker
                    return
            finally:
                seat.episodes -= 1
                self._renew()

    def _renew(self) -> None:
        """Give the seat of a stuck worker to a successor, and end the stuck one once its rollouts are over. One at a
        time for each seat: a successor that is stuck too waits for that."""
        for place, seat in enumerate(self._seats):
            if seat.stuck and place not in self._leaving and not self._stopped:
                self._leaving[place], self._seats[place] = seat, self._seat(place)
                self._seats[place].slot.begin_restart()
                self._former.append(seat)
            if (old := self._leaving.get(place)) is not None and not old.episodes:
                del self._leaving[place]
                self._ending.append(asyncio.create_task(_end(old), name=f"{old.name}-end"))

    def _best(self) -> _Seat:
        """The seat with the fewest rollouts among those that live, or are likely to be back soon; among all where there
        is none. Restarts dead workers in the background. Raises WorkerDied where none lives and none can be started."""
        if self._stopped:
            raise EnvironmentDied("the workers of environments are stopped")
        if not any(seat.slot.live for seat in self._seats):
            seat = min(self._seats, key=lambda one: one.slot.failures)
            if seat.slot.exhausted:
                raise seat.slot.give_up(f"gave up after {_STARTS} starts; last: {seat.slot.fault}") from seat.slot.fault
        for seat in self._seats:
            if seat.slot.live is None:
                seat.slot.begin_restart()
        sound = [
            seat for seat in self._seats if seat.slot.live is not None or not (seat.slot.failures > 1 or seat.late)
        ]
        return min(sound or self._seats, key=lambda one: one.episodes)


def _shares(sandbox: SandboxConfig, workers: int) -> list[SandboxConfig]:
    """The workers' shares of ``live`` and ``starts`` in ``sandbox``: at least 1 each, which exceeds the total if that
    is less than the workers (runs with sandboxes refuse such a ``live``)."""

    def share(of: int, worker: int) -> int:
        return max(1, of // workers + (worker < of % workers))

    return [
        sandbox.model_copy(update={"live": share(sandbox.live, worker), "starts": share(sandbox.starts, worker)})
        for worker in range(workers)
    ]


async def _end(seat: _Seat) -> None:
    """End a worker without rollouts, after a last look at its sandboxes."""
    await seat.sandboxes()
    await seat.slot.stop(_STOP_GRACE_S)


async def _ended(seated: WorkerLease) -> None:
    try:
        await seated.end()
    except EnvironmentDied:
        return  # with all that was in it
