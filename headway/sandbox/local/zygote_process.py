"""The owner's end of the zygote: starts it, requests sandboxes, receives reports of their ends, cleans up after it."""

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
from headway.runtime.supervision import to_its_end
from headway.sandbox import leftovers
from headway.sandbox.failures import refused
from headway.sandbox.guest import skeleton, wire
from headway.sandbox.linux import cgroups
from headway.sandbox.local.proxy import ProxySettings

SWITCHED_OFF = "no limit of memory: control groups are switched off in the backend's settings"
ROOT = Path(__file__).resolve().parents[3]
# Its settings come by its input: every sandbox can read this text as the command line of its first process.
STARTER = """import json, sys; told = json.loads(sys.stdin.buffer.readline()); sys.path.insert(0, told["root"])
from headway.sandbox.guest.zygote import main; main(told)"""


class Preload(msgspec.Struct, frozen=True, kw_only=True):
    """Modules that a zygote imports before it makes sandboxes, so that `LocalSandbox.run_function` can run functions of
    theirs. Each such set has a zygote of its own."""

    modules: tuple[str, ...]
    folders: tuple[str, ...]  # searched for them, beside the standard library; sandboxes have them read-only
    environment: dict[str, str] = {}  # while they are imported


class LocalSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the local backend on this machine."""

    spares: int = 4  # processes made ahead of need
    cgroups: bool = True  # False: none are made, though it may be allowed
    sandbox_uid: int = 65_200  # user that sandboxes run as under root; must own nothing
    bubblewrap: str = ""  # bubblewrap's program, where it isolates the sandboxes
    python: str = sys.executable  # of the zygote: only its standard library is used
    start_timeout_s: float = 30.0  # until a sandbox is ready
    answer_grace_s: float = 10.0  # beyond a command's own time, until its sandbox counts as dead
    preload: Preload | None = None
    proxy: ProxySettings = ProxySettings()  # of each sandbox that may reach hosts


class ZygoteProcess:
    """The zygote as its owner sees it: a child process, its socket, and the records of its sandboxes."""

    _count = 0  # of this process's backends: each has a directory of its own

    def __init__(self, folder: Path, record: leftovers.OwnerRecord, missing: tuple[str, ...], ended: Any) -> None:
        self.folder = folder
        self.record = record
        self.missing = missing
        self._tell_ended = ended
        self._records: set[str] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._backlog: list[tuple[bytes, list[int]]] = []
        self.alive = False
        self._up: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(cls, state: Path, run: str, settings: LocalSettings, ended: Any) -> ZygoteProcess:
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
            parents, missing = cgroups.find_parents(folder.name, uid) if settings.cgroups else ({}, (SWITCHED_OFF,))
            own_start = leftovers.started(os.getpid())
            assert own_start is not None
            record = leftovers.OwnerRecord(pid=os.getpid(), started=own_start, run=run, cgroups=parents)
            leftovers.write(folder, "owner.json", record)
            zygote = cls(folder, record, missing, ended)
            await zygote._launch(uid, gid, settings)
        except BaseException:
            await to_its_end(asyncio.to_thread(leftovers.clear, folder) if zygote is None else zygote.close())
            raise
        return zygote

    async def _launch(self, uid: int, gid: int, settings: LocalSettings) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        told = {
            "cgroups": self.record.cgroups,
            "spares": settings.spares,
            "prefix": "slot-",
            "uid": uid,
            "gid": gid,
            "bubblewrap": settings.bubblewrap,
            "preload": msgspec.to_builtins(settings.preload),
        }
        with theirs:
            self._process = _spawn(self.folder, settings.python, theirs.fileno(), told)
        ours.setblocking(False)
        self._socket = ours
        self.alive = True
        asyncio.get_running_loop().add_reader(ours, self._receive)
        async with asyncio.timeout(settings.start_timeout_s):
            grouped = await self._up
        self.record = msgspec.structs.replace(
            self.record,
            cgroups=self.record.cgroups if grouped else {},
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
        data = json.dumps(message).encode()
        if len(data) > wire.MESSAGE_BYTES:  # the rest would be cut off
            raise ConfigurationError(f"a sandbox's specification has {len(data)} bytes, of {wire.MESSAGE_BYTES} it may")
        if not self._backlog:
            try:
                socket.send_fds(self._socket, [data], descriptors)
                return
            except BlockingIOError:
                asyncio.get_running_loop().add_writer(self._socket, self._flush)
            except OSError as error:
                raise SandboxError(infrastructure_failure(f"the process that makes sandboxes: {error}")) from error
        self._backlog.append((data, [os.dup(one) for one in descriptors]))

    def _flush(self) -> None:
        assert self._socket is not None
        while self._backlog:
            data, descriptors = self._backlog[0]
            try:
                socket.send_fds(self._socket, [data], descriptors)
            except BlockingIOError:
                return
            except OSError:
                break  # the zygote is dead, as `_receive` will notice
            del self._backlog[0]
            for one in descriptors:
                os.close(one)
        asyncio.get_running_loop().remove_writer(self._socket)

    def _receive(self) -> None:
        assert self._socket is not None
        while True:
            try:
                data = self._socket.recv(wire.HEAD_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._has_died()
                return
            message = json.loads(data)
            if "zygote" in message:
                self.missing += tuple(f"no limit of {name}: {message['groups']}" for name in message["without"])
                self._up.set_result(message["groups"] == "")
            elif "ended" in message:
                self._ended(message["ended"], message["code"], message["oom_kills"])
            elif "refused" in message:
                self._ended(message["refused"], wire.EXIT_SETUP, 0, refused(message["error"], message["what"]))

    def _ended(self, name: str, code: int | None, oom_kills: int, why: SandboxFailure | None = None) -> None:
        (self.folder / "records" / f"{name}.json").unlink(missing_ok=True)
        self._records.discard(name)
        self._tell_ended(name, code, oom_kills, why)

    def _has_died(self) -> None:
        """Report all sandboxes as ended: the kernel kills them. Their other resources are removed in `close`."""
        assert self._socket is not None
        self.alive = False
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)
        loop.remove_writer(self._socket)
        self._socket.close()
        for _, descriptors in self._backlog:
            for one in descriptors:
                os.close(one)
        self._backlog.clear()
        if not self._up.done():
            with contextlib.suppress(OSError):
                log = (self.folder / "zygote.log").read_text(errors="replace").strip()
                what = f"the process that makes sandboxes doesn't start: {log.splitlines()[-1] if log else 'no output'}"
                self._up.set_exception(SandboxError(infrastructure_failure(what)))
        for name in list(self._records):
            self._ended(name, None, 0)

    async def close(self) -> None:
        """End the zygote and everything it has made; nothing of it is left afterwards."""
        if self._socket is not None and self.alive:
            self._has_died()  # the zygote sees the socket close, and cleans up
        if (process := self._process) is not None:
            try:
                await asyncio.to_thread(process.wait, 6.0)
            except subprocess.TimeoutExpired:
                process.kill()
                await asyncio.to_thread(process.wait)
        await asyncio.to_thread(leftovers.clear, self.folder)


def _spawn(folder: Path, python: str, descriptor: int, told: dict[str, Any]) -> subprocess.Popen[bytes]:
    imported_with = told["preload"]["environment"] if told["preload"] else {}
    own = os.pidfd_open(os.getpid())  # opened here: looked up in the child, the id could be another process's by then
    with open(folder / "zygote.log", "wb") as log, contextlib.ExitStack() as opened:
        opened.callback(os.close, own)
        process = subprocess.Popen(
            [python, "-I", "-S", "-c", STARTER],
            pass_fds=[descriptor, own],
            cwd=folder,
            env={"LC_ALL": "C.UTF-8", **imported_with},  # nothing of the owner's: sandboxes inherit it
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,  # an interrupt from the terminal is the owner's to handle
        )
        assert process.stdin is not None
        with process.stdin, contextlib.suppress(BrokenPipeError):  # that it has died is noticed by its socket
            whole = {**told, "root": str(ROOT), "socket": descriptor, "owner_process": own}
            process.stdin.write(json.dumps(whole).encode() + b"\n")
    return process


def _make_state(state: Path, uid: int) -> None:
    """Make a directory in which the zygote's user may remove its own entries, and nobody else may write."""
    try:
        state.mkdir(mode=0o711, parents=True)
        os.chown(state, uid, -1)
    except FileExistsError:
        if state.is_symlink() or state.stat().st_uid not in (uid, os.geteuid()):
            raise ConfigurationError(f"{state} belongs to somebody else: name another directory") from None
        if state.stat().st_uid != uid:
            os.chown(state, uid, -1)


def _make_folder(folder: Path, uid: int, gid: int) -> None:
    for name in ("records", "stage"):
        (folder / name).mkdir(parents=True)
    skeleton.make(folder, uid, gid)
