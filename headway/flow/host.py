"""The process of a workflow's worker: builds the user's object, runs its methods, connects it to the others.

The process has four threads: the main one takes calls (`runtime/child.py`), one runs the user's methods in an event
loop that is always there, so that the devices can be given up between and inside calls, one serves the links to other
processes, so that a worker that computes keeps nobody waiting, and one answers health checks.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import os
import sys
import threading
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from headway.control.channel_state import ChannelStatistics
from headway.flow.channel import ChannelClosed
from headway.flow.paths import PayloadRef, PeerAddress, PeerSettings
from headway.flow.peers import Hub
from headway.flow.process import enter, put_in_parts
from headway.flow.worker import StageTimes, Turns, Worker, WorkerPlace
from headway.records.errors import ConfigurationError, RemoteError
from headway.runtime.child import WorkerContext, resolve
from headway.runtime.worker_slots import own_cause

T = TypeVar("T")
_FREED_BYTES = 1 << 20  # an offload that frees less frees nothing


class CallReport(msgspec.Struct, frozen=True, kw_only=True):
    """A call's result."""

    value: Any
    seconds: float


class WorkerHost:
    """The worker object of a flow worker's process: see the module's text."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        place: WorkerPlace,
        driver: PeerAddress,
        peers: PeerSettings,
        factory: str,
        arguments: tuple[Any, dict[str, Any]],
        script: str = "",
    ) -> None:
        """``factory``: the user's class, as ``module:Class``; ``arguments``: positional and by name; ``script``: module
        that the workflow was started as."""
        self.context, self.place, self.name = context, place, place.name
        self.turns = Turns(self)
        self.ending = False
        self._returns: set[asyncio.Task[Any]] = set()  # of items that nobody wants any more
        self.loop = asyncio.new_event_loop()  # of the user's methods; its tasks show in stalls
        self._links = asyncio.new_event_loop()
        for name, loop in ((f"{self.name} methods", self.loop), (f"{self.name} links", self._links)):
            threading.Thread(target=loop.run_forever, name=name, daemon=True).start()
        self.hub = self._on_links(self._connected(driver, peers)).result()
        enter(self)
        if script:  # classes of the script that was started are the same here
            sys.modules["__main__"] = importlib.import_module(script)
        self.worker: Worker | None = None
        self.worker = self._on_loop(self._built(factory, *arguments)).result()

    def call(self, method: str, positional: tuple[Any, ...], named: dict[str, Any]) -> CallReport:
        """Run a method of the user's object."""
        started = time.perf_counter()
        value = self._on_loop(self._run(method, positional, named)).result()
        return CallReport(value=value, seconds=time.perf_counter() - started)

    def move_to(self, place: WorkerPlace) -> None:
        """Take another part of the plan: its devices stay."""
        self.place = place
        self.turns.has = False  # the lock begins anew with every plan

    def close(self) -> None:
        """End: the user's ``close``, if there is one, then the links."""
        self.ending = True
        self._on_loop(self.switch("close")).result()
        self._on_links(self.hub.close()).result()

    # What channels and messages need: `FlowProcess`, in the loop of the user's methods.

    async def put(self, number: int, name: str, items: Sequence[Any], weights: Sequence[float]) -> None:
        async def hold(item: Any) -> PayloadRef:
            with self.turns.transferring():
                return await self._linked(self.hub.hold(item, f"channel {name}, put by {self.name}"))

        async def put(refs: Sequence[PayloadRef], weights: Sequence[float]) -> None:
            async with self.turns.waiting(f"a place in channel {name}"):
                if not await self.ask_driver("put", self.name, number, refs, weights):
                    raise ChannelClosed(f"channel {name} is closed: {self.name} can't put anything more")

        await put_in_parts(items, weights, hold, put)

    async def get(self, number: int, name: str, weight: float | None) -> list[Any]:
        asking = asyncio.ensure_future(self.ask_driver("get", self.name, number, weight))
        try:
            async with self.turns.waiting(f"items of channel {name}"):
                refs: list[PayloadRef] = await asyncio.shield(asking)
            with self.turns.transferring():
                items = [await self._linked(self.hub.fetch(ref)) for ref in refs]
        except asyncio.CancelledError:  # what the channel gave, or gives later, is for another
            asking.add_done_callback(lambda done: self._give_back(done, number))
            raise
        self.turns.times.items += len(items)
        return items

    def _give_back(self, got: asyncio.Future[list[PayloadRef]], number: int) -> None:
        if not got.cancelled() and got.exception() is None and got.result():
            self._returns.add(
                task := self.loop.create_task(self.ask_driver("give_back", self.name, number, got.result()))
            )
            task.add_done_callback(self._returns.discard)

    def portion(self, name: str) -> float:
        place = self.place
        if place.chunk is None and place.world_size > 1:
            raise ConfigurationError(
                f"stage {place.stage}: its {place.world_size} workers share all of a step's items in channel {name}; "
                "the plan must say how many these are: items = N, or a chunk for the stage"
            )
        return math.inf if place.chunk is None else place.chunk

    def close_channel(self, number: int, name: str) -> None:
        raise ConfigurationError(f"channel {name}: {self.name} can't close it; the workflow does, when all are done")

    async def statistics_of(self, number: int) -> ChannelStatistics:
        return await self.ask_driver("channel_statistics", number)

    async def send(self, message: Any, to: str, tag: str) -> None:
        """See `Worker.send`."""
        async with self.turns.waiting(f"room for a message at {to}"):
            await self._linked(self.hub.send(to, message, tag))

    async def recv(self, source: str, tag: str) -> Any:
        """See `Worker.recv`."""
        async with self.turns.waiting(f"a message of {source}"):
            return await self._linked(self.hub.recv(source, tag))

    async def ask_driver(self, method: str, *arguments: Any) -> Any:
        """Call the workflow's process."""
        try:
            return await self._linked(self.hub.call("driver", method, *arguments))
        except RemoteError as error:
            raise own_cause(error) from None

    # Inside.

    async def _connected(self, driver: PeerAddress, peers: PeerSettings) -> Hub:
        hub = Hub(self.name, peers, driver=driver, services=_Services(self), device=self.place.device)
        await hub.start()
        return hub

    async def _built(self, factory: str, positional: tuple[Any, ...], named: dict[str, Any]) -> Worker:
        chosen = resolve(factory)
        if not (isinstance(chosen, type) and issubclass(chosen, Worker)):
            raise ConfigurationError(f"stage {self.place.stage}: {factory} must be a class that extends flow.Worker")
        worker: Worker = chosen.__new__(chosen)
        worker._host = self
        async with self.turns.turn():
            worker.__init__(*positional, **named)
        self.turns.take()
        return worker

    async def _run(self, method: str, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        found = getattr(self.worker, method)
        if inspect.iscoroutinefunction(found):
            return await found(*positional, **named)
        async with self.turns.turn():
            return found(*positional, **named)

    async def switch(self, what: str) -> float:
        """Run the user's ``onload``, ``offload`` or ``close``, if there is one; returns the seconds that took."""
        started = time.monotonic()
        if (run := getattr(self.worker, what, None)) is not None:
            await _awaited(run())
        seconds = time.monotonic() - started
        self.turns.times.switch_s += seconds
        return seconds

    def _on_loop(self, coroutine: Coroutine[Any, Any, T]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def _on_links(self, coroutine: Coroutine[Any, Any, T]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._links)

    async def _linked(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self._on_links(coroutine))

    async def on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop of the user's methods, from another one."""
        return await asyncio.wrap_future(self._on_loop(coroutine))


class _Services:
    """Methods of a worker's process that others of the workflow call."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host

    async def recall(self) -> None:
        """Give the devices up at the next wait: another stage wants them."""
        await self._host.on_loop(self._host.turns.recall())

    async def times(self) -> StageTimes:
        """The seconds since the last reading, also amid a call."""
        return await self._host.on_loop(self._host.turns.taken())

    def waits_for(self) -> str:
        """Say what the worker's call waits for; empty: it computes."""
        return self._host.turns.waits_for

    async def onload(self) -> float:
        """Bring the worker's memory back to its devices; returns the seconds that took."""
        return await self._host.on_loop(self._host.switch("onload"))

    async def offload(self) -> tuple[float, bool]:
        """Free the memory of its devices; returns the seconds that took, and whether anything was freed."""
        before = _held_bytes()
        seconds = await self._host.on_loop(self._host.switch("offload"))
        has_one = hasattr(self._host.worker, "offload")
        return seconds, not has_one or before - _held_bytes() >= _FREED_BYTES


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def _held_bytes() -> int:
    """Memory of this process: resident, and of its GPUs."""
    with open("/proc/self/statm", encoding="ascii") as file:
        held = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        held += torch.cuda.memory_allocated()
    return held
