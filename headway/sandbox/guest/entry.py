"""Starts a sandbox's first process where bubblewrap or Docker has isolated it. Standard library alone."""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

from headway.sandbox.guest import init, isolation, snapshots, wire
from headway.sandbox.linux import kernel, seccomp

WRITABLE_FOLDERS = ("work", "tmp", "var/tmp", "home/user", "dev/shm")  # in a container; each has a disk of its own
KILL_COUNT_FILES = ("/sys/fs/cgroup/memory/memory.oom_control", "/sys/fs/cgroup/memory.events")  # cgroups 1 and 2
PIPE_BYTES = 1 << 16


def behind_bubblewrap(spec_descriptor: int) -> None:
    """Serve behind bubblewrap. ``spec_descriptor``: a file with the specification as JSON, whose "descriptors" maps
    names to descriptors. Never returns."""
    _forbid_inspection()
    spec: dict[str, Any] = json.loads(os.pread(spec_descriptor, os.fstat(spec_descriptor).st_size, 0))
    descriptors: dict[str, int] = spec["descriptors"]
    # Closes the host's Python too: all needed parts of it are in memory by now.
    kernel.keep_only(*(descriptor for descriptor in descriptors.values() if descriptor >= 0))
    owner = socket.socket(fileno=descriptors["owner"])
    for descriptor in descriptors.values():
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)
    try:
        _make_workdir(spec)
        if descriptors["snapshot"] >= 0:
            with isolation.step("snapshot"), os.fdopen(descriptors["snapshot"], "rb") as snapshot_file:
                snapshots.unpack(snapshot_file)
    except isolation.SetupFailed as error:
        init.fail(owner, error.step, error.code, str(error))
    init.Init(owner, spec, [("", descriptors["upper"])], descriptors["proc"], descriptors["kills"]).run()


def in_container() -> None:
    """Serve in a container, after reading the specification and the snapshot, if any, from standard input. Never
    returns."""
    _forbid_inspection()
    owner = StandardStreams()
    try:
        spec, _ = owner.frame()
        with isolation.step("capabilities"):
            kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
            kernel.drop_capabilities()
        _make_workdir(spec)
        if spec["snapshot"]:
            with isolation.step("snapshot"):
                snapshot_reader = FramedReader(owner)
                snapshots.unpack(snapshot_reader)
                snapshot_reader.drain()
        with isolation.step("limits"):
            disks = [(f"{name}/", os.open(f"/{name}", os.O_RDONLY | os.O_DIRECTORY)) for name in WRITABLE_FOLDERS]
            proc_fd = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
            kills_fd = next((os.open(file, os.O_RDONLY) for file in KILL_COUNT_FILES if os.path.exists(file)), -1)
        with isolation.step("system call filter"):
            seccomp.install(seccomp.program())
    except isolation.SetupFailed as error:
        init.fail(owner, error.step, error.code, str(error))
    sys.stderr.flush()
    init.Init(owner, spec, disks, proc_fd, kills_fd).run()


def _forbid_inspection() -> None:
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # commands that run here later can't inspect this process
    kernel.name_process("sandbox-init")


def _make_workdir(spec: dict[str, Any]) -> None:
    with isolation.step("workdir"):
        os.makedirs(spec["workdir"], exist_ok=True)


class StandardStreams:
    """Standard input and output with the interface of a socket (`OwnerConnection`). After ``setblocking(False)`` reads
    don't block; writes do, since the owner always reads."""

    def fileno(self) -> int:
        return 0

    def setblocking(self, blocking: bool) -> None:
        os.set_blocking(0, blocking)

    def recv(self, max_bytes: int) -> bytes:
        return os.read(0, max_bytes)

    def send(self, data: memoryview | bytes) -> int:
        return os.write(1, data[:PIPE_BYTES])

    def sendall(self, data: bytes) -> None:
        while data:
            data = data[self.send(data) :]

    def frame(self) -> tuple[dict[str, Any], bytes]:
        """Wait for the next frame and return its head and body."""
        head_bytes, body_bytes = wire.lengths(self._read_exactly(wire.LENGTHS.size))
        return wire.head_from(self._read_exactly(head_bytes)), self._read_exactly(body_bytes)

    def _read_exactly(self, count: int) -> bytes:
        received = b""
        while len(received) < count:
            chunk = os.read(0, count - len(received))
            if not chunk:
                os._exit(wire.EXIT_CLOSED)
            received += chunk
        return received


class FramedReader:
    """A readable file that arrives in frames; an empty frame ends it."""

    def __init__(self, owner: StandardStreams) -> None:
        self._owner = owner
        self._unread = b""
        self._at_end = False

    def read(self, count: int) -> bytes:
        if not self._unread and not self._at_end:
            _, self._unread = self._owner.frame()
            self._at_end = not self._unread
        chunk, self._unread = self._unread[:count], self._unread[count:]
        return chunk

    def drain(self) -> None:
        """Skip the rest of the file, since the frames behind it are the owner's requests."""
        while not self._at_end:
            self.read(1 << 30)
