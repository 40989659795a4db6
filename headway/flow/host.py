"""The process of a workflow's worker: builds the user's object, runs its methods, connects it to the other processes.

The process has four threads: the main one receives calls (`runtime/child.py`), one runs the user's methods in a
permanent event loop, so that the devices can be released between and inside calls, one serves the links to other
processes, so that a worker that computes blocks no other process, and one answers health checks.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import sys
import threading
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from headway.control.channel_state import ChannelStatistics
from headway.flow.channel import ChannelClosed
from headway.flow.paths import PayloadRef, PeerAddress, PeerSettings
from headway.flow.peers import PeerNetwork
from headway.flow.process import put_in_parts, set_current_process
from headway.flow.worker import DeviceTurns, StageTimes, Traffic, Worker, WorkerPlacement
from headway.records.errors import ConfigurationError, RemoteError
from headway.runtime.child import WorkerContext, resolve
from headway.runtime.devices import resident_bytes
from headway.runtime.transport.packing import Packed
from headway.runtime.worker_slots import typed_cause

T = TypeVar("T")
_MIN_FREED_BYTES = 1 << 20  # an offload that frees less counts as freeing nothing


class CallReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a call of the user's method, and its duration."""

    value: Any
    seconds: float


class WorkerHost:
    """The worker object of a flow worker's process, which holds the user's object: see the module's docstring."""

    def __init__(
        self,
        context: WorkerContext,
        *,
        placement: WorkerPlacement,
        driver: PeerAddress,
        peers: PeerSettings,
        factory: str,
        arguments: Packed,
        script: str = "",
    ) -> None:
        """``factory``: the user's class, as ``module:Class``; ``arguments``: positional and keyword; ``script``: the
        module that was started as the workflow's script, if the class or an argument's is defined there."""
        self.context, self.placement, self.name = context, placement, placement.name
        self.turns = DeviceTurns(self)
        self.ending = False
        self._returns: set[asyncio.Task[Any]] = set()  # of items that a cancelled get received
        self.loop = asyncio.new_event_loop()  # loop of the user's methods; its tasks are listed in stall reports
        self._links = asyncio.new_event_loop()
        threading.Thread(target=serve_methods, args=(self.loop,), name=f"{self.name} methods", daemon=True).start()
        threading.Thread(target=self._links.run_forever, name=f"{self.name} links", daemon=True).start()
        self.network = self._on_links(self._connect_network(driver, peers)).result()
        set_current_process(self)
        if script:  # makes classes of the started script identical here
            sys.modules["__main__"] = importlib.import_module(script)
        self.worker: Worker | None = None
        self.worker = self._on_loop(self._build_worker(factory, *arguments.load())).result()

    def call(self, method: str, positional: tuple[Any, ...], named: dict[str, Any]) -> CallReport:
        """Run a method of the user's object."""
        started_s = time.perf_counter()
        returned = self._on_loop(self._run(method, positional, named)).result()
        return CallReport(value=returned, seconds=time.perf_counter() - started_s)

    def hold_state(self) -> PayloadRef:
        """Hold the ``state()`` of the user's object, in shared memory if it is large, which outlives this process."""
        state = self._on_loop(self._run("state", (), {})).result()
        return self._on_links(self.network.hold(state, f"state of {self.name}")).result()

    def restore_state(self, ref: PayloadRef) -> None:
        """Pass the state that another process holds to ``restore`` of the user's object."""
        state = self._on_links(self.network.fetch(ref)).result()
        self._on_loop(self._run("restore", (state,), {})).result()

    def move_to(self, placement: WorkerPlacement) -> None:
        """Take another placement on the same devices."""
        self.placement = placement
        self.turns.holds_devices = False  # every plan starts with new locks

    def close(self) -> None:
        """Run the user's ``close``, if there is one, then close the links."""
        self.ending = True
        self._on_loop(self.run_hook("close")).result()
        self._on_links(self.network.close()).result()

    # `FlowProcess`, for channels and messages, in the loop of the user's methods.

    async def put(self, number: int, name: str, items: Sequence[Any], weights: Sequence[float]) -> None:
        async def hold(item: Any) -> PayloadRef:
            with self.turns.transferring():
                return await self._await_on_links(self.network.hold(item, f"channel {name}, put by {self.name}"))

        async def put(refs: Sequence[PayloadRef], weights: Sequence[float]) -> None:
            async with self.turns.waiting(f"space in channel {name}"):
                if not await self.ask_driver("put", self.name, number, refs, weights):
                    raise ChannelClosed(f"channel {name} is closed: {self.name} can't put anything more")

        await put_in_parts(items, weights, hold, put)

    async def get(self, number: int, name: str, weight: float | None) -> list[Any]:
        refs_task = asyncio.ensure_future(self.ask_driver("get", self.name, number, weight))
        try:
            async with self.turns.waiting(f"items of channel {name}"):
                refs: list[PayloadRef] = await asyncio.shield(refs_task)
            with self.turns.transferring():
                items = [await self._await_on_links(self.network.fetch(ref)) for ref in refs]
        except asyncio.CancelledError:  # items that arrived, or arrive later, go back to the channel
            refs_task.add_done_callback(lambda done: self._return_items(done, number))
            raise
        self.turns.times.items += len(items)
        return items

    def _return_items(self, got: asyncio.Future[list[PayloadRef]], number: int) -> None:
        if not got.cancelled() and got.exception() is None and got.result():
            self._returns.add(
                task := self.loop.create_task(self.ask_driver("give_back", self.name, number, got.result()))
            )
            task.add_done_callback(self._returns.discard)

    def chunk_size(self, name: str) -> float:
        placement = self.placement
        if placement.chunk is None and placement.world_size > 1:
            raise ConfigurationError(
                f"stage {placement.stage}: its {placement.world_size} workers share all of a step's items in channel "
                f"{name}; the plan must say how many these are: items = N, or a chunk for the stage"
            )
        return math.inf if placement.chunk is None else placement.chunk

    def close_channel(self, number: int, name: str) -> None:
        raise ConfigurationError(f"channel {name}: {self.name} can't close it; the workflow does, when all are done")

    async def statistics_of(self, number: int) -> ChannelStatistics:
        return await self.ask_driver("channel_statistics", number)

    async def send(self, message: Any, to: str, tag: str) -> None:
        """See `Worker.send`."""
        async with self.turns.waiting(f"space for a message at {to}"):
            size_bytes = await self._await_on_links(self.network.send(to, message, tag))
        self.turns.times.sent.setdefault(to.rpartition("-")[0], Traffic()).add(size_bytes)

    async def recv(self, source: str, tag: str) -> Any:
        """See `Worker.recv`."""
        async with self.turns.waiting(f"a message of {source}"):
            return await self._await_on_links(self.network.recv(source, tag))

    async def ask_driver(self, method: str, *arguments: Any) -> Any:
        """Call a method of the workflow's process. Raises the error's own type where it is Headway's."""
        try:
            return await self._await_on_links(self.network.call("driver", method, *arguments))
        except RemoteError as error:
            raise typed_cause(error) from None

    # Inside.

    async def _connect_network(self, driver: PeerAddress, peers: PeerSettings) -> PeerNetwork:
        network = PeerNetwork(self.name, peers, driver=driver, services=_Services(self), device=self.placement.device)
        await network.start()
        return network

    async def _build_worker(self, factory: str, positional: tuple[Any, ...], named: dict[str, Any]) -> Worker:
        worker_class = resolve(factory)
        if not (isinstance(worker_class, type) and issubclass(worker_class, Worker)):
            raise ConfigurationError(
                f"stage {self.placement.stage}: {factory} must be a class that extends flow.Worker"
            )
        worker: Worker = worker_class.__new__(worker_class)
        worker._host = self
        async with self.turns.turn():
            worker.__init__(*positional, **named)
        self.turns.take_times()
        return worker

    async def _run(self, method: str, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        bound_method = getattr(self.worker, method)
        if inspect.iscoroutinefunction(bound_method):
            return await bound_method(*positional, **named)
        async with self.turns.turn():
            return bound_method(*positional, **named)

    async def run_hook(self, hook: str) -> float:
        """Run the user's ``onload``, ``offload`` or ``close``, if there is one; returns its duration in seconds."""
        started_s = time.monotonic()
        if (hook_method := getattr(self.worker, hook, None)) is not None:
            await _awaited(hook_method())
        seconds = time.monotonic() - started_s
        self.turns.times.switch_s += seconds
        return seconds

    def _on_loop(self, coroutine: Coroutine[Any, Any, T]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def _on_links(self, coroutine: Coroutine[Any, Any, T]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._links)

    async def _await_on_links(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self._on_links(coroutine))

    async def on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop of the user's methods, from another loop."""
        return await asyncio.wrap_future(self._on_loop(coroutine))


class _Services:
    """The methods of a worker's process that other processes of the workflow call."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host

    async def recall(self) -> None:
        """Release the devices at the next wait, since another stage requests them."""
        await self._host.on_loop(self._host.turns.recall())

    async def times(self) -> StageTimes:
        """Return the worker's times since the last reading, also during a call."""
        return await self._host.on_loop(self._host.turns.take_times_threadsafe())

    def waits_for(self) -> str:
        """Return what the worker's call waits for; empty when it computes."""
        return self._host.turns.waits_for

    async def onload(self) -> float:
        """Restore the worker's memory on its devices; returns the duration in seconds."""
        return await self._host.on_loop(self._host.run_hook("onload"))

    async def offload(self) -> tuple[float, bool]:
        """Free the memory of the worker's devices; returns the duration in seconds, and whether memory was freed (True
        also for a class without ``offload``)."""
        held_before_bytes = _held_bytes()
        seconds = await self._host.on_loop(self._host.run_hook("offload"))
        has_hook = hasattr(self._host.worker, "offload")
        return seconds, not has_hook or held_before_bytes - _held_bytes() >= _MIN_FREED_BYTES


def serve_methods(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop of the user's methods. A traceback of all threads shows by this name which of them these are."""
    loop.run_forever()


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def _held_bytes() -> int:
    """Return the memory of this process in bytes: resident, and allocated on its GPUs."""
    held_bytes = resident_bytes()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        held_bytes += torch.cuda.memory_allocated()
    return held_bytes
