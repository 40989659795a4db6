"""Manages the zygote from its owner: starts it, requests sandboxes, receives reports of their ends, cleans up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from headway.records.errors import ConfigurationError
from headway.records.sandbox import SandboxError, SandboxFailure, infrastructure_failure
from headway.runtime.supervision import run_to_completion
from headway.sandbox import leftovers
from headway.sandbox.failures import clone_failure
from headway.sandbox.guest import skeleton, wire
from headway.sandbox.linux import cgroups
from headway.sandbox.local.proxy import ProxySettings

CGROUPS_DISABLED = "no limit of memory: control groups are switched off in the backend's settings"
ROOT = Path(__file__).resolve().parents[3]
# Settings go through standard input, since every sandbox can read this text as its first process's command line.
STARTER = """import json, sys; settings = json.loads(sys.stdin.buffer.readline()); sys.path.insert(0, settings["root"])
from headway.sandbox.guest.zygote import main; main(settings)"""


class Preload(msgspec.Struct, frozen=True, kw_only=True):
    """Modules that a zygote imports before it makes sandboxes, so that `LocalSandbox.run_function` can run their
    functions. Each such set has a zygote of its own."""

    modules: tuple[str, ...]
    folders: tuple[str, ...]  # on the import path beside the standard library; sandboxes have them read-only
    environment: dict[str, str] = {}  # during the imports


class LocalSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the local backend on this machine."""

    spares: int = 4  # processes cloned before there are requests
    cgroups: bool = True  # False: none are made, though it may be allowed
    sandbox_uid: int = 65_200  # user that sandboxes run as under root; must own nothing
    bubblewrap: str = ""  # bubblewrap's program, where it isolates the sandboxes
    python: str = sys.executable  # of the zygote: only its standard library is used
    start_timeout_s: float = 30.0  # until a sandbox is ready
    answer_grace_s: float = 10.0  # beyond a command's own time, until its sandbox counts as dead
    preload: Preload | None = None
    proxy: ProxySettings = ProxySettings()  # of each sandbox that may reach hosts


class ZygoteProcess:
    """The owner's handle of a zygote: the child process, its socket, and the records of its sandboxes."""

    _count = 0  # of this process's backends: each has a directory of its own

    def __init__(self, folder: Path, record: leftovers.OwnerRecord, missing: tuple[str, ...], on_ended: Any) -> None:
        self.folder = folder
        self.record = record
        self.missing = missing
        self._on_ended = on_ended
        self._records: set[str] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._backlog: list[tuple[bytes, list[int]]] = []
        self.alive = False
        self._started: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(cls, state: Path, run: str, settings: LocalSettings, on_ended: Any) -> ZygoteProcess:
        uid, gid = os.geteuid(), os.getegid()
        if uid == 0:
            uid = gid = settings.sandbox_uid
        _make_state(state, uid)
        await asyncio.to_thread(leftovers.reap, state)
        cls._count += 1
        folder = state / leftovers.owner_name(os.getpid(), cls._count)
        zygote: ZygoteProcess | None = None
        try:
            await asyncio.to_thread(_make_folder, folder, uid, gid)
            parents, missing = cgroups.find_parents(folder.name, uid) if settings.cgroups else ({}, (CGROUPS_DISABLED,))
            start_ticks = leftovers.started(os.getpid())
            assert start_ticks is not None
            record = leftovers.OwnerRecord(pid=os.getpid(), started=start_ticks, run=run, cgroups=parents)
            leftovers.write(folder, "owner.json", record)
            zygote = cls(folder, record, missing, on_ended)
            await zygote._launch(uid, gid, settings)
        except BaseException:
            await run_to_completion(asyncio.to_thread(leftovers.clear, folder) if zygote is None else zygote.close())
            raise
        return zygote

    async def _launch(self, uid: int, gid: int, settings: LocalSettings) -> None:
        owner_socket, zygote_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        zygote_settings = {
            "cgroups": self.record.cgroups,
            "spares": settings.spares,
            "prefix": "slot-",
            "uid": uid,
            "gid": gid,
            "bubblewrap": settings.bubblewrap,
            "preload": msgspec.to_builtins(settings.preload),
        }
        with zygote_socket:
            self._process = _spawn(self.folder, settings.python, zygote_socket.fileno(), zygote_settings)
        owner_socket.setblocking(False)
        self._socket = owner_socket
        self.alive = True
        asyncio.get_running_loop().add_reader(owner_socket, self._receive)
        async with asyncio.timeout(settings.start_timeout_s):
            has_groups = await self._started
        self.record = msgspec.structs.replace(
            self.record,
            cgroups=self.record.cgroups if has_groups else {},
            zygote_pid=self._process.pid,
            zygote_started=leftovers.started(self._process.pid) or 0,
        )
        leftovers.write(self.folder, "owner.json", self.record)

    def write(self, record: leftovers.SandboxRecord) -> None:
        """Write the record of a sandbox; called before the sandbox is made."""
        leftovers.write(self.folder / "records", f"{record.id}.json", record)
        self._records.add(record.id)

    def request(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a request, at once or as soon as the socket has room. The descriptors may be closed afterwards."""
        if self._socket is None or not self.alive:
            raise SandboxError(infrastructure_failure("the process that makes sandboxes has died"))
        frame = json.dumps(message).encode()
        if len(frame) > wire.MESSAGE_BYTES:  # the rest would be cut off
            raise ConfigurationError(f"a sandbox's specification has {len(frame)} bytes; at most: {wire.MESSAGE_BYTES}")
        if not self._backlog:
            try:
                socket.send_fds(self._socket, [frame], descriptors)
                return
            except BlockingIOError:
                asyncio.get_running_loop().add_writer(self._socket, self._flush)
            except OSError as error:
                raise SandboxError(infrastructure_failure(f"the process that makes sandboxes: {error}")) from error
        self._backlog.append((frame, [os.dup(descriptor) for descriptor in descriptors]))

    def _flush(self) -> None:
        assert self._socket is not None
        while self._backlog:
            packet, descriptors = self._backlog[0]
            try:
                socket.send_fds(self._socket, [packet], descriptors)
            except BlockingIOError:
                return
            except OSError:
                break  # the zygote is dead, as `_receive` will notice
            del self._backlog[0]
            for descriptor in descriptors:
                os.close(descriptor)
        asyncio.get_running_loop().remove_writer(self._socket)

    def _receive(self) -> None:
        assert self._socket is not None
        while True:
            try:
                packet = self._socket.recv(wire.HEAD_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._on_death()
                return
            message = json.loads(packet)
            if "zygote" in message:
                self.missing += tuple(f"no limit of {name}: {message['groups']}" for name in message["without"])
                self._started.set_result(message["groups"] == "")
            elif "ended" in message:
                self._on_end(message["ended"], message["code"], message["oom_kills"])
            elif "refused" in message:
                self._on_end(message["refused"], wire.EXIT_SETUP, 0, clone_failure(message["error"], message["what"]))

    def _on_end(self, name: str, code: int | None, oom_kills: int, why: SandboxFailure | None = None) -> None:
        (self.folder / "records" / f"{name}.json").unlink(missing_ok=True)
        self._records.discard(name)
        self._on_ended(name, code, oom_kills, why)

    def _on_death(self) -> None:
        """Report all sandboxes as ended: the kernel kills them. Their other resources are removed in `close`."""
        assert self._socket is not None
        self.alive = False
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)
        loop.remove_writer(self._socket)
        self._socket.close()
        for _, descriptors in self._backlog:
            for descriptor in descriptors:
                os.close(descriptor)
        self._backlog.clear()
        if not self._started.done():
            with contextlib.suppress(OSError):
                log = (self.folder / "zygote.log").read_text(errors="replace").strip()
                text = f"the process that makes sandboxes doesn't start: {log.splitlines()[-1] if log else 'no output'}"
                self._started.set_exception(SandboxError(infrastructure_failure(text)))
        for name in list(self._records):
            self._on_end(name, None, 0)

    async def close(self) -> None:
        """End the zygote and everything it has made; nothing of it is left afterwards."""
        if self._socket is not None and self.alive:
            self._on_death()  # the zygote sees the socket close, and cleans up
        if (process := self._process) is not None:
            try:
                await asyncio.to_thread(process.wait, 6.0)
            except subprocess.TimeoutExpired:
                process.kill()
                await asyncio.to_thread(process.wait)
        await asyncio.to_thread(leftovers.clear, self.folder)


def _spawn(folder: Path, python: str, descriptor: int, settings: dict[str, Any]) -> subprocess.Popen[bytes]:
    import_environment = settings["preload"]["environment"] if settings["preload"] else {}
    owner_fd = os.pidfd_open(os.getpid())  # opened here: in the child the id could be another process's by then
    with open(folder / "zygote.log", "wb") as log_file, contextlib.ExitStack() as exit_stack:
        exit_stack.callback(os.close, owner_fd)
        process = subprocess.Popen(
            [python, "-I", "-S", "-c", STARTER],
            pass_fds=[descriptor, owner_fd],
            cwd=folder,
            env={"LC_ALL": "C.UTF-8", **import_environment},  # nothing of the owner's: sandboxes inherit it
            stdin=subprocess.PIPE,
            stdout=log_file,
            stderr=log_file,
            start_new_session=True,  # an interrupt from the terminal is the owner's to handle
        )
        assert process.stdin is not None
        with process.stdin, contextlib.suppress(BrokenPipeError):  # its socket reports its death
            message = {**settings, "root": str(ROOT), "socket": descriptor, "owner_process": owner_fd}
            process.stdin.write(json.dumps(message).encode() + b"\n")
    return process


def _make_state(state: Path, uid: int) -> None:
    """Make a directory in which only the zygote's user may write, since it removes its own entries."""
    try:
        state.mkdir(mode=0o711, parents=True)
        os.chown(state, uid, -1)
    except FileExistsError:
        if state.is_symlink() or state.stat().st_uid not in (uid, os.geteuid()):
            raise ConfigurationError(f"{state} belongs to another user: name another directory") from None
        if state.stat().st_uid != uid:
            os.chown(state, uid, -1)


def _make_folder(folder: Path, uid: int, gid: int) -> None:
    for name in ("records", "stage"):
        (folder / name).mkdir(parents=True)
    skeleton.make(folder, uid, gid)
