"""`Worker`: the base class of a workflow's stages, and what it can do inside its process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import msgspec

from headway.records.errors import ConfigurationError

if TYPE_CHECKING:
    from headway.runtime.child import WorkerContext


_MOST_TURNS = 1024  # that are kept between two readings


class WorkerPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker stands in its workflow."""

    stage: str
    rank: int
    world_size: int
    device: str
    chunk: int | None = None  # items that the plan has it take at once; None: all
    shares: bool = False  # its devices are other stages' too

    @property
    def name(self) -> str:
        return f"{self.stage}-{self.rank}"


class Host(Protocol):
    """The process of a worker, as the worker sees it."""

    place: WorkerPlace
    turns: Turns
    ending: bool

    @property
    def name(self) -> str: ...
    @property
    def context(self) -> WorkerContext: ...
    async def send(self, message: Any, to: str, tag: str) -> None: ...
    async def recv(self, source: str, tag: str) -> Any: ...
    async def ask_driver(self, method: str, *arguments: Any) -> Any: ...


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn of a worker. Times are of its machine's monotonic clock."""

    items: int  # got since the turn before
    busy_s: float
    start_s: float
    end_s: float


class StageTimes(msgspec.Struct, kw_only=True):
    """Seconds of one worker, since the last reading."""

    busy_s: float = 0.0  # in its turns, and in plain methods, without what it waited there
    data_wait_s: float = 0.0  # for items, messages, or places in a channel
    device_wait_s: float = 0.0  # for its devices, their on- and offloading left out
    switch_s: float = 0.0  # on- and offloading, its own
    transfer_s: float = 0.0  # of what it got and put
    items: int = 0  # got
    turns: int = 0
    each: list[Turn] = []  # turns, up to a limit


class Worker:
    """A stage's worker: one object in a process of its own, on the devices that the plan gives it.

    Its methods are called through a `WorkerGroup`, one call at a time. An ``async`` method may wait for channels and
    messages, and computes inside ``async with self.turn()``; a plain one has its devices throughout.

    Where the plan gives its devices to other stages too, they take turns: a worker has the devices inside ``turn()``,
    gives them up when another stage that has its input wants them and this one waits (for an item, a place in a
    channel, a message, or at the turn's end), and has them back before it goes on. ``offload`` then frees the devices'
    memory, if the class has it, and ``onload`` brings it back; both may be ``async``.

    A plan that changes during the run moves a stage to other devices by building new workers there. They are given what
    the old ones' ``state()`` returned by ``restore(state)``; a class without these two is left where it is, unless it
    says that it keeps nothing: ``stateless = True``. A worker that replaces a dead one is given the last step's state.

    Example::

        class Score(Worker):
            def __init__(self, model: str) -> None:
                self.model = load(model, self.device)

            async def run(self, answers: Channel, scores: Channel) -> None:
                async for chunk in answers.chunks():
                    async with self.turn():
                        scored = self.model(chunk)
                    await scores.put_all(scored)
    """

    stateless: ClassVar[bool] = False

    _host: Host  # set before __init__ runs

    @property
    def name(self) -> str:
        """STAGE-RANK: unique in the workflow; names its log and every error."""
        return self._host.name

    @property
    def stage(self) -> str:
        return self._host.place.stage

    @property
    def rank(self) -> int:
        """Its number in its group, from 0."""
        return self._host.place.rank

    @property
    def world_size(self) -> int:
        """The number of workers in its group."""
        return self._host.place.world_size

    @property
    def context(self) -> WorkerContext:
        """Its process: name, device, log; what Headway's own services take as their first argument."""
        return self._host.context

    @property
    def device(self) -> str:
        """The device, as the plan names it: ``cpu:0``, ``cuda:1``, ``NODE/cuda:0``."""
        return str(self._host.place.device)

    @property
    def chunk(self) -> int | None:
        """Items that the plan has it take at once; None: all of them."""
        return self._host.place.chunk

    @property
    def run_id(self) -> str:
        """A name that no other process of this machine has: for what a trainer publishes."""
        return f"flow-{self.name}-{os.getpid()}"

    @property
    def log(self) -> logging.Logger:
        return self._host.context.log

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Have the devices inside the block. Where nobody shares them that costs nothing."""
        return self._host.turns.turn()

    async def send(self, message: Any, to: str, tag: str = "") -> None:
        """Send a message to another worker (STAGE-RANK), directly; returns when there is room. Raises WorkerDied."""
        await self._host.send(message, to, tag)

    async def recv(self, source: str, tag: str = "") -> Any:
        """Wait for the next message of another worker with this ``tag``. Raises WorkerDied."""
        return await self._host.recv(source, tag)


class Turns:
    """A worker's side of the lock of its devices, and its clock of busy and waiting time.

    Lifecycle: *without* the devices -> *asks* -> *has* them, and keeps them between turns -> *recalled* by another
    stage that wants them -> *without*, as soon as it waits. All methods run in the event loop of the worker.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self.has = False  # the devices are its own until it gives them up
        self.times = StageTimes()
        self._one = asyncio.Lock()  # turns of several tasks come one after the other
        self._task: asyncio.Task[Any] | None = None  # that is in its turn
        self._waits: dict[asyncio.Task[Any], str] = {}  # what tasks wait for
        self._asking: asyncio.Task[None] | None = None  # for the devices
        self._releasing: asyncio.Task[None] | None = None  # what a cancelled task had asked for
        self._recalled = False
        self._computes_s = 0.0  # since when the task in its turn computes
        self._data_waits, self._data_wait_since_s = 0, 0.0  # tasks that wait for data, and since when there is any
        self._before = (0, 0.0)  # items and busy seconds at the end of the turn before

    @property
    def waits_for(self) -> str:
        """The waits of the worker, in words; empty: it computes, or has nothing to do."""
        if self._task is not None and self._task not in self._waits:
            return ""
        return " and ".join(dict.fromkeys(self._waits.values()))

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """See `Worker.turn`."""
        task = _current_task()
        if self._task is task:
            raise ConfigurationError(f"{self._host.name}: a turn inside a turn; the outer one has the devices already")
        async with self._one:
            await self._acquire(task)
            self._task = task
            self.times.turns += 1
            self._computes_s = began_s = time.monotonic()
            try:
                yield
            finally:
                self._stop_computing()
                self._task = None
                if len(self.times.each) < _MOST_TURNS:
                    items, busy_s = self.times.items - self._before[0], self.times.busy_s - self._before[1]
                    end_s = time.monotonic()
                    self.times.each.append(Turn(items=items, busy_s=busy_s, start_s=began_s, end_s=end_s))
                self._before = (self.times.items, self.times.busy_s)
                await self._give_up_if_wanted()

    @asynccontextmanager
    async def waiting(self, what: str) -> AsyncIterator[None]:
        """Register the block as a wait for ``what``. If it is the task in its turn that waits, the devices may go
        meanwhile, and are back at the block's end."""
        task = _current_task()
        mine = self._task is task
        if mine:
            self._stop_computing()
        if not self._data_waits:
            self._data_wait_since_s = time.monotonic()
        self._data_waits += 1
        self._waits[task] = what
        try:
            await self._give_up_if_wanted()
            yield
        finally:
            self._waits.pop(task, None)
            self._data_waits -= 1
            if not self._data_waits:
                self.times.data_wait_s += time.monotonic() - self._data_wait_since_s
            if mine:
                with contextlib.suppress(BaseException) if self._host.ending else contextlib.nullcontext():
                    await self._acquire(task)
                self._computes_s = time.monotonic()

    @contextmanager
    def transferring(self) -> Iterator[None]:
        """Count the block as transfer, not as computing."""
        mine, started = self._task is _current_task(), time.monotonic()
        if mine:
            self._stop_computing()
        try:
            yield
        finally:
            self.times.transfer_s += time.monotonic() - started
            if mine:
                self._computes_s = time.monotonic()

    async def recall(self) -> None:
        """Somebody wants the devices."""
        self._recalled = True
        await self._give_up_if_wanted()

    async def taken(self) -> StageTimes:
        """`take`, for another thread's loop."""
        return self.take()

    def take(self) -> StageTimes:
        """The times since the last call."""
        taken, self.times, self._before = self.times, StageTimes(), (0, 0.0)
        return taken

    def _stop_computing(self) -> None:
        self.times.busy_s += time.monotonic() - self._computes_s

    async def _acquire(self, task: asyncio.Task[Any]) -> None:
        """Return with the devices. A task that is cancelled meanwhile leaves them to the next turn, or to another stage
        that wants them."""
        started, switched_s = time.monotonic(), self.times.switch_s
        while (
            not self.has and self._host.place.shares
        ):  # a recall may come between the grant and this task's resumption
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._ask(), name="asks for its devices")
            self._waits[task] = f"its devices ({self._host.place.device})"
            try:
                await asyncio.shield(self._asking)
            except asyncio.CancelledError:
                self._asking.add_done_callback(self._unused)
                raise
            finally:
                self._waits.pop(task, None)
        self.times.device_wait_s += time.monotonic() - started - (self.times.switch_s - switched_s)

    async def _ask(self) -> None:
        self._recalled = False  # a recall that comes before the answer stays
        await self._host.ask_driver("acquire", self._host.name)
        self.has = True

    def _unused(self, asked: asyncio.Task[None]) -> None:
        """Release what a cancelled task asked for, if it is wanted by now."""
        if not asked.cancelled() and asked.exception() is None:
            self._releasing = asyncio.create_task(self._give_up_if_wanted(), name="releases its devices")

    async def _give_up_if_wanted(self) -> None:
        computes = self._task is not None and self._task not in self._waits
        if self._recalled and self.has and not computes:
            self.has = self._recalled = False
            await self._host.ask_driver("release", self._host.name)


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task
