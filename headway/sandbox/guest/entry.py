"""A sandbox's first process where something else made the walls, started as a program. Standard library alone."""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

from headway.sandbox.guest import init, isolation, snapshots, wire
from headway.sandbox.linux import kernel, seccomp

PLACES = ("work", "tmp", "var/tmp", "home/user", "dev/shm")  # of a container that can be written to: a disk each
KILLS = ("/sys/fs/cgroup/memory/memory.oom_control", "/sys/fs/cgroup/memory.events")  # control groups 1 and 2
PIPE_BYTES = 1 << 16


def behind_bubblewrap(told: int) -> None:
    """``told``: a descriptor with what is wanted, and which descriptors are what. Never returns."""
    _hide()
    wanted: dict[str, Any] = json.loads(os.pread(told, os.fstat(told).st_size, 0))
    passed: dict[str, int] = wanted["descriptors"]
    # The host's Python among what is closed: all that is needed of it is in memory by now.
    kernel.keep_only(*(descriptor for descriptor in passed.values() if descriptor >= 0))
    owner = socket.socket(fileno=passed["owner"])
    for descriptor in passed.values():
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)
    try:
        _make_workdir(wanted)
        if passed["snapshot"] >= 0:
            with isolation.step("snapshot"), os.fdopen(passed["snapshot"], "rb") as file:
                snapshots.unpack(file)
    except isolation.SetupFailed as error:
        init.fail(owner, error.step, error.code, str(error))
    init.Init(owner, wanted, [("", passed["upper"])], passed["proc"], passed["kills"]).run()


def in_container() -> None:
    """Serve in a container: reads the specification from standard input, then the snapshot, if any. Never returns."""
    _hide()
    owner = Pipes()
    try:
        wanted, _ = owner.frame()
        with isolation.step("capabilities"):
            kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
            kernel.drop_capabilities()
        _make_workdir(wanted)
        if wanted["snapshot"]:
            with isolation.step("snapshot"):
                parts = FramedReader(owner)
                snapshots.unpack(parts)
                parts.drain()
        with isolation.step("limits"):
            places = [(f"{place}/", os.open(f"/{place}", os.O_RDONLY | os.O_DIRECTORY)) for place in PLACES]
            proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
            kills = next((os.open(file, os.O_RDONLY) for file in KILLS if os.path.exists(file)), -1)
        with isolation.step("system call filter"):
            seccomp.install(seccomp.program())
    except isolation.SetupFailed as error:
        init.fail(owner, error.step, error.code, str(error))
    sys.stderr.flush()
    init.Init(owner, wanted, places, proc, kills).run()


def _hide() -> None:
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # what runs here later can't look into this process
    kernel.name_process("sandbox-init")


def _make_workdir(wanted: dict[str, Any]) -> None:
    with isolation.step("workdir"):
        os.makedirs(wanted["workdir"], exist_ok=True)


class Pipes:
    """Standard input and output, as far as they do for a socket. Reading doesn't wait once it is told not to; writing
    does: the owner reads whatever else it does."""

    def fileno(self) -> int:
        return 0

    def setblocking(self, wait: bool) -> None:
        os.set_blocking(0, wait)

    def recv(self, most: int) -> bytes:
        return os.read(0, most)

    def send(self, data: memoryview | bytes) -> int:
        return os.write(1, data[:PIPE_BYTES])

    def sendall(self, data: bytes) -> None:
        while data:
            data = data[self.send(data) :]

    def frame(self) -> tuple[dict[str, Any], bytes]:
        """The next one, waited for."""
        head, body = wire.lengths(self._exactly(wire.LENGTHS.size))
        return wire.head_from(self._exactly(head)), self._exactly(body)

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = os.read(0, count - len(data))
            if not more:
                os._exit(wire.EXIT_CLOSED)
            data += more
        return data


class FramedReader:
    """A file that arrives in frames, the last of which is empty."""

    def __init__(self, owner: Pipes) -> None:
        self._owner = owner
        self._rest = b""
        self._over = False

    def read(self, count: int) -> bytes:
        if not self._rest and not self._over:
            _, self._rest = self._owner.frame()
            self._over = not self._rest
        data, self._rest = self._rest[:count], self._rest[count:]
        return data

    def drain(self) -> None:
        """Skip the rest of the file: the frames behind it are the owner's requests."""
        while not self._over:
            self.read(1 << 30)
