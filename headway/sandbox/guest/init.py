"""Runs as the first process of a sandbox: serves its owner's requests, reaps processes, enforces the time to live.

Standard library alone. It ends when the owner's socket closes, when its time is over or when the zygote dies. With it
the kernel ends all other processes of its namespace. It runs as the same user as the commands, which can neither signal
it (the kernel protects a namespace's first process) nor inspect it (it isn't dumpable, and ptrace is filtered).
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from headway.sandbox.guest import files, snapshots, wire
from headway.sandbox.guest.commands import Commands, limits_of_commands, tasks
from headway.sandbox.linux import cgroups, kernel

RECEIVE_BYTES = 1 << 17
Head = dict[str, Any]


class OwnerConnection(Protocol):
    """The connection to the owner: a socket, or a substitute."""

    def fileno(self) -> int: ...
    def setblocking(self, blocking: bool, /) -> None: ...
    def recv(self, max_bytes: int, /) -> bytes: ...
    def send(self, data: memoryview, /) -> int: ...
    def sendall(self, data: bytes, /) -> None: ...


class Init:
    """The loop of a sandbox's first process. ``kills``: descriptor of the file that counts kills for memory, or -1;
    ``written``: (prefix of the names, descriptor) of each directory that holds written files; ``channel``: descriptor
    for the input of a function that runs as a command, or -1."""

    def __init__(
        self,
        owner: OwnerConnection,
        spec: Head,
        written: Sequence[tuple[str, int]],
        proc: int,
        kills: int,
        channel: int = -1,
    ) -> None:
        self._owner = owner
        self._written = written
        self._frames = wire.FrameAssembler()
        self._outgoing: deque[memoryview] = deque()
        self._producing: deque[tuple[int, Iterator[bytes], Callable[[], None]]] = deque()
        self._writers: dict[int, files.FileWriter] = {}
        self._paused = False  # by the owner; a snapshot stops commands without this
        self._ends_s = time.monotonic() + spec["ttl_s"]
        self._poll = select.poll()
        prepare = limits_of_commands(spec["limits"], kills >= 0, proc)
        self._commands = Commands(self._poll, prepare, lambda: cgroups.read_kill_count(kills), channel)
        self._kills = kills
        self._wake = kernel.wake_on_child()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # from within, it only gets signals that it has handlers for
        owner.setblocking(False)
        self._poll.register(self._wake, select.POLLIN)
        self._poll.register(owner, select.POLLIN)

    def run(self) -> None:
        """Serve until the sandbox ends. Never returns."""
        self._send({"ready": True})
        self._flush()
        while True:
            for descriptor, _ in self._poll.poll(self._wait_ms()):
                if descriptor == self._owner.fileno():
                    self._receive()
                elif descriptor == self._wake:
                    os.read(self._wake, 4096)
                else:
                    self._commands.ready(descriptor)
            self._commands.reap()
            self._commands.enforce()
            for command in self._commands.done():
                head, body = command.report(cgroups.read_kill_count(self._kills))
                self._send({"id": command.number, **head}, body)
            self._flush()
            if time.monotonic() >= self._ends_s:
                os._exit(wire.EXIT_TTL)

    def _wait_ms(self) -> float:
        if self._producing and not self._outgoing:
            return 0
        wait_s = min(self._ends_s, self._commands.deadline_s()) - time.monotonic()
        return min(max(0.0, wait_s * 1000 + 0.5), 1e8)

    # Exchange with the owner, which never blocks.

    def _receive(self) -> None:
        try:
            chunk = self._owner.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            os._exit(wire.EXIT_CLOSED)
        for head, body in self._frames.feed(chunk):
            self._handle(head, body)

    def _send(self, head: Head, body: bytes = b"") -> None:
        self._outgoing.append(memoryview(wire.frame(head, body)))

    def _flush(self) -> None:
        try:
            while self._outgoing or self._send_next_chunk():
                chunk = self._outgoing[0]
                sent_count = self._owner.send(chunk)
                if sent_count == len(chunk):
                    self._outgoing.popleft()
                else:
                    self._outgoing[0] = chunk[sent_count:]
            self._poll.modify(self._owner, select.POLLIN)
        except BlockingIOError:
            self._poll.modify(self._owner, select.POLLIN | select.POLLOUT)
        except OSError:
            os._exit(wire.EXIT_CLOSED)

    def _send_next_chunk(self) -> bool:
        """Queue the next chunk of a file or snapshot being read. False: there is none."""
        if not self._producing:
            return False
        request_number, remaining_chunks, on_finished = self._producing[0]
        ending_head: Head = {}
        try:
            self._send({"id": request_number, "more": True}, next(remaining_chunks))
            return True
        except StopIteration:
            pass
        except wire.REQUEST_ERRORS as error:
            ending_head = wire.error_of(error)
        self._producing.popleft()
        self._send({"id": request_number, **ending_head})
        on_finished()
        return True

    # Requests.

    def _handle(self, head: Head, body: bytes) -> None:
        request_number = head["id"]
        try:
            answer = self._execute(request_number, head, body)
        except wire.REQUEST_ERRORS as error:
            answer = wire.error_of(error)
        if answer is not None:
            self._send({"id": request_number, **answer})

    def _execute(self, number: int, head: Head, body: bytes) -> Head | None:
        """Execute a request and return its answer; None: it comes later, or has been sent."""
        request_name = head["do"]
        if request_name == "exec":
            if self._commands.stopped:
                raise OSError(errno.EBUSY, "the sandbox is paused")
            try:
                self._commands.start(number, head, body if head["stdin"] else None)
            except OSError as error:
                return {**wire.error_of(error), "tasks": tasks()}
            return None
        if request_name == "read":
            self._producing.append((number, files.read(head["path"], head["max_bytes"]), lambda: None))
            return None
        if request_name == "write":
            return self._write(number, head, body)
        if request_name == "list":
            self._send({"id": number}, files.listing(head["path"], head["max_entries"]))
            return None
        if request_name == "snapshot":
            self._commands.stop()
            self._producing.append((number, snapshots.pack(self._written, head["max_bytes"]), self._resume))
            return None
        return self._control(request_name, head)

    def _control(self, do: str, head: Head) -> Head:
        if do == "pause":
            self._paused = True
            self._commands.stop()
        elif do == "resume":
            self._paused = False
            self._commands.resume()
        elif do == "renew":
            self._ends_s = time.monotonic() + head["ttl_s"]
        else:
            raise OSError(errno.ENOSYS, f"unknown request {do!r}")
        return {}

    def _resume(self) -> None:
        if not self._paused:
            self._commands.resume()

    def _write(self, number: int, head: Head, body: bytes) -> Head | None:
        """Write a chunk of a file; the last one is answered."""
        if head["first"]:
            self._writers[number] = files.FileWriter(head["path"], head["mode"])
        writer = self._writers.pop(number, None)
        if writer is None:
            return None  # an earlier chunk failed, which was reported
        writer.add(body)
        if head["last"]:
            writer.finish()
            return {}
        self._writers[number] = writer
        return None


def fail(owner: OwnerConnection, step: str, code: int, message: str) -> None:
    """Report to the owner that the sandbox couldn't be made, and exit. Never returns."""
    with contextlib.suppress(OSError):
        owner.sendall(wire.frame({"failed": step, "error": code, "what": message}))
    os._exit(wire.EXIT_SETUP)
