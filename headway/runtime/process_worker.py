"""A worker in a child process of this machine: its socket, its health checks, its death."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator
from typing import IO, Any

from headway.records.errors import FoundBy, RemoteError, WorkerDied
from headway.runtime.channel import Channel, ChannelClosed, ChannelFull
from headway.runtime.clock import Clock
from headway.runtime.framing import Chunk, Frame, FrameReader, Kind, encode, widen

EXIT_GRACE_S = 5.0  # from losing the connection, or the report of a fatal error, to kill -9
EXIT_POLL_S = 0.05  # only where the kernel gives no process descriptors
READS_PER_WAKEUP = 16  # then the loop's other tasks get their turn
LOG_TAIL_LINES = 20
LOG_TAIL_BYTES = 8192


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


class LocalWorker:
    """A worker in a child process, behind a socket.

    Lifecycle: *starting* (process runs, object is being built) -> *alive* -> *dead* (reaped; ``died`` set,
    calls failed, ``events`` closed, in this order). Back-pressure: while an event waits for a place in
    ``events`` the socket is not read, so the child blocks in ``emit``; results behind it wait too.
    """

    def __init__(
        self,
        name: str,
        events: Channel[Any],
        process: subprocess.Popen[bytes],
        sock: socket.socket,
        log: IO[bytes],
        log_start: int,
    ) -> None:
        self._name = name
        self._process = process
        self._socket = sock
        self._events = events
        self._log = log
        self._log_start = log_start
        self._loop = asyncio.get_running_loop()
        self._died = Death()
        self._built: asyncio.Future[None] = self._loop.create_future()
        self._pending: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        self._calls = 0
        self._outgoing: deque[memoryview] = deque()
        self._blocked = False  # the rest is sent when the socket is writable
        self._held: deque[Any] = deque()  # events that were read while the channel was full
        self._reader = FrameReader()
        self._heard = True  # bytes arrived since the last health check
        self._stopping = False
        self._ended = False
        self._reason = ""  # why we killed it
        self._found_by: FoundBy = "exit"
        self._silent_s = 0.0  # before its health check killed it
        self._fatal = ""  # the traceback it sent before it ended
        self._tasks: set[asyncio.Task[None]] = set()
        sock.setblocking(False)
        widen(sock)
        self._loop.add_reader(sock, self._on_readable)
        self._watch_exit()

    @property
    def name(self) -> str:
        return self._name

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self._died.done()

    @property
    def events(self) -> Channel[Any]:
        return self._events

    @property
    def died(self) -> Death:
        return self._died

    async def call(self, method: str, *args: Any, timeout_s: float | None = None, **named: Any) -> Any:
        """See :meth:`Worker.call`."""
        if self._died.done():
            raise WorkerDied(self._name, self._died.result().cause)
        if self._stopping:
            raise WorkerDied(self._name, "stopped")
        self._calls += 1
        number = self._calls
        chunks = encode(Kind.CALL, number, (method, args, named))
        reply: asyncio.Future[Any] = self._loop.create_future()
        self._pending[number] = (method, reply)
        self._send(chunks)
        try:
            if timeout_s is None:
                return await reply
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError as error:
            if reply.cancelled():
                raise TimeoutError(f"{self._name}.{method} gave no result in {timeout_s} s") from error
            raise
        finally:
            self._pending.pop(number, None)

    async def stop(self, grace_s: float = 5.0) -> None:
        """See :meth:`Worker.stop`."""
        if self.alive:
            if not self._stopping:
                self._stopping = True
                self._send(encode(Kind.STOP, 0, None))
            self._resume_reading()
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
        """See :meth:`Worker.kill`."""
        self._kill(reason, "call")

    async def build(self, factory: str, arguments: dict[str, Any], timeout_s: float) -> None:
        """Send factory and arguments, and wait until the worker is built: the launcher's part of starting. Raises
        RemoteError, WorkerDied."""
        self._send(encode(Kind.SETUP, 0, (self._name, factory, list(sys.path))))
        self._send(encode(Kind.ARGUMENTS, 0, arguments))
        try:
            async with asyncio.timeout(timeout_s):
                await self._built
        except TimeoutError:
            if not self._built.cancelled():
                raise
            self._kill(f"not built within {timeout_s:g} s")
            raise await self._died from None

    def watch(self, clock: Clock, interval_s: float, timeout_s: float, on_event: Callable[..., object]) -> None:
        """Start health checks; ``on_event`` is an `EventCallback`."""
        if self.alive:
            self._spawn(self._check_health(clock, interval_s, timeout_s, on_event))

    # Sending: as much as the socket accepts at once, the rest when it is writable.

    def _send(self, chunks: list[Chunk]) -> None:
        idle = not self._outgoing
        self._outgoing.extend(memoryview(chunk) for chunk in chunks)
        if idle:
            self._flush()

    def _flush(self) -> None:
        while self._outgoing:
            chunk = self._outgoing[0]
            try:
                sent = self._socket.send(chunk)
            except BlockingIOError:
                self._loop.add_writer(self._socket, self._flush)
                self._blocked = True
                return
            except OSError:  # the other end is closed; its exit is noticed elsewhere
                self._outgoing.clear()
                break
            if sent == len(chunk):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = chunk[sent:]
        if self._blocked:
            self._loop.remove_writer(self._socket)
            self._blocked = False

    # Receiving.

    def _on_readable(self) -> None:
        for _ in range(READS_PER_WAKEUP):
            if self._held or not self._read_once():
                return

    def _read_once(self) -> bool:
        """Read once from the socket and handle the frames. False when there is nothing more for now."""
        try:
            count = self._socket.recv_into(self._reader.target())
        except BlockingIOError:
            return False
        except OSError:
            count = 0
        if count == 0:
            if not self._ended:
                self._loop.remove_reader(self._socket)
                self._expect_exit("lost its connection")
            return False
        self._heard = True
        for frame in self._reader.received(count):
            self._handle(frame)
        return True

    def _handle(self, frame: Frame) -> None:
        try:
            message = frame.load()
        except Exception as error:  # the boundary of the wire: an unreadable message fails the call, or the worker
            if frame.call in self._pending:
                self._settle(
                    frame.call, RemoteError(self._name, self._pending[frame.call][0], f"unreadable result: {error}", "")
                )
            else:
                self._kill(f"sent a message that cannot be read: {type(error).__name__}: {error}")
            return
        if frame.kind == Kind.EVENT:
            self._deliver(message)
        elif frame.kind == Kind.RESULT:
            self._settle(frame.call, message)
        elif frame.kind == Kind.ERROR:
            self._fail(frame.call, *message)
        elif frame.kind == Kind.READY:
            if not self._built.done():
                self._built.set_result(None)
        elif frame.kind == Kind.FATAL:
            self._fatal = message
            self._expect_exit("did not exit after a fatal error")

    def _deliver(self, event: Any) -> None:
        if not self._held:
            with contextlib.suppress(ChannelFull, ChannelClosed):
                self._events.put_nowait(event)
                return
        if self._stopping or self._events.closed:
            return  # the owner has stopped the worker, or closed its events: they are dropped
        self._held.append(event)
        if len(self._held) == 1 and not self._ended:
            self._loop.remove_reader(self._socket)
            self._spawn(self._release_held())

    async def _release_held(self) -> None:
        """Wait for places for the held events, then resume reading."""
        with contextlib.suppress(ChannelClosed):
            while self._held:
                event = self._held[0]
                await self._events.put(event)
                if self._held and self._held[0] is event:
                    self._held.popleft()
        self._resume_reading()

    def _resume_reading(self) -> None:
        self._held.clear()
        if self.alive and self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket, self._on_readable)

    def _settle(self, call: int, result: Any) -> None:
        _, reply = self._pending.pop(call, ("", None))
        if reply is None or reply.done():
            return  # its caller gave up
        if isinstance(result, RemoteError):
            reply.set_exception(result)
        else:
            reply.set_result(result)

    def _fail(self, call: int, line: str, trace: str, original: Exception | None) -> None:
        method = self._pending[call][0] if call in self._pending else "start"
        error = RemoteError(self._name, method, line, trace)
        error.__cause__ = original
        error.add_note(trace)
        if call:
            self._settle(call, error)
        elif not self._built.done():
            self._built.set_exception(error)

    # Health and death.

    async def _check_health(
        self, clock: Clock, interval_s: float, timeout_s: float, on_event: Callable[..., object]
    ) -> None:
        """Ping; report the worker stalled after half of ``timeout_s`` of silence, kill it after all of it. Our own
        stalls and back-pressure don't count as its silence."""
        ping = encode(Kind.PING, 0, None)
        silent_s = 0.0
        stalled = False

        def report(event: str, what: str) -> None:
            fields = {"worker": self._name, "cause": "no heartbeat", "found_by": "health", "lost_s": silent_s}
            on_event(event, f"{self._name}: {what} {silent_s:.1f} s", **fields)

        while True:
            if not self._outgoing:  # unsent bytes ask for a sign of life as well as a ping does
                self._send(ping)
            before_s = clock.now()
            await clock.sleep(interval_s)
            silent_s += min(clock.now() - before_s, 2 * interval_s)
            if self._heard or self._held:
                if stalled:
                    report("worker_answers", "after a silence of")
                silent_s, stalled = 0.0, False
                self._heard = False
            elif silent_s >= timeout_s:
                self._silent_s = silent_s
                self._kill(f"no heartbeat for {silent_s:.1f} s", "health")
                return
            elif silent_s >= timeout_s / 2 and not stalled:
                stalled = True
                report("worker_stalled", "no heartbeat for")

    def _kill(self, reason: str, found_by: FoundBy = "exit") -> None:
        if self._process.returncode is not None:
            return  # reaped: its id may be another process's by now
        self._reason = self._reason or reason
        if self._found_by == "exit":
            self._found_by = found_by
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _expect_exit(self, reason: str) -> None:
        """Kill the process if it doesn't exit by itself within `EXIT_GRACE_S`, with ``reason``."""
        self._loop.call_later(EXIT_GRACE_S, self._kill, reason)

    def _watch_exit(self) -> None:
        try:
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError:  # an old kernel, or a sandbox that forbids it
            self._pidfd = -1
            self._poll_exit()
        else:
            self._loop.add_reader(self._pidfd, self._on_exit)

    def _poll_exit(self) -> None:
        if os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            self._loop.call_later(EXIT_POLL_S, self._poll_exit)
        else:
            self._on_exit()

    def _on_exit(self) -> None:
        """Handle the end of the process, which is not reaped yet: read what it had sent, then settle everything."""
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._kill("")  # kills the children it left; its own id isn't reused before it is reaped
        self._ended = True
        while self._read_once():  # a socket buffer at most; events pile up in _held beyond the channel's capacity
            pass
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._outgoing.clear()
        code = self._process.wait()
        error = WorkerDied(self._name, self._cause(code), self._found_by, self._silent_s)
        self._log.close()
        self._died.set(error)
        if not self._built.done():
            self._built.set_exception(error)
            self._built.exception()  # start() may have been cancelled: nobody else needs to look
        for _, reply in self._pending.values():
            if not reply.done():
                reply.set_exception(WorkerDied(self._name, error.cause))
        self._pending.clear()
        for task in self._tasks:
            task.cancel()
        self._events.close(self._held)

    def _cause(self, code: int) -> str:
        """Describe the cause of death: one line, then the traceback it sent or the end of its output."""
        ending = f"killed by {_signal_name(-code)} ({-code})" if code < 0 else f"exited with code {code}"
        if self._stopping and code == 0:
            return "stopped"
        line = f"{self._reason} ({ending})" if self._reason else ending
        if self._fatal:
            return f"{line}\n{self._fatal.rstrip()}"
        tail = self._log_tail()
        return f"{line}\nlast output:\n{tail}" if tail else line

    def _log_tail(self) -> str:
        """The last lines that this process wrote; the log may have the output of predecessors."""
        end = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(self._log_start, end - LOG_TAIL_BYTES))
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-LOG_TAIL_LINES:])

    def _spawn(self, coroutine: Any) -> None:
        task = self._loop.create_task(coroutine, name=f"{self._name}: {coroutine.__name__}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "signal"
