"""Implements the owner's side of a local sandbox: requests over its socket, and the causes of failures."""

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
from headway.runtime.supervision import run_to_completion
from headway.sandbox.failures import Head, file_failure, os_failure, request_of, result_of, setup_failure, ttl_failure
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
PROXY_URL = f"http://127.0.0.1:{PROXY_PORT}"
PROXY_ENVIRONMENT = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), PROXY_URL),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "localhost,127.0.0.1,::1"),
}
PartConsumer = Callable[[bytes], Awaitable[None] | None]  # consumes an answer's parts, as they arrive
PROTOCOL_ERRORS = (wire.Malformed, KeyError, TypeError, ValueError, OverflowError, RecursionError, msgspec.DecodeError)
MAX_PATH_CHARACTERS = 4096  # characters; the kernel counts bytes
PAUSE_POLL_S = 0.25  # interval of checks whether a paused sandbox was resumed
ENDING_S = 10.0  # from the request to end a sandbox until all its processes have ended


class ZygoteClient(Protocol):
    """The part of a zygote's handle that a sandbox needs: whether it is alive, and requests to it."""

    @property
    def alive(self) -> bool: ...

    def request(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None: ...


class _Call:
    """A pending request: its answer, and the consumer of the parts that precede it."""

    def __init__(self, take: PartConsumer, remaining_bytes: int) -> None:
        self.answer: asyncio.Future[tuple[Head, bytes]] = asyncio.get_running_loop().create_future()
        self.take = take
        self.remaining_bytes = remaining_bytes  # limit on further parts


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
        self._environment = {**ENVIRONMENT, **(PROXY_ENVIRONMENT if spec.network else {}), **spec.environment}
        self._zygote = zygote
        self._snapshots = snapshots
        self._grace_s = grace_s
        self.channel = channel  # to the standard input of the function that `run_function` runs
        self._calls: dict[int, _Call] = {}
        self._count = 0
        self._reader: asyncio.Task[None] | None = None
        self._writer: wire.FrameWriter | None = None
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = loop.create_future()
        self._gone: asyncio.Future[None] = loop.create_future()  # all its processes have ended
        self._socket_drained: asyncio.Future[None] = loop.create_future()  # its socket is read to the end
        self._failure: SandboxFailure | None = None  # why it has ended, or is ending
        self._broken = ""  # how it broke the protocol
        self._proxy: Proxy | None = None  # None: it may reach no host
        self._paused = False
        self._stopped_since_s: float | None = None  # since when commands, and their time limits, are stopped
        self._stopped_s = 0.0  # total time stopped before that

    @property
    def id(self) -> str:
        return self._record.id

    @property
    def ended(self) -> bool:
        return self._failure is not None

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

    async def open(self, owner_socket: socket.socket, timeout_s: float) -> None:
        """Connect to the sandbox by its socket and wait until it is ready. Raises SandboxError if it can't be made."""
        await self.serve(*await asyncio.open_unix_connection(sock=owner_socket, limit=1 << 20), timeout_s)

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
        """Return the use of each host that it requested, also after its end; None: it may reach no host."""
        return None if self._proxy is None else self._proxy.statistics()

    # Commands.

    async def run_function(self, name: str, *, timeout_s: float, max_output_bytes: int) -> ExecResult:
        """Run ``module:function`` of a preloaded module as a command; `channel` leads to its standard input. The caller
        checks the data that the function sends there. At most one function per sandbox."""
        command = Command(argv=[name], timeout_s=timeout_s, max_output_bytes=max_output_bytes)
        return await self._exec(command, {"function": name})

    async def exec(self, command: Command) -> ExecResult:
        """See :meth:`Sandbox.exec`."""
        return await self._exec(command, {})

    async def _exec(self, command: Command, extra_head: Head) -> ExecResult:
        limit_bytes, stdin = wire.BODY_BYTES // 2, command.stdin or b""
        if command.max_output_bytes > limit_bytes or len(stdin) > wire.BODY_BYTES:
            raise ConfigurationError(
                f"sandbox command max_output_bytes = {command.max_output_bytes}, stdin of {len(stdin)} bytes:"
                f" at most {limit_bytes} of output and {wire.BODY_BYTES} of input"
            )
        head = {**request_of(command, self._spec, self._environment), "stdin": command.stdin is not None, **extra_head}
        if len(wire.frame(head)) > wire.HEAD_BYTES:  # a shell's answer where the kernel refuses
            return ExecResult(exit_code=126, stderr=b"argument list too long\n")
        answer, body = await self._request(head, stdin, wait_s=command.timeout_s + self._grace_s)
        if "error" in answer:
            return self._start_failure_result(answer)
        with self._parsing():
            stdout_bytes = int(answer["stdout_bytes"])
            return result_of(answer, body[:stdout_bytes], body[stdout_bytes:], command.timeout_s)

    def _start_failure_result(self, answer: Head) -> ExecResult:
        """Make the result of a command that got no process: the model's code is to blame if it reached a limit."""
        errno_code, tasks = int(answer["error"]), int(answer.get("tasks", 0))
        limit = self._spec.limits.processes
        if errno_code == errno.EAGAIN and tasks >= limit - 2:
            failure = model_failure("no more processes: the sandbox has as many as it may", tasks=tasks, limit=limit)
            return ExecResult(exit_code=None, failure=failure)
        if errno_code == errno.ENOMEM:
            return ExecResult(exit_code=None, oom=True, failure=model_failure("no memory left to start a command"))
        if errno_code == errno.EBUSY:
            raise SandboxError(environment_failure(f"sandbox {self.id} is paused: resume it first"))
        raise SandboxError(os_failure("a command can't be started", answer))

    # Files.

    async def read(self, path: str, *, max_bytes: int = FILE_BYTES) -> bytes:
        """See :meth:`Sandbox.read`."""
        parts: list[bytes] = []
        head = {"do": "read", "path": self._path(path), "max_bytes": max_bytes}
        answer, _ = await self._request(head, take=parts.append, remaining_bytes=max_bytes)
        if "error" in answer:
            raise SandboxError(file_failure(path, answer))
        return b"".join(parts)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See :meth:`Sandbox.write`."""
        chunks = [data[i : i + wire.CHUNK_BYTES] for i in range(0, len(data), wire.CHUNK_BYTES)] or [b""]
        heads = [
            {"do": "write", "path": self._path(path), "mode": mode, "first": i == 0, "last": i == len(chunks) - 1}
            for i in range(len(chunks))
        ]
        answer, _ = await self._request(heads[0], chunks[0], frames=list(zip(heads[1:], chunks[1:], strict=True)))
        if "error" in answer:
            raise SandboxError(file_failure(path, answer))

    async def list(self, path: str, *, max_entries: int = 10_000) -> list[FileInfo]:
        """See :meth:`Sandbox.list`."""
        answer, body = await self._request({"do": "list", "path": self._path(path), "max_entries": max_entries})
        if "error" in answer:
            raise SandboxError(file_failure(path, answer))
        with self._parsing():
            return msgspec.json.decode(body, type=list[FileInfo])

    def _path(self, path: str) -> str:
        if len(path) >= MAX_PATH_CHARACTERS:
            raise SandboxError(model_failure(f"{path[:60]}...: the name is too long", errno="ENAMETOOLONG"))
        return os.path.join(self._spec.workdir, path)

    # Lifecycle.

    async def snapshot(self, name: str) -> Snapshot:
        """See :meth:`Sandbox.snapshot`."""
        if self._snapshots is None:
            raise ConfigurationError(f"sandbox snapshot {name!r}: needs a backend with a folder for snapshots")
        limit_bytes = 2 * self._spec.limits.disk_bytes + 2048 * self._spec.limits.inodes
        async with self._limits_stopped(), self._snapshots.incoming(name, self.id) as incoming:
            head = {"do": "snapshot", "max_bytes": limit_bytes}
            request_call = self._request(head, take=incoming.append, remaining_bytes=limit_bytes, wait_s=600.0)
            answer, _ = await run_to_completion(request_call)  # until then commands are stopped
            if "error" in answer:
                raise SandboxError(file_failure("the snapshot", answer))
            return await incoming.keep()

    async def pause(self) -> None:
        async with self._limits_stopped():
            try:
                await self._control({"do": "pause"})
                self._paused = True
            except asyncio.CancelledError:  # the request may still arrive, now or later
                with contextlib.suppress(SandboxError):  # it has ended
                    if not self._paused:
                        await run_to_completion(self.resume())
                raise

    async def resume(self) -> None:
        await self._control({"do": "resume"})
        self._paused = False
        self._restart_limits()

    async def renew(self, ttl_s: float) -> None:
        await self._control({"do": "renew", "ttl_s": ttl_s})

    async def _control(self, head: Head) -> None:
        answer, _ = await self._request(head)
        if "error" in answer:
            raise SandboxError(os_failure(f"sandbox {head['do']}", answer))

    async def terminate(self) -> None:
        """See :meth:`Sandbox.terminate`."""
        if self._failure is None:
            self._failure = environment_failure(f"sandbox {self.id} was ended by its owner")
        if not self._gone.done() and self._zygote.alive:
            with contextlib.suppress(SandboxError):  # the zygote has died: so has the sandbox
                self._zygote.request({"do": "terminate", "id": self.id})
            await asyncio.wait({self._gone}, timeout=ENDING_S)
        self._release()
        if not self._gone.done() and self._zygote.alive:
            raise SandboxError(infrastructure_failure(f"a process of sandbox {self.id} doesn't end"))

    def on_ended(self, code: int | None, oom_kills: int, why: SandboxFailure | None = None) -> None:
        """Handle the end of the sandbox, whose processes have all ended. ``code``: exit code of its first process,
        negative for a signal; None: the zygote has died. ``why``: the cause if known."""
        if (self._failure or why) is None and code is not None and not self._broken and not self._socket_drained.done():
            # Its last message may be unread, and has the reason of a failed setup, which the exit code lacks.
            self._socket_drained.add_done_callback(lambda _: self._end(code, oom_kills, None))
        else:
            self._end(code, oom_kills, why)

    def _end(self, code: int | None, oom_kills: int, why: SandboxFailure | None) -> None:
        if self._failure is None:
            self._failure = why or self._cause(code, oom_kills)
        if not self._gone.done():
            self._gone.set_result(None)
        self._release()

    def _cause(self, code: int | None, oom_kills: int) -> SandboxFailure:
        evidence = {"oom_kills": oom_kills, **({} if code is None else {"code": code})}
        if self._broken:
            return infrastructure_failure(f"sandbox {self.id}: {self._broken}", evidence=evidence)
        if code is None:
            return infrastructure_failure("the process that makes sandboxes has died", evidence=evidence)
        if code == wire.EXIT_TTL:
            return msgspec.structs.replace(ttl_failure(self.id, self._record.ttl_s), evidence=evidence)
        if oom_kills and code in (-9, 128 + 9):  # the second: as bubblewrap and shells report it
            return model_failure(f"sandbox {self.id}: out of memory as a whole", **evidence)
        return infrastructure_failure(f"sandbox {self.id} has died", evidence=evidence)

    def _release(self) -> None:
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
            assert self._failure is not None
            self._ready.set_exception(SandboxError(self._failure))
            self._ready.exception()  # there may be no waiter
        for call in self._calls.values():
            if not call.answer.done() and self._failure is not None:
                call.answer.set_exception(SandboxError(self._failure))
                call.answer.exception()  # the caller may have given up
        self._calls.clear()

    # The socket.

    async def _request(
        self,
        head: Head,
        body: bytes = b"",
        *,
        frames: Sequence[tuple[Head, bytes]] = (),
        take: PartConsumer = lambda part: None,
        remaining_bytes: int = 0,
        wait_s: float | None = None,
    ) -> tuple[Head, bytes]:
        """Send a request and wait for its answer. If none comes in time, the sandbox is ended as unusable."""
        if self._failure is not None:
            raise SandboxError(self._failure)
        writer = self._writer
        if writer is None:
            raise SandboxError(infrastructure_failure(f"sandbox {self.id} has closed its socket"))
        self._count += 1
        request_number = self._count
        call = self._calls[request_number] = _Call(take, remaining_bytes)
        wait_s = self._grace_s if wait_s is None else wait_s
        try:
            async with asyncio.timeout(max(wait_s, self._grace_s)):
                for part_head, part in ((head, body), *frames):
                    writer.write(wire.frame({"id": request_number, **part_head}, part))
                    with contextlib.suppress(ConnectionError):
                        await writer.drain()
                        if self._writer is not None:
                            continue
                    break  # the sandbox has died: the answer gives the cause
            return await self._answer(call, wait_s, head["do"] == "exec")
        except TimeoutError:
            self._broken = f"no answer to {head['do']} in {wait_s:g} s"
            self._failure = self._cause(None, 0)
            with contextlib.suppress(SandboxError):  # its leaseholder tries again
                await self.terminate()
            raise SandboxError(self._failure) from None
        finally:
            self._calls.pop(request_number, None)

    async def _answer(self, call: _Call, wait_s: float, exclude_stopped: bool) -> tuple[Head, bytes]:
        """Wait for a call's answer. ``exclude_stopped``: don't count the time for which commands were stopped. Raises
        TimeoutError."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_s - self._stopped_s
        while True:
            remaining_s = deadline_s + self._stopped_s - loop.time()
            if self._stopped_since_s is not None and exclude_stopped:
                remaining_s = max(remaining_s, PAUSE_POLL_S)
            if remaining_s <= 0:
                raise TimeoutError
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(remaining_s):
                    return await asyncio.shield(call.answer)

    @contextlib.asynccontextmanager
    async def _limits_stopped(self) -> AsyncIterator[None]:
        """Stop the time limits during the block, in which commands may be stopped."""
        started_s = asyncio.get_running_loop().time()
        is_outermost, self._stopped_since_s = self._stopped_since_s is None, self._stopped_since_s or started_s
        try:
            yield
        finally:
            if is_outermost and not self._paused:
                self._restart_limits()

    def _restart_limits(self) -> None:
        if self._stopped_since_s is not None:
            self._stopped_s += asyncio.get_running_loop().time() - self._stopped_since_s
            self._stopped_since_s = None

    @contextlib.contextmanager
    def _parsing(self) -> Iterator[None]:
        """Guard a block that parses an answer: one that violates the protocol ends the sandbox and raises
        SandboxError."""
        try:
            yield
        except PROTOCOL_ERRORS as error:
            self._end_on_protocol_error(error)
            raise SandboxError(self._cause(None, 0)) from error

    def _end_on_protocol_error(self, error: Exception) -> None:
        self._broken = f"it sent an unreadable message: {type(error).__name__}: {str(error)[:200]}"
        with contextlib.suppress(SandboxError):
            self._zygote.request({"do": "terminate", "id": self.id})

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Read frames until the socket ends. A frame that violates the protocol ends the sandbox."""
        try:
            while True:
                head_bytes, body_bytes = wire.lengths(await reader.readexactly(wire.LENGTHS.size))
                head = wire.head_from(await reader.readexactly(head_bytes))
                body = await reader.readexactly(body_bytes) if body_bytes else b""
                if (consumption := self._dispatch(head, body)) is not None:
                    await consumption  # a write to disk: nothing more is read meanwhile
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the sandbox has ended: the zygote reports the cause
        except PROTOCOL_ERRORS as error:
            self._end_on_protocol_error(error)
        finally:
            if not self._socket_drained.done():
                self._socket_drained.set_result(None)

    def _dispatch(self, head: Head, body: bytes) -> Awaitable[None] | None:
        if "ready" in head:
            if not self._ready.done():
                self._ready.set_result(None)
            return None
        if "failed" in head:
            self._failure = setup_failure(head)
            return None  # the sandbox's end follows
        call = self._calls.get(int(head["id"]))
        if call is None:
            return None  # the caller has given up
        if "more" in head:
            call.remaining_bytes -= len(body)
            if call.remaining_bytes < 0:
                raise wire.Malformed("more than was requested")
            return call.take(body)
        if not call.answer.done():
            call.answer.set_result((head, body))
        return None
