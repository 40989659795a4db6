"""A worker in a process, here or on a node: the link to it and the process together, and its death."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Generator
from typing import Any

import msgspec

from headway.records.errors import FoundBy, RemoteError, WorkerDied
from headway.records.stalls import WorkerStatus
from headway.runtime.bounded_queue import BoundedQueue
from headway.runtime.clock import Clock
from headway.runtime.framing import Kind, encode
from headway.runtime.link import HealthChecks, Link
from headway.runtime.stalls.stacks import parse_dump
from headway.runtime.stalls.waits import Waits
from headway.runtime.worker_process import ProcessExit, WorkerProcess

INSPECT_S = 2.0  # that the second thread of a worker has to answer
EXIT_GRACE_S = 5.0  # from losing the connection, or the report of a fatal error, to kill -9


class Death:
    """A worker's death: set once, awaitable any number of times; can be passed to ``asyncio.wait`` directly."""

    def __init__(self) -> None:
        self._future: asyncio.Future[WorkerDied] = asyncio.get_running_loop().create_future()

    def done(self) -> bool:
        return self._future.done()

    def result(self) -> WorkerDied:
        """The cause. Raises asyncio.InvalidStateError while the worker lives."""
        return self._future.result()

    def set(self, error: WorkerDied) -> None:
        if not self._future.done():
            self._future.set_result(error)

    def add_done_callback(self, callback: Callable[[Any], object], **context: Any) -> None:
        self._future.add_done_callback(callback, **context)

    def remove_done_callback(self, callback: Callable[[Any], object]) -> int:
        return self._future.remove_done_callback(callback)

    def __await__(self) -> Generator[Any, None, WorkerDied]:
        return asyncio.shield(self._future).__await__()  # a cancelled waiter must not cancel it for the others


class ProcessWorker:
    """A worker in a process, behind a link.

    Lifecycle: *starting* (process runs, object is being built) -> *alive* -> *dead* (process ended; ``died`` set,
    calls failed, ``events`` closed, in this order).
    """

    def __init__(
        self, name: str, events: BoundedQueue[Any], process: WorkerProcess, sock: socket.socket, waits: Waits
    ) -> None:
        """``waits``: where its calls are registered while they wait."""
        self.waits = waits
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._link = Link(name, sock, events, self._expect_exit, self._kill, waits=waits)
        self._died = Death()
        self._exit: ProcessExit | None = None
        self._reason = ""  # why we killed it
        self._found_by: FoundBy = "exit"
        self._silent_s = 0.0  # before its health check killed it
        process.watch(self._on_exit)

    @property
    def name(self) -> str:
        return self._link.name

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def clock_offset_s(self) -> float:
        """See :meth:`headway.runtime.workers.WorkerHandle.clock_offset_s`."""
        return self._process.clock_offset_s

    @property
    def alive(self) -> bool:
        return not self._died.done()

    @property
    def events(self) -> BoundedQueue[Any]:
        return self._link.events

    @property
    def died(self) -> Death:
        return self._died

    async def call(self, method: str, *args: Any, timeout_s: float | None = None, **named: Any) -> Any:
        """See :meth:`headway.runtime.workers.WorkerHandle.call`."""
        if self._died.done():
            raise WorkerDied(self.name, self._died.result().cause)
        return await self._link.call(method, *args, timeout_s=timeout_s, **named)

    @property
    def silent_s(self) -> float:
        """Seconds without a sign of life, as of the last health check."""
        return self._link.silent_s

    async def inspect(self) -> WorkerStatus | None:
        """See :meth:`headway.runtime.stalls.waits.InspectableWorker.inspect`. Where the worker's second thread doesn't
        answer, since the interpreter's lock is held or the process is stopped, its machine is asked."""
        if not self.alive:
            return None
        try:
            status = await self._link.inspect(INSPECT_S)
            return msgspec.structs.replace(status, worker=self.name, blocked_events=self._link.blocks_events)
        except (WorkerDied, RemoteError):
            return None
        except TimeoutError:
            is_stopped, dump_text = await self._process.inspect()
        if self._link.blocks_events:
            return WorkerStatus(worker=self.name, blocked_events=True, stacks=tuple(parse_dump(dump_text)))
        condition = "stopped" if is_stopped else "silent"
        return WorkerStatus(worker=self.name, condition=condition, stacks=tuple(parse_dump(dump_text)))

    async def stop(self, grace_s: float = 5.0) -> None:
        """See :meth:`headway.runtime.workers.WorkerHandle.stop`."""
        if self.alive:
            self._link.stop()
            try:
                async with asyncio.timeout(grace_s):
                    await self._died
            except TimeoutError:
                self._kill(f"did not stop within {grace_s} s")
            except asyncio.CancelledError:
                self.kill()
                raise
        await self._died

    def kill(self, reason: str = "") -> None:
        """See :meth:`headway.runtime.workers.WorkerHandle.kill`."""
        self._kill(reason, "call")

    async def build(
        self, factory: str, arguments: dict[str, Any], timeout_s: float, clock: Clock, interval_s: float
    ) -> None:
        """Send factory and arguments, and wait until the worker is built: the launcher's part of starting. Raises
        RemoteError, WorkerDied. ``interval_s``: between signs of life to it."""
        self._link.send(encode(Kind.SETUP, 0, (self.name, factory, list(sys.path))))
        self._link.send(encode(Kind.ARGUMENTS, 0, arguments))
        keep_alive_task = asyncio.create_task(self._link.keep_alive(clock, interval_s), name=f"{self.name}: keep alive")
        try:
            async with asyncio.timeout(timeout_s):
                await self._link.built
        except TimeoutError:
            if not self._link.built.cancelled():
                raise
            self._kill(f"not built within {timeout_s:g} s")
            raise await self._died from None
        finally:
            keep_alive_task.cancel()

    def watch(self, clock: Clock, interval_s: float, timeout_s: float, on_event: Callable[..., object]) -> None:
        """Start health checks; ``on_event`` is an `EventCallback`."""
        if self.alive:
            self._link.watch(
                HealthChecks(
                    clock=clock,
                    interval_s=interval_s,
                    timeout_s=timeout_s,
                    on_silence=self._give_up,
                    on_event=on_event,
                    reachable=lambda: self._process.reachable,
                )
            )

    def _give_up(self, silent_s: float) -> None:
        self._silent_s = silent_s
        self._kill(f"no heartbeat for {silent_s:.1f} s", "health")

    def _kill(self, reason: str, found_by: FoundBy = "exit") -> None:
        if self._exit is not None or not self._process.kill():
            return
        self._reason = self._reason or reason
        if self._found_by == "exit":
            self._found_by = found_by

    def _expect_exit(self, reason: str) -> None:
        """Kill the process if it doesn't exit by itself within `EXIT_GRACE_S`, with ``reason``."""
        if self._exit is None:
            self._loop.call_later(EXIT_GRACE_S, self._kill, reason)
        else:
            self._finish()

    def _on_exit(self, end: ProcessExit) -> None:
        """Handle the end of the process: read what it had sent, then settle everything."""
        self._exit = end
        self._link.drain()
        if self._link.at_end or end.code is None:
            self._finish()
        else:  # what it sent last is still on its way
            self._loop.call_later(EXIT_GRACE_S, self._finish)

    def _finish(self) -> None:
        if self._exit is None or self._died.done():
            return
        found_by = "node" if self._exit.code is None else self._found_by
        error = WorkerDied(self.name, self._cause(self._exit), found_by, self._silent_s)
        self._died.set(error)
        self._link.close(error)

    def _cause(self, end: ProcessExit) -> str:
        """Describe the cause of death: one line, then the traceback it sent or the end of its output."""
        if self._link.stopping and end.code == 0:
            return "stopped"
        cause_line = f"{self._reason} ({end})" if self._reason else str(end)
        if self._link.fatal:
            return f"{cause_line}\n{self._link.fatal.rstrip()}"
        return f"{cause_line}\nlast output:\n{end.output}" if end.output else cause_line
