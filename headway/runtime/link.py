"""A link to another process, here or on another machine: calls, events and health checks over a stream socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headway.records.errors import RemoteError, WorkerDied
from headway.records.stalls import WorkerStatus
from headway.runtime.bounded_queue import BoundedQueue, QueueClosed, QueueFull
from headway.runtime.clock import Clock
from headway.runtime.framing import (
    Chunk,
    Frame,
    FrameReader,
    FrameTooLarge,
    Kind,
    encode,
    encode_error,
    send_some,
    tune,
)
from headway.runtime.stalls.waits import Waits
from headway.runtime.supervision import spawn

READS_PER_WAKEUP = 16  # then the loop's other tasks get their turn


@dataclass(frozen=True, kw_only=True)
class HealthChecks:
    """The health checks of a link: a ping every ``interval_s``, and what follows when no sign of life comes."""

    clock: Clock
    interval_s: float
    timeout_s: float  # of silence; half of it is reported
    on_silence: Callable[[float], None]  # called after all of it, with its seconds
    on_event: Callable[..., object] = lambda name, detail, /, **fields: None  # an `EventCallback`
    reachable: Callable[[], bool] = lambda: True  # silence counts only while the other's machine is


class Link:
    """This process's end of a connection to another: a caller's to its worker, an agent's to its run, or the reverse.

    Lifecycle: *open* -> *at its end* (the other side closed it, or it broke) -> *closed* by its owner, who says why:
    calls that wait fail with that, ``events`` is closed. Back-pressure: while an event waits for a place in ``events``
    the socket is not read, so the worker blocks in ``emit``; results behind it wait too.
    """

    def __init__(
        self,
        name: str,
        sock: socket.socket,
        events: BoundedQueue[Any],
        on_end: Callable[[str], None],
        on_broken: Callable[[str], None],
        serves: object | None = None,
        waits: Waits | None = None,
    ) -> None:
        """``waits``: where calls are registered while they wait. ``serves``: its coroutine methods can be called from
        the other end, many at a time. ``on_end(reason)``: the worker should be about to exit, since its connection or
        its work is at the end. ``on_broken(reason)``: it sent what can't be read, and must be killed."""
        self.name = name
        self.events = events
        self.fatal = ""  # the traceback that the worker sent before it ended
        self.at_end = False
        self.stopping = False
        self.silent_s = 0.0  # without a sign of life, as of the last health check
        self._socket = sock
        self._on_end = on_end
        self._on_broken = on_broken
        self._serves = serves
        self._waits = waits
        self._role = name.rstrip("-0123456789")
        self._loop = asyncio.get_running_loop()
        self.built: asyncio.Future[None] = self._loop.create_future()
        self._pending: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        self._calls = 0
        self._outgoing: deque[memoryview] = deque()
        self._blocked = False  # the rest is sent when the socket is writable
        self._deferred: deque[Any] = deque()  # events that were read while the queue was full
        self._reader = FrameReader()
        self._received = True  # bytes arrived since the last health check
        self._reading = True  # not suspended by back-pressure
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed: WorkerDied | None = None
        sock.setblocking(False)
        tune(sock)
        self._loop.add_reader(sock, self._on_readable)

    async def call(self, method: str, *args: Any, timeout_s: float | None = None, **named: Any) -> Any:
        """See :meth:`headway.runtime.workers.WorkerHandle.call`."""
        if self.stopping or self._closed is not None:
            raise WorkerDied(self.name, "stopped" if self._closed is None else self._closed.cause)
        if self._waits is None:
            return await self._request(Kind.CALL, method, (method, args, named), timeout_s)
        with self._waits.on(f"{self._role}.{method}", self.name):
            return await self._request(Kind.CALL, method, (method, args, named), timeout_s)

    async def inspect(self, timeout_s: float) -> WorkerStatus:
        """Ask the worker's second thread what the worker is doing. Raises TimeoutError, WorkerDied."""
        return await self._request(Kind.INSPECT, "inspect", None, timeout_s)

    @property
    def blocks_events(self) -> bool:
        """Whether the worker waits until its events are read here."""
        return bool(self._deferred)

    async def _request(self, kind: Kind, method: str, message: Any, timeout_s: float | None) -> Any:
        self._calls += 1
        call_number = self._calls
        chunks = encode(kind, call_number, message)
        reply_future: asyncio.Future[Any] = self._loop.create_future()
        self._pending[call_number] = (method, reply_future)
        self.send(chunks)
        try:
            if timeout_s is None:
                return await reply_future
            async with asyncio.timeout(timeout_s):
                return await reply_future
        except TimeoutError as error:
            if reply_future.cancelled():
                raise TimeoutError(f"{self.name}.{method} gave no result in {timeout_s} s") from error
            raise
        finally:
            self._pending.pop(call_number, None)

    def stop(self) -> None:
        """Ask the worker to stop after its present call; later calls are refused, events that don't fit dropped."""
        if not self.stopping:
            self.stopping = True
            self.send(encode(Kind.STOP, 0, None))
        self._resume_reading()

    # Sending: as much as the socket accepts at once, the rest when it is writable.

    def send(self, chunks: list[Chunk]) -> None:
        """Send a frame, after those sent before."""
        was_idle = not self._outgoing
        self._outgoing.extend(memoryview(chunk) for chunk in chunks)
        if was_idle:
            self._flush()

    def _flush(self) -> None:
        while self._outgoing:
            try:
                send_some(self._socket, self._outgoing)
            except BlockingIOError:
                self._loop.add_writer(self._socket, self._flush)
                self._blocked = True
                return
            except OSError:  # the other end is closed; its exit is noticed elsewhere
                self._outgoing.clear()
                break
        if self._blocked:
            self._loop.remove_writer(self._socket)
            self._blocked = False

    # Receiving.

    def _on_readable(self) -> None:
        for _ in range(READS_PER_WAKEUP):
            if self._deferred or self._socket.fileno() < 0 or not self._read_once():  # a frame may have closed it
                return

    def _read_once(self) -> bool:
        """Read once from the socket and handle the frames. False when there is nothing more for now."""
        try:
            byte_count = self._socket.recv_into(self._reader.target())
        except BlockingIOError:
            return False
        except OSError:
            byte_count = 0
        if byte_count == 0:
            self._loop.remove_reader(self._socket)
            if not self.at_end:
                self.at_end = True
                self._on_end("lost its connection")
            return False
        self._received = True
        try:
            frames = self._reader.received(byte_count)
        except FrameTooLarge as error:
            self._loop.remove_reader(self._socket)
            self._on_broken(f"sent {error}")
            return False
        for frame in frames:
            self._handle(frame)
        return True

    def _handle(self, frame: Frame) -> None:
        if frame.kind == Kind.PING:
            self.send(encode(Kind.PONG, 0, None))
            return
        try:
            message = frame.load()
        except Exception as error:  # the boundary of the wire: an unreadable message fails the call, or the worker
            if frame.call in self._pending:
                self._settle(
                    frame.call, RemoteError(self.name, self._pending[frame.call][0], f"unreadable result: {error}", "")
                )
            else:
                self._on_broken(f"sent a message that cannot be read: {type(error).__name__}: {error}")
            return
        if frame.kind == Kind.EVENT:
            self._deliver(message)
        elif frame.kind == Kind.RESULT:
            self._settle(frame.call, message)
        elif frame.kind == Kind.ERROR:
            self._fail(frame.call, *message)
        elif frame.kind == Kind.CALL and self._serves is not None:
            self._spawn(self._serve(frame.call, *message))
        elif frame.kind == Kind.READY:
            if not self.built.done():
                self.built.set_result(None)
        elif frame.kind == Kind.FATAL:
            self.fatal = message
            self._on_end("did not exit after a fatal error")

    async def _serve(self, call: int, method: str, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Run a call of the other end."""
        try:
            if method.startswith("_"):
                raise AttributeError(f"{method} is not a public method")
            reply_chunks = encode(Kind.RESULT, call, await getattr(self._serves, method)(*positional, **named))
        except Exception as error:  # the boundary of a remote call: its failure belongs to the caller
            reply_chunks = encode_error(call, error)
        if not self.at_end:
            self.send(reply_chunks)

    def _deliver(self, event: Any) -> None:
        if not self._deferred:
            with contextlib.suppress(QueueFull, QueueClosed):
                self.events.put_nowait(event)
                return
        if self.stopping or self.events.closed:
            return  # the owner has stopped the worker, or closed its events: they are dropped
        self._deferred.append(event)
        if len(self._deferred) == 1 and self._reading:
            self._loop.remove_reader(self._socket)
            self._spawn(self._release_deferred())

    async def _release_deferred(self) -> None:
        """Wait for places for the held events, then resume reading."""
        with contextlib.suppress(QueueClosed):
            while self._deferred:
                event = self._deferred[0]
                await self.events.put(event)
                if self._deferred and self._deferred[0] is event:
                    self._deferred.popleft()
        self._resume_reading()

    def _resume_reading(self) -> None:
        self._deferred.clear()
        if self._reading and not self.at_end and self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket, self._on_readable)

    def _settle(self, call: int, result: Any) -> None:
        _, reply_future = self._pending.pop(call, ("", None))
        if reply_future is None or reply_future.done():
            return  # its caller gave up
        if isinstance(result, RemoteError):
            reply_future.set_exception(result)
        else:
            reply_future.set_result(result)

    def _fail(self, call: int, line: str, trace: str, original: Exception | None) -> None:
        method = self._pending[call][0] if call in self._pending else "start"
        error = RemoteError(self.name, method, line, trace)
        error.__cause__ = original
        error.add_note(trace)
        if call:
            self._settle(call, error)
        elif not self.built.done():
            self.built.set_exception(error)

    # Health and the end.

    async def keep_alive(self, clock: Clock, interval_s: float) -> None:
        """Send a sign of life every ``interval_s``, while the worker is being built: on a node it would think that we
        are gone."""
        ping = encode(Kind.PING, 0, None)
        while True:
            await clock.sleep(interval_s)
            if not self._outgoing:
                self.send(ping)

    def watch(self, checks: HealthChecks) -> None:
        """Start health checks."""
        self._spawn(self._check_health(checks))

    async def _check_health(self, checks: HealthChecks) -> None:
        """Ping; report the worker stalled after half of the time-out of silence, and give it up after all of it. Our
        own stalls and back-pressure don't count as its silence."""
        ping, clock = encode(Kind.PING, 0, None), checks.clock
        self.silent_s = 0.0
        stalled = False

        def report(event: str, observation: str) -> None:
            event_fields = {"worker": self.name, "cause": "no heartbeat", "found_by": "health", "lost_s": self.silent_s}
            checks.on_event(event, f"{self.name}: {observation} {self.silent_s:.1f} s", **event_fields)

        while True:
            if not self._outgoing:  # unsent bytes ask for a sign of life as well as a ping does
                self.send(ping)
            slept_from_s = clock.now()
            await clock.sleep(checks.interval_s)
            if checks.reachable():
                self.silent_s += min(clock.now() - slept_from_s, 2 * checks.interval_s)
            if self._received or self._deferred:
                if stalled:
                    report("worker_answers", "after a silence of")
                self.silent_s, stalled = 0.0, False
                self._received = False
            elif self.silent_s >= checks.timeout_s:
                checks.on_silence(self.silent_s)
                return
            elif self.silent_s >= checks.timeout_s / 2 and not stalled:
                stalled = True
                report("worker_stalled", "no heartbeat for")

    def drain(self) -> None:
        """Read what has arrived, after the worker's end: events pile up beyond the queue's capacity."""
        self._reading = False
        while not self.at_end and self._read_once():
            pass

    def close(self, error: WorkerDied) -> None:
        """Close the connection: calls that wait raise WorkerDied with the cause of ``error``; ``events`` is closed with
        what was read. Later calls raise it too."""
        self._reading, self._closed = False, error
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._outgoing.clear()
        if not self.built.done():
            self.built.set_exception(error)
            self.built.exception()  # start() may have been cancelled: no one else retrieves it
        for _, reply_future in self._pending.values():
            if not reply_future.done():
                reply_future.set_exception(WorkerDied(self.name, error.cause))
        self._pending.clear()
        for task in self._tasks:
            task.cancel()
        self.events.close(self._deferred)

    def _spawn(self, coroutine: Any) -> None:
        spawn(self._tasks, coroutine, f"{self.name}: {coroutine.__name__}")
