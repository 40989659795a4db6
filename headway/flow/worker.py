"""`Worker`, the base class of a workflow's stages, and `DeviceTurns`, a worker's side of its device lock."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import msgspec

from headway.records.errors import ConfigurationError
from headway.runtime.stalls.watchdog import Watchdog

if TYPE_CHECKING:
    from headway.runtime.child import WorkerContext


_MAX_TURN_RECORDS = 1024  # turns that are kept between two readings


class WorkerPlacement(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's position in its workflow's plan: its stage, rank, device and chunk size."""

    stage: str
    rank: int
    world_size: int
    device: str
    chunk: int | None = None  # items that the worker takes at once under the plan; None: all
    shares: bool = False  # other stages use its devices too

    @property
    def name(self) -> str:
        return f"{self.stage}-{self.rank}"


class Host(Protocol):
    """The process of a worker, as the worker sees it."""

    placement: WorkerPlacement
    turns: DeviceTurns
    ending: bool

    @property
    def name(self) -> str: ...
    @property
    def context(self) -> WorkerContext: ...
    async def send(self, message: Any, to: str, tag: str) -> None: ...
    async def recv(self, source: str, tag: str) -> Any: ...
    async def ask_driver(self, method: str, *arguments: Any) -> Any: ...


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn of a worker. Times are readings of its machine's monotonic clock."""

    items: int  # items that the worker got since its previous turn
    busy_s: float
    start_s: float
    end_s: float
    peak_bytes: int = 0  # largest memory allocated on a GPU; 0: not measured


class Traffic(msgspec.Struct, kw_only=True):
    """Items, or messages, from one stage to another."""

    count: int = 0
    size_bytes: int = 0

    def add(self, size_bytes: int, count: int = 1) -> None:
        self.count += count
        self.size_bytes += size_bytes


class StageTimes(msgspec.Struct, kw_only=True):
    """Times of one worker since the last reading, in seconds, and counts of its items and turns."""

    busy_s: float = 0.0  # in its turns and in plain methods, without its waits there
    data_wait_s: float = 0.0  # waits for items, messages, or space in a channel
    device_wait_s: float = 0.0  # waits for its devices, without onloading and offloading
    switch_s: float = 0.0  # onloading and offloading of the worker itself
    transfer_s: float = 0.0  # transfer of the items that it got and put
    items: int = 0  # items that it got
    turns: int = 0
    each: list[Turn] = []  # single turns, up to a limit
    sent: dict[str, Traffic] = {}  # messages, by the stage that received them
    device_bytes: int = 0  # memory of the GPU; 0: not measured


class Worker:
    """A stage's worker: one object in its own process, on the devices that the plan gives it.

    Its methods are called through a `WorkerGroup`, one call at a time. An ``async`` method may wait for channels and
    messages, and computes inside ``async with self.turn()``; a plain method holds its devices throughout.

    Stages that share devices under the plan take turns: a worker holds the devices inside ``turn()``, releases them
    when another stage that has its input requests them while this one waits (for an item, for space in a channel, for a
    message, or at the turn's end), and gets them back before it continues. ``offload``, if the class has it, then frees
    the devices' memory, and ``onload`` restores it; both may be ``async``.

    A plan that changes during the run moves a stage to other devices by building new workers there. Their
    ``restore(state)`` is called with what the old workers' ``state()`` returned; a class without these two methods
    isn't moved, unless it declares ``stateless = True``. A worker that replaces a dead one is given the last step's
    state.

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
        """The worker's name, STAGE-RANK: unique in the workflow; its log and every error have it."""
        return self._host.name

    @property
    def stage(self) -> str:
        return self._host.placement.stage

    @property
    def rank(self) -> int:
        """The worker's number in its group, from 0."""
        return self._host.placement.rank

    @property
    def world_size(self) -> int:
        """The number of workers in its group."""
        return self._host.placement.world_size

    @property
    def context(self) -> WorkerContext:
        """The worker's process (name, device, log), which Headway's own services take as their first argument."""
        return self._host.context

    @property
    def device(self) -> str:
        """The device, as the plan names it: ``cpu:0``, ``cuda:1``, ``NODE/cuda:0``."""
        return str(self._host.placement.device)

    @property
    def chunk(self) -> int | None:
        """Items that the worker takes at once under the plan; None: all of them."""
        return self._host.placement.chunk

    @property
    def run_id(self) -> str:
        """A name that is unique among the processes of this machine, for weights that a trainer publishes."""
        return f"flow-{self.name}-{os.getpid()}"

    @property
    def log(self) -> logging.Logger:
        return self._host.context.log

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Hold the devices inside the block. This costs nothing when no other stage shares them."""
        return self._host.turns.turn()

    def limited(self, seconds: float) -> Watchdog:
        """End this process if the block takes longer than ``seconds``, or up to a tenth more; with ``as watchdog``,
        ``watchdog.restart()`` begins that time again, for the next of many short steps. The stack of the step is in the
        log, the event and the error; the worker is restarted as after any death. There is one such block at a time, and
        it must not wait for items, messages or devices.

        Example: ``with self.limited(60.0): observations = simulator.step(actions)``."""
        return Watchdog(seconds)

    async def send(self, message: Any, to: str, tag: str = "") -> None:
        """Send a message directly to the worker ``to`` (STAGE-RANK); waits while its inbox is full. Raises
        WorkerDied."""
        await self._host.send(message, to, tag)

    async def recv(self, source: str, tag: str = "") -> Any:
        """Wait for the next message of another worker with this ``tag``. Raises WorkerDied."""
        return await self._host.recv(source, tag)


class DeviceTurns:
    """A worker's side of its device lock, and its measurement of busy and waiting time.

    Lifecycle: *without* the devices -> *requesting* -> *holding* them, also between turns -> *recalled* by another
    stage that requests them -> *without*, as soon as it waits. All methods run in the event loop of the worker.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self.holds_devices = False  # the worker holds its devices until it releases them
        self.times = StageTimes()
        self._turn_lock = asyncio.Lock()  # turns of several tasks run one after the other
        self._task: asyncio.Task[Any] | None = None  # the task that is in its turn
        self._waits: dict[asyncio.Task[Any], str] = {}  # reason of each task's wait
        self._acquiring: asyncio.Task[None] | None = None  # request for the devices
        self._releasing: asyncio.Task[None] | None = None  # releases devices that a cancelled task had requested
        self._recalled = False
        self._computing_since_s = 0.0  # time since which the task in its turn computes
        self._data_waits, self._data_wait_since_s = 0, 0.0  # tasks that wait for data; time since which there is one
        self._last_totals = (0, 0.0)  # items and busy seconds at the end of the previous turn

    @property
    def waits_for(self) -> str:
        """The reasons of the worker's waits, as text; empty when it computes, or has nothing to do."""
        if self._task is not None and self._task not in self._waits:
            return ""
        return " and ".join(dict.fromkeys(self._waits.values()))

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """See `Worker.turn`."""
        task = _current_task()
        if self._task is task:
            raise ConfigurationError(f"{self._host.name}: turns can't be nested; the outer one already has the devices")
        async with self._turn_lock:
            await self._acquire(task)
            self._task = task
            self.times.turns += 1
            self._computing_since_s = began_s = time.monotonic()
            try:
                yield
            finally:
                self._stop_computing()
                self._task = None
                if len(self.times.each) < _MAX_TURN_RECORDS:
                    items, busy_s = self.times.items - self._last_totals[0], self.times.busy_s - self._last_totals[1]
                    end_s = time.monotonic()
                    peak_bytes, self.times.device_bytes = _gpu_memory()
                    turn = Turn(items=items, busy_s=busy_s, start_s=began_s, end_s=end_s, peak_bytes=peak_bytes)
                    self.times.each.append(turn)
                self._last_totals = (self.times.items, self.times.busy_s)
                await self._release_if_recalled()

    @asynccontextmanager
    async def waiting(self, reason: str) -> AsyncIterator[None]:
        """Register the block as a wait for ``reason``. If the task in its turn waits, the devices may be released
        meanwhile, and are held again at the block's end."""
        task = _current_task()
        in_turn = self._task is task
        if in_turn:
            self._stop_computing()
        if not self._data_waits:
            self._data_wait_since_s = time.monotonic()
        self._data_waits += 1
        self._waits[task] = reason
        try:
            await self._release_if_recalled()
            yield
        finally:
            self._waits.pop(task, None)
            self._data_waits -= 1
            if not self._data_waits:
                self.times.data_wait_s += time.monotonic() - self._data_wait_since_s
            if in_turn:
                with contextlib.suppress(BaseException) if self._host.ending else contextlib.nullcontext():
                    await self._acquire(task)
                self._computing_since_s = time.monotonic()

    @contextmanager
    def transferring(self) -> Iterator[None]:
        """Count the block as transfer, not as computing."""
        in_turn, started_s = self._task is _current_task(), time.monotonic()
        if in_turn:
            self._stop_computing()
        try:
            yield
        finally:
            self.times.transfer_s += time.monotonic() - started_s
            if in_turn:
                self._computing_since_s = time.monotonic()

    async def recall(self) -> None:
        """Release the devices now, or at the next wait: another stage requests them."""
        self._recalled = True
        await self._release_if_recalled()

    async def take_times_threadsafe(self) -> StageTimes:
        """Run `take_times`, for a caller in another thread's loop."""
        return self.take_times()

    def take_times(self) -> StageTimes:
        """Return the times since the last call, and reset them."""
        taken_times, self.times, self._last_totals = self.times, StageTimes(), (0, 0.0)
        return taken_times

    def _stop_computing(self) -> None:
        self.times.busy_s += time.monotonic() - self._computing_since_s

    async def _acquire(self, task: asyncio.Task[Any]) -> None:
        """Wait for the devices. A task that is cancelled meanwhile leaves them to the next turn, or to another stage
        that requests them."""
        started_s, switched_s = time.monotonic(), self.times.switch_s
        while (
            not self.holds_devices and self._host.placement.shares
        ):  # a recall may come between the grant and this task's resumption
            if self._acquiring is None or self._acquiring.done():
                self._acquiring = asyncio.create_task(self._request_devices(), name="requests its devices")
            self._waits[task] = f"its devices ({self._host.placement.device})"
            try:
                await asyncio.shield(self._acquiring)
            except asyncio.CancelledError:
                self._acquiring.add_done_callback(self._release_unused)
                raise
            finally:
                self._waits.pop(task, None)
        self.times.device_wait_s += time.monotonic() - started_s - (self.times.switch_s - switched_s)

    async def _request_devices(self) -> None:
        self._recalled = False  # a recall that comes before the answer stays
        await self._host.ask_driver("acquire", self._host.name)
        self.holds_devices = True

    def _release_unused(self, asked: asyncio.Task[None]) -> None:
        """Release the devices that a cancelled task requested, if they were recalled meanwhile."""
        if not asked.cancelled() and asked.exception() is None:
            self._releasing = asyncio.create_task(self._release_if_recalled(), name="releases its devices")

    async def _release_if_recalled(self) -> None:
        is_computing = self._task is not None and self._task not in self._waits
        if self._recalled and self.holds_devices and not is_computing:
            self.holds_devices = self._recalled = False
            await self._host.ask_driver("release", self._host.name)


def _gpu_memory() -> tuple[int, int]:
    """Return the largest allocation on this process's GPU since the last call, and the GPU's memory; 0, 0 without."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0, 0
    peak_bytes = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak_bytes, torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task
