"""A sandbox of the local backend, as its owner sees it: requests over its socket, and the causes of failures."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from headway.records.errors import ConfigurationError
from headway.records.sandbox import (
    Command,
    ExecResult,
    FileInfo,
    NetworkUse,
    SandboxError,
    SandboxFailure,
    SandboxInfo,
    SandboxSpec,
    Snapshot,
    environment_failure,
    infrastructure_failure,
    model_failure,
)
from headway.runtime.supervision import to_its_end
from headway.sandbox.failures import Head, file_failure, os_failure, outlived, request_of, result_of, setup_failure
from headway.sandbox.guest import wire
from headway.sandbox.guest.isolation import PROXY_PORT
from headway.sandbox.leftovers import SandboxRecord
from headway.sandbox.local.proxy import Proxy
from headway.sandbox.protocol import FILE_BYTES
from headway.sandbox.snapshot_store import SnapshotFolder

ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/home/user",
    "USER": "user",
    "LANG": "C.UTF-8",
    "TMPDIR": "/tmp",
}
THROUGH_PROXY = f"http://127.0.0.1:{PROXY_PORT}"
PROXIED = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), THROUGH_PROXY),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "localhost,127.0.0.1,::1"),
}
Take = Callable[[bytes], Awaitable[None] | None]  # consumes an answer's parts, as they arrive
ODD = (wire.Malformed, KeyError, TypeError, ValueError, OverflowError, RecursionError, msgspec.DecodeError)
LONGEST_PATH = 4096  # characters; the kernel counts bytes
LOOK_AGAIN_S = 0.25  # interval of looks whether a paused sandbox was resumed
ENDING_S = 10.0  # from the request to end a sandbox until nothing of it is left


class ZygoteClient(Protocol):
    """The part of a zygote that a sandbox needs: whether it is alive, and requests to it."""

    @property
    def alive(self) -> bool: ...

    def request(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None: ...


class _Call:
    """A pending request: its answer, and the consumer of the parts that come before."""

    def __init__(self, take: Take, room: int) -> None:
        self.answer: asyncio.Future[tuple[Head, bytes]] = asyncio.get_running_loop().create_future()
        self.take = take
        self.room = room  # bytes that parts may still have


class LocalSandbox:
    """A `Sandbox` of the local backend. Data from its socket is treated as hostile: bounded, and checked."""

    def __init__(
        self,
        record: SandboxRecord,
        spec: SandboxSpec,
        zygote: ZygoteClient,
        snapshots: SnapshotFolder | None,
        grace_s: float,
        channel: socket.socket | None = None,
    ) -> None:
        self._record = record
        self._spec = spec
        self._environment = {**ENVIRONMENT, **(PROXIED if spec.network else {}), **spec.environment}
        self._zygote = zygote
        self._snapshots = snapshots
        self._grace_s = grace_s
        self.channel = channel  # to the function that `run_function` runs
        self._calls: dict[int, _Call] = {}
        self._count = 0
        self._reader: asyncio.Task[None] | None = None
        self._writer: wire.FrameWriter | None = None
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = loop.create_future()
        self._gone: asyncio.Future[None] = loop.create_future()  # nothing of it is left
        self._heard_out: asyncio.Future[None] = loop.create_future()  # its socket is read to the end
        self._why: SandboxFailure | None = None  # why it has ended, or is ending
        self._broken = ""  # how it broke the protocol
        self._proxy: Proxy | None = None  # where it may reach some hosts
        self._paused = False
        self._still_since: float | None = None  # since when commands, and their time limits, are stopped
        self._stood_s = 0.0  # total time stopped before that

    @property
    def id(self) -> str:
        return self._record.id

    @property
    def ended(self) -> bool:
        return self._why is not None

    @property
    def info(self) -> SandboxInfo:
        state = "starting" if not self._ready.done() else "paused" if self._paused else "running"
        return SandboxInfo(
            id=self.id,
            labels=self._record.labels,
            state="ended" if self.ended else state,
            owner_pid=self._record.owner_pid,
            created_s=self._record.created_s,
        )

    async def open(self, ours: socket.socket, timeout_s: float) -> None:
        """Connect to the sandbox by its socket, and wait until it is ready. Raises SandboxError if it can't be made."""
        await self.serve(*await asyncio.open_unix_connection(sock=ours, limit=1 << 20), timeout_s)

    async def serve(self, reader: asyncio.StreamReader, writer: wire.FrameWriter, timeout_s: float) -> None:
        """Connect to the sandbox by any pair of streams and wait until it is ready. Raises SandboxError."""
        self._writer = writer
        self._reader = asyncio.create_task(self._read(reader), name=f"sandbox {self.id}")
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._ready)
        except TimeoutError:
            raise SandboxError(infrastructure_failure(f"sandbox {self.id} wasn't ready in {timeout_s:g} s")) from None

    def attach_proxy(self, proxy: Proxy) -> None:
        """Attach the proxy by which the sandbox may reach hosts; it is closed when the sandbox ends."""
        self._proxy = proxy
        if self.ended:
            proxy.close()

    @property
    def network_use(self) -> NetworkUse | None:
        """The use of each host it asked for, also after its end; None: it may reach none."""
        return None if self._proxy is None else self._proxy.statistics()

    # Commands.

    async def run_function(self, name: str, *, timeout_s: float, max_output_bytes: int) -> ExecResult:
        """Run ``module:function`` of a preloaded module as a command; `channel` leads to its standard input. One that
        breaks the protocol there is the caller's to notice. At most one function in a sandbox."""
        command = Command(argv=[name], timeout_s=timeout_s, max_output_bytes=max_output_bytes)
        return await self._exec(command, {"function": name})

    async def exec(self, command: Command) -> ExecResult:
        """See :meth:`Sandbox.exec`."""
        return await self._exec(command, {})

    async def _exec(self, command: Command, more: Head) -> ExecResult:
        most, stdin = wire.BODY_BYTES // 2, command.stdin or b""
        if command.max_output_bytes > most or len(stdin) > wire.BODY_BYTES:
            raise ConfigurationError(
                f"sandbox command max_output_bytes = {command.max_output_bytes}, stdin of {len(stdin)} bytes:"
                f" at most {most} of output and {wire.BODY_BYTES} of input"
            )
        head = {**request_of(command, self._spec, self._environment), "stdin": command.stdin is not None, **more}
        if len(wire.frame(head)) > wire.HEAD_BYTES:  # a shell's answer where the kernel refuses
            return ExecResult(exit_code=126, stderr=b"argument list too long\n")
        answer, body = await self._ask(head, stdin, wait_s=command.timeout_s + self._grace_s)
        if "error" in answer:
            return self._not_started(answer)
        with self._understanding():
            split = int(answer["stdout_bytes"])
            return result_of(answer, body[:split], body[split:], command.timeout_s)

    def _not_started(self, answer: Head) -> ExecResult:
        """The result of a command that got no process: blamed on the model's code where a limit was reached."""
        code, tasks = int(answer["error"]), int(answer.get("tasks", 0))
        limit = self._spec.limits.processes
        if code == errno.EAGAIN and tasks >= limit - 2:
            failure = model_failure("no more processes: the sandbox has as many as it may", tasks=tasks, limit=limit)
            return ExecResult(exit_code=None, failure=failure)
        if code == errno.ENOMEM:
            return ExecResult(exit_code=None, oom=True, failure=model_failure("no memory left to start a command"))
        if code == errno.EBUSY:
            raise SandboxError(environment_failure(f"sandbox {self.id} is paused: resume it first"))
        raise SandboxError(os_failure("a command can't be started", answer))

    # Files.

    async def read(self, path: str, *, max_bytes: int = FILE_BYTES) -> bytes:
        """See :meth:`Sandbox.read`."""
        parts: list[bytes] = []
        head = {"do": "read", "path": self._path(path), "max_bytes": max_bytes}
        answer, _ = await self._ask(head, take=parts.append, room=max_bytes)
        if "error" in answer:
            raise SandboxError(file_failure(path, answer))
        return b"".join(parts)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See :meth:`Sandbox.write`."""
        chunks = [data[at : at + wire.CHUNK_BYTES] for at in range(0, len(data), wire.CHUNK_BYTES)] or [b""]
        heads = [
            {"do": "write", "path": self._path(path), "mode": mode, "first": at == 0, "last": at == len(chunks) - 1}
            for at in range(len(chunks))
        ]
        answer, _ = await self._ask(heads[0], chunks[0], more=list(zip(heads[1:], chunks[1:], strict=True)))
        if "error" in answer:
            raise SandboxError(file_failure(path, answer))

    async def list(self, path: str, *, max_entries: int = 10_000) -> list[FileInfo]:
        """See :meth:`Sandbox.list`."""
        answer, body = await self._ask({"do": "list", "path": self._path(path), "max_entries": max_entries})
        if "error" in answer:
            raise SandboxError(file_failure(path, answer))
        with self._understanding():
            return msgspec.json.decode(body, type=list[FileInfo])

    def _path(self, path: str) -> str:
        if len(path) >= LONGEST_PATH:
            raise SandboxError(model_failure(f"{path[:60]}...: the name is too long", errno="ENAMETOOLONG"))
        return os.path.join(self._spec.workdir, path)

    # Lifecycle.

    async def snapshot(self, name: str) -> Snapshot:
        """See :meth:`Sandbox.snapshot`."""
        if self._snapshots is None:
            raise ConfigurationError(f"sandbox snapshot {name!r}: needs a backend with a folder for snapshots")
        most = 2 * self._spec.limits.disk_bytes + 2048 * self._spec.limits.inodes
        async with self._standing_still(), self._snapshots.incoming(name, self.id) as parts:
            head = {"do": "snapshot", "max_bytes": most}
            asking = self._ask(head, take=parts.append, room=most, wait_s=600.0)
            answer, _ = await to_its_end(asking)  # until then commands are stopped
            if "error" in answer:
                raise SandboxError(file_failure("the snapshot", answer))
            return await parts.keep()

    async def pause(self) -> None:
        async with self._standing_still():
            try:
                await self._change({"do": "pause"})
                self._paused = True
            except asyncio.CancelledError:  # the request arrives all the same, now or later
                with contextlib.suppress(SandboxError):  # it has ended
                    if not self._paused:
                        await to_its_end(self.resume())
                raise

    async def resume(self) -> None:
        await self._change({"do": "resume"})
        self._paused = False
        self._move_on()

    async def renew(self, ttl_s: float) -> None:
        await self._change({"do": "renew", "ttl_s": ttl_s})

    async def _change(self, head: Head) -> None:
        answer, _ = await self._ask(head)
        if "error" in answer:
            raise SandboxError(os_failure(f"sandbox {head['do']}", answer))

    async def terminate(self) -> None:
        """See :meth:`Sandbox.terminate`."""
        if self._why is None:
            self._why = environment_failure(f"sandbox {self.id} was ended by its owner")
        if not self._gone.done() and self._zygote.alive:
            with contextlib.suppress(SandboxError):  # the zygote has died: so has the sandbox
                self._zygote.request({"do": "terminate", "id": self.id})
            await asyncio.wait({self._gone}, timeout=ENDING_S)
        self._close()
        if not self._gone.done() and self._zygote.alive:
            raise SandboxError(infrastructure_failure(f"something of sandbox {self.id} doesn't end"))

    def has_ended(self, code: int | None, oom_kills: int, why: SandboxFailure | None = None) -> None:
        """Handle the end of the sandbox, of which nothing is left. ``code``: of its first process, negative for a
        signal; None: the zygote has died. ``why``: the cause where known."""
        if (self._why or why) is None and code is not None and not self._broken and not self._heard_out.done():
            # Its last message may be unread, and tells more than its exit code: why it couldn't be made.
            self._heard_out.add_done_callback(lambda _: self._end(code, oom_kills, None))
        else:
            self._end(code, oom_kills, why)

    def _end(self, code: int | None, oom_kills: int, why: SandboxFailure | None) -> None:
        if self._why is None:
            self._why = why or self._cause(code, oom_kills)
        if not self._gone.done():
            self._gone.set_result(None)
        self._close()

    def _cause(self, code: int | None, oom_kills: int) -> SandboxFailure:
        evidence = {"oom_kills": oom_kills, **({} if code is None else {"code": code})}
        if self._broken:
            return infrastructure_failure(f"sandbox {self.id}: {self._broken}", evidence=evidence)
        if code is None:
            return infrastructure_failure("the process that makes sandboxes has died", evidence=evidence)
        if code == wire.EXIT_TTL:
            return msgspec.structs.replace(outlived(self.id, self._record.ttl_s), evidence=evidence)
        if oom_kills and code in (-9, 128 + 9):  # the second: as bubblewrap and shells report it
            return model_failure(f"sandbox {self.id}: out of memory as a whole", **evidence)
        return infrastructure_failure(f"sandbox {self.id} has died", evidence=evidence)

    def _close(self) -> None:
        if self._proxy is not None:
            self._proxy.close()
        if self.channel is not None:
            self.channel.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None
        if not self._ready.done():
            assert self._why is not None
            self._ready.set_exception(SandboxError(self._why))
            self._ready.exception()  # there may be no waiter
        for call in self._calls.values():
            if not call.answer.done() and self._why is not None:
                call.answer.set_exception(SandboxError(self._why))
                call.answer.exception()  # the caller may have given up
        self._calls.clear()

    # The socket.

    async def _ask(
        self,
        head: Head,
        body: bytes = b"",
        *,
        more: Sequence[tuple[Head, bytes]] = (),
        take: Take = lambda part: None,
        room: int = 0,
        wait_s: float | None = None,
    ) -> tuple[Head, bytes]:
        """Send a request and wait for its answer. If it doesn't come in time the sandbox is ended, as unusable."""
        if self._why is not None:
            raise SandboxError(self._why)
        writer = self._writer
        if writer is None:
            raise SandboxError(infrastructure_failure(f"sandbox {self.id} has closed its socket"))
        self._count += 1
        number = self._count
        call = self._calls[number] = _Call(take, room)
        wait_s = self._grace_s if wait_s is None else wait_s
        try:
            async with asyncio.timeout(max(wait_s, self._grace_s)):
                for part_head, part in ((head, body), *more):
                    writer.write(wire.frame({"id": number, **part_head}, part))
                    with contextlib.suppress(ConnectionError):
                        await writer.drain()
                        if self._writer is not None:
                            continue
                    break  # the sandbox has died: the answer gives the cause
            return await self._answer(call, wait_s, head["do"] == "exec")
        except TimeoutError:
            self._broken = f"no answer to {head['do']} in {wait_s:g} s"
            self._why = self._cause(None, 0)
            with contextlib.suppress(SandboxError):  # its lessee tries again
                await self.terminate()
            raise SandboxError(self._why) from None
        finally:
            self._calls.pop(number, None)

    async def _answer(self, call: _Call, wait_s: float, still_counts_not: bool) -> tuple[Head, bytes]:
        """Wait for a call's answer. Raises TimeoutError; time for which a command was stopped doesn't count."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + wait_s - self._stood_s
        while True:
            left_s = until_s + self._stood_s - loop.time()
            if self._still_since is not None and still_counts_not:
                left_s = max(left_s, LOOK_AGAIN_S)
            if left_s <= 0:
                raise TimeoutError
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    return await asyncio.shield(call.answer)

    @contextlib.asynccontextmanager
    async def _standing_still(self) -> AsyncIterator[None]:
        """Stop the time limits during the block, in which commands may be stopped."""
        began_s = asyncio.get_running_loop().time()
        first, self._still_since = self._still_since is None, self._still_since or began_s
        try:
            yield
        finally:
            if first and not self._paused:
                self._move_on()

    def _move_on(self) -> None:
        if self._still_since is not None:
            self._stood_s += asyncio.get_running_loop().time() - self._still_since
            self._still_since = None

    @contextlib.contextmanager
    def _understanding(self) -> Iterator[None]:
        """Parse an answer in the block: one that breaks the protocol ends the sandbox and raises SandboxError."""
        try:
            yield
        except ODD as error:
            self._give_up(error)
            raise SandboxError(self._cause(None, 0)) from error

    def _give_up(self, error: Exception) -> None:
        self._broken = f"it sent what can't be understood: {type(error).__name__}: {str(error)[:200]}"
        with contextlib.suppress(SandboxError):
            self._zygote.request({"do": "terminate", "id": self.id})

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Read frames until the socket ends. A frame that breaks the protocol ends the sandbox."""
        try:
            while True:
                head_bytes, body_bytes = wire.lengths(await reader.readexactly(wire.LENGTHS.size))
                head = wire.head_from(await reader.readexactly(head_bytes))
                body = await reader.readexactly(body_bytes) if body_bytes else b""
                if (taking := self._take(head, body)) is not None:
                    await taking  # a write to disk: nothing more is read meanwhile
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the sandbox has ended: the zygote reports how
        except ODD as error:
            self._give_up(error)
        finally:
            if not self._heard_out.done():
                self._heard_out.set_result(None)

    def _take(self, head: Head, body: bytes) -> Awaitable[None] | None:
        if "ready" in head:
            if not self._ready.done():
                self._ready.set_result(None)
            return None
        if "failed" in head:
            self._why = setup_failure(head)
            return None  # the sandbox's end follows
        call = self._calls.get(int(head["id"]))
        if call is None:
            return None  # the caller has given up
        if "more" in head:
            call.room -= len(body)
            if call.room < 0:
                raise wire.Malformed("more than was asked for")
            return call.take(body)
        if not call.answer.done():
            call.answer.set_result((head, body))
        return None
