"""The process of a worker, which builds one object and serves its methods.

Started as ``python -m headway.runtime.child DESCRIPTOR PARENT_PID DEVICE CORES``. The main thread builds
the object and runs its methods one at a time, and its ``tick`` between them; a second thread only reads
the socket, answers health checks and notices the parent's death. The device is applied before any module
but Headway's records is imported.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import importlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NoReturn, cast

from headway.records.errors import ConfigurationError
from headway.records.stalls import WorkerStatus
from headway.runtime.devices import Device, parse_device
from headway.runtime.framing import Chunk, Frame, FrameReader, Kind, encode, encode_error, send_some, tune
from headway.runtime.stalls.collectives import COLLECTIVES
from headway.runtime.stalls.stacks import DUMP_SIGNAL, task_stacks, thread_stacks

INSPECT_PATIENCE_S = 1.0
EXIT_PARENT_GONE = 75
EXIT_FAILED = 1
PR_SET_PDEATHSIG = 1


class WorkerContext:
    """The first argument of a worker object: its name, device and log, and the way to emit events."""

    def __init__(self, name: str, device: Device, connection: ParentConnection) -> None:
        self.name = name
        self.device = device
        self.log = logging.getLogger(name)
        self._connection = connection

    def emit(self, event: Any) -> None:
        """Send ``event`` to the parent's ``events`` queue; blocks while that is full. Any thread may call it."""
        self._connection.send(encode(Kind.EVENT, 0, event))


class ParentConnection:
    """The socket to the parent; whole frames only, from any thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        self._reader = FrameReader()
        self._frames: list[Frame] = []

    def send(self, chunks: list[Chunk]) -> None:
        outgoing = deque(memoryview(chunk) for chunk in chunks)
        with self._sending:
            try:
                while outgoing:
                    send_some(self._socket, outgoing)
            except OSError:
                os._exit(EXIT_PARENT_GONE)

    def send_if_free(self, chunks: list[Chunk], patience_s: float = 0.0) -> None:
        """Send a small frame unless that would wait. The reader must never wait for the parent to read, but it may wait
        for the end of another send, for ``patience_s``."""
        if not self._sending.acquire(timeout=patience_s):
            return  # another send is under way: a sign of life already, or the parent is not reading
        try:
            frame_bytes = b"".join(chunks)
            try:
                sent_count = self._socket.send(frame_bytes, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                os._exit(EXIT_PARENT_GONE)
            if sent_count < len(frame_bytes):
                self._socket.sendall(frame_bytes[sent_count:])
        finally:
            self._sending.release()

    def receive(self) -> Frame:
        """Wait for the next frame. The parent's death ends the process."""
        while not self._frames:
            try:
                byte_count = self._socket.recv_into(self._reader.target())
            except OSError:
                byte_count = 0
            if byte_count == 0:
                os._exit(EXIT_PARENT_GONE)
            self._frames = self._reader.received(byte_count)[::-1]
        return self._frames.pop()


class CallServer:
    """Runs the calls of one worker object on the main thread."""

    def __init__(self, connection: ParentConnection) -> None:
        self._connection = connection
        self._calls: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._worker: Any = None
        self._running: tuple[str, float] = ("", 0.0)  # what the main thread runs, and since when

    def read_forever(self) -> None:
        """Run the second thread: queue calls, answer pings."""
        pong = encode(Kind.PONG, 0, None)
        while True:
            frame = self._connection.receive()
            if frame.kind == Kind.PING:
                self._connection.send_if_free(pong)
                continue
            if frame.kind == Kind.INSPECT:
                self._connection.send_if_free(encode(Kind.RESULT, frame.call, self._status()), INSPECT_PATIENCE_S)
                continue
            if frame.kind == Kind.STOP:
                self._stopping.set()
            self._calls.put(frame)

    def serve(self, worker: Any) -> None:
        """Run calls, then tick, until stopped; block only when a tick reports that there is nothing to do."""
        self._worker = worker
        tick: Callable[[], bool] | None = getattr(worker, "tick", None)
        while not self._stopping.is_set():
            self._running = ("tick" if tick else "", time.monotonic())
            if tick is None or not tick():
                self._running = ("", 0.0)
                self._run(worker, self._calls.get())
            # Calls queued by now run before the next tick; later ones wait, so ticks can't starve.
            for _ in range(self._calls.qsize()):
                self._run(worker, self._calls.get())
        close: Callable[[], Any] | None = getattr(worker, "close", None)
        if close is not None:
            close()

    def _run(self, worker: Any, frame: Frame) -> None:
        if self._stopping.is_set() or frame.kind != Kind.CALL:
            return
        try:
            method, positional, named = frame.load()
            self._running = (method, time.monotonic())
            if method.startswith("_"):
                raise AttributeError(f"{method} is not a public method")
            returned = getattr(worker, method)(*positional, **named)
            if isinstance(returned, Future):
                cast("Future[Any]", returned).add_done_callback(partial(self._reply, frame.call))
                self._running = ("", 0.0)
                return
            reply_chunks = encode(Kind.RESULT, frame.call, returned)
        except Exception as error:  # the boundary of a remote call: its failure belongs to the caller
            reply_chunks = encode_error(frame.call, error)
        self._connection.send(reply_chunks)
        self._running = ("", 0.0)

    def _reply(self, call: int, future: Future[Any]) -> None:
        """Answer a call that returned a future, once it is done: others run meanwhile."""
        try:
            reply_chunks = encode(Kind.RESULT, call, future.result())
        except Exception as error:  # the boundary of a remote call: its failure belongs to the caller
            reply_chunks = encode_error(call, error)
        self._connection.send(reply_chunks)

    def _status(self) -> WorkerStatus:
        """Describe what the worker is doing. A worker with an event loop of its own has it as ``loop``; one that knows
        an obstacle to its work has it as ``trouble``."""
        method, since_s = self._running
        loop = getattr(self._worker, "loop", None)
        stacks = [*thread_stacks(skip=("reader",)), *(task_stacks(loop) if loop is not None else ())]
        return WorkerStatus(
            call=method,
            call_s=time.monotonic() - since_s if method else 0.0,
            collective=COLLECTIVES.name,
            collectives=COLLECTIVES.entered,
            in_collective_s=COLLECTIVES.waiting_s,
            trouble=getattr(self._worker, "trouble", ""),
            stacks=tuple(stacks),
        )


def resolve(factory: str) -> Callable[..., Any]:
    """Import ``module:Class``. Raises ConfigurationError for another form or a missing name."""
    module_name, _, attribute_path = factory.partition(":")
    if not module_name or not attribute_path:
        raise ConfigurationError(f"worker factory {factory!r}: must be module:Class")
    attribute: Any = importlib.import_module(module_name)
    for attribute_name in attribute_path.split("."):
        if not hasattr(attribute, attribute_name):
            raise ConfigurationError(f"worker factory {factory!r}: {module_name} has no {attribute_path}")
        attribute = getattr(attribute, attribute_name)
    return attribute


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies, even if all its threads are stuck."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the request
        os._exit(EXIT_PARENT_GONE)


def _build(server: CallServer, connection: ParentConnection, device_name: str, cores: list[int]) -> Any:
    """Apply the device, then import and construct. Returns the object, or None after reporting the error."""
    try:
        device = parse_device(device_name)
        device.apply(cores)
        name, factory, import_path = connection.receive().load()
        sys.path.extend(folder for folder in import_path if folder not in sys.path)
        arguments_frame = connection.receive()
        threading.Thread(target=server.read_forever, name="reader", daemon=True).start()
        logging.basicConfig(
            stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        context = WorkerContext(name, device, connection)
        return resolve(factory)(context, **arguments_frame.load())
    except Exception as error:  # the boundary of construction: start() raises it in the parent
        traceback.print_exc()
        connection.send(encode_error(0, error))
        return None


def end_process(code: int) -> NoReturn:
    """End this process as the interpreter would, without freeing every object first: that copies the pages which a
    forked process shares, half a second of a core where torch is loaded."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  # as multiprocessing ends what it forked
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # it has no reader, or is closed
            stream.flush()
    os._exit(code)


def main(arguments: list[str]) -> int:
    """Run the worker's process, from its command line to its exit code."""
    socket_fd, parent_pid, device_name, core_ids = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides
    die_with_parent(int(parent_pid))
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL)
    os.set_inheritable(int(socket_fd), False)  # a grandchild must not keep the connection open
    sock = socket.socket(fileno=int(socket_fd))
    tune(sock)
    connection = ParentConnection(sock)
    server = CallServer(connection)
    worker = _build(server, connection, device_name, [int(core) for core in core_ids.split(",") if core])
    if worker is None:
        return EXIT_FAILED
    connection.send(encode(Kind.READY, 0, None))
    try:
        server.serve(worker)
    except BaseException:  # the boundary of the process: the parent reports it as the cause of death
        traceback_text = traceback.format_exc()
        sys.stderr.write(traceback_text)
        connection.send(encode(Kind.FATAL, 0, traceback_text))
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    from headway.runtime import child  # the importable module: its classes must not exist twice

    child.end_process(child.main(sys.argv[1:]))
