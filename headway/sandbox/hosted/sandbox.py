"""A sandbox at a provider: requests through the runner inside it (`hosted_runner.py`), and their failures."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import posixpath
import shlex
import zipfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headway.records.sandbox import (
    Command,
    ExecResult,
    FileInfo,
    SandboxError,
    SandboxFailure,
    SandboxInfo,
    SandboxSpec,
    Snapshot,
    environment_failure,
    infrastructure_failure,
    model_failure,
)
from headway.sandbox.failures import file_failure, outlived, request_of, result_of
from headway.sandbox.guest.hosted_runner import MARK
from headway.sandbox.hosted.provider import Provider, ShellResult, asked
from headway.sandbox.protocol import FILE_BYTES
from headway.sandbox.snapshot_store import note_hosted

T = TypeVar("T")
FOLDER = "/tmp/.headway"  # in a sandbox
ARGUMENT_BYTES = 1 << 16  # of a request in a command line; a longer one goes as a file
GRACE_S = 20.0  # beyond a command's own time, for the provider
SIGNALS = range(129, 129 + 64)  # exit codes by which shells report a signal; Python and Go give a negative number
IN_RUNNER = (
    "__init__.py",
    "sandbox/__init__.py",
    "sandbox/guest/__init__.py",
    "sandbox/guest/wire.py",
    "sandbox/guest/files.py",
    "sandbox/guest/hosted_runner.py",
)


class HostedSandbox:
    """A `Sandbox` at a provider."""

    def __init__(
        self,
        info: SandboxInfo,
        spec: SandboxSpec,
        provider: Provider[Any],
        gone: Callable[[str], None],
        snapshots: Path | None = None,
    ) -> None:
        """``snapshots``: the folder with notes of snapshots at the provider; None: they aren't noted."""
        self._info = info
        self._spec = spec
        self._provider = provider
        self._tell_gone = gone
        self._snapshots = snapshots
        self._processes: list[Any] = []  # the provider's own, there before any command
        self._count = 0
        self._paused = False
        self._ready = False  # the runner has answered
        self._why: SandboxFailure | None = None
        self._ends_s = 0.0  # by the loop's clock
        self._timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None
        self._lasts(spec.ttl_s)

    @property
    def id(self) -> str:
        return self._info.id

    @property
    def ended(self) -> bool:
        return self._why is not None

    async def open(self) -> None:
        """Copy the runner into the sandbox and make the working directory. Raises SandboxError."""
        await self._asked("put the runner in", self._provider.put(self.id, f"{FOLDER}/runner.zip", _runner()))
        said = await self._ask({"do": "begin", "workdir": self._spec.workdir})
        if "error" in said:
            raise SandboxError(environment_failure(f"{self._spec.workdir} can't be made: {said['what']}"))
        with self._understanding():
            self._processes = list(said["processes"])
        self._ready = True

    async def exec(self, command: Command) -> ExecResult:
        """See :meth:`Sandbox.exec`."""
        request = request_of(command, self._spec, self._spec.environment)
        request |= {"stdin": command.stdin or b"", "processes": self._processes}
        said = await self._ask(request, command.timeout_s)
        if said.get("killed"):
            failure = model_failure(f"what watched over the command {said['killed']}", signal=9)
            return ExecResult(exit_code=None, signal=9, failure=failure)
        if "error" in said:
            raise SandboxError(infrastructure_failure(f"a command can't be started: {said['what']}"))
        with self._understanding():
            stdout, stderr = base64.b64decode(said["stdout"]), base64.b64decode(said["stderr"])
            return result_of(said, stdout, stderr, command.timeout_s)

    async def read(self, path: str, *, max_bytes: int = FILE_BYTES) -> bytes:
        said = await self._file({"do": "read", "path": path, "max_bytes": max_bytes})
        with self._understanding():
            return base64.b64decode(said["data"])

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await self._file({"do": "write", "path": path, "mode": mode, "data": data})

    async def list(self, path: str, *, max_entries: int = 10_000) -> list[FileInfo]:
        said = await self._file({"do": "list", "path": path, "max_entries": max_entries})
        with self._understanding():
            return msgspec.convert(said["entries"], list[FileInfo])

    async def _file(self, request: dict[str, Any]) -> dict[str, Any]:
        path = request["path"]
        said = await self._ask({**request, "path": posixpath.join(self._spec.workdir, path)})
        if "error" in said:
            raise SandboxError(file_failure(path, said))
        if said.get("killed"):
            raise SandboxError(model_failure(f"{path}: what should have looked {said['killed']}", errno="ESRCH"))
        return said

    # Its life.

    async def snapshot(self, name: str) -> Snapshot:
        """Take a snapshot at the provider, and note its id here; no data is transferred."""
        paused = self._paused
        if paused:  # E2B takes no snapshot of a paused sandbox
            await self.resume()
        kept = await self._asked("take a snapshot", self._provider.snapshot(self.id, name))
        path = f"{self._provider.name}:{kept}"
        if self._snapshots is not None:
            with contextlib.suppress(OSError):  # the disk is full: the snapshot is then never deleted at the provider
                note_hosted(self._snapshots, path)
        if paused:
            await self.pause()
        return Snapshot(path=path, bytes=0, sha256="")

    async def pause(self) -> None:
        await self._asked("pause", self._provider.pause(self.id))
        self._paused = True

    async def resume(self) -> None:
        await self._asked("resume", self._provider.resume(self.id, self._ttl_s))
        self._paused = False

    async def renew(self, ttl_s: float) -> None:
        await self._asked("give it more time", self._provider.renew(self.id, ttl_s))
        self._lasts(ttl_s)

    def _lasts(self, ttl_s: float) -> None:
        """Start the time to live anew. Enforced by a timer here where the provider's can't be renewed."""
        loop = asyncio.get_running_loop()
        self._ttl_s, self._ends_s = ttl_s, loop.time() + ttl_s
        if self._timer is not None:
            self._timer.cancel()
        if self._provider.life_s is not None:
            self._timer = loop.call_later(ttl_s, self._time_is_over)

    def _time_is_over(self) -> None:
        self._why = self._why or outlived(self.id, self._ttl_s)
        self._ending = asyncio.create_task(self._end_late())

    async def _end_late(self) -> None:
        with contextlib.suppress(SandboxError):  # its lessee tries again
            await self.terminate()

    async def terminate(self) -> None:
        """See :meth:`Sandbox.terminate`. Raises SandboxError when the provider's call fails."""
        if self._why is None:
            self._why = environment_failure(f"sandbox {self.id} was ended by its owner")
        await asked(self._provider, f"end {self.id}", self._provider.terminate(self.id))
        if self._timer is not None:  # until here the timer is a second try
            self._timer.cancel()
        self._tell_gone(self.id)

    # Requests.

    async def _ask(self, request: dict[str, Any], timeout_s: float = 0.0) -> dict[str, Any]:
        """Send a request and return the runner's answer; with ``killed``: it gave none, and the sandbox lives."""
        if self._paused:
            raise SandboxError(environment_failure(f"sandbox {self.id} is paused: resume it first"))
        self._count += 1
        file = f"{FOLDER}/{self._count}"
        long = len(request.get("data", b"")) + len(request.get("stdin", b"")) > ARGUMENT_BYTES
        told = await asyncio.to_thread(_told, request) if long else _told(request)  # encoding would block the loop
        if len(told) > ARGUMENT_BYTES:
            await self._asked("put a request in", self._provider.put(self.id, file, told))
            told = f"@{file}".encode()
        line = (
            f"PYTHONPATH={FOLDER}/runner.zip exec python3 -m headway.sandbox.guest.hosted_runner"
            f" {shlex.quote(told.decode())} {file}.out"
        )
        limit_s = timeout_s + GRACE_S + self._provider.settings.request_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                ran = await self._asked("run a command", self._provider.run(self.id, line, timeout_s + GRACE_S))
        except TimeoutError:
            self._why = infrastructure_failure(f"no answer of sandbox {self.id} in {limit_s:g} s")
            with contextlib.suppress(SandboxError):
                await asked(self._provider, f"end {self.id}", self._provider.terminate(self.id))
            raise SandboxError(self._why) from None
        return await self._said(ran)

    async def _said(self, ran: ShellResult) -> dict[str, Any]:
        last = ran.stdout.rpartition(f"\n{MARK}")[2] if f"\n{MARK}" in ran.stdout else ""
        if not last:
            if ran.exit_code in (126, 127):
                raise SandboxError(environment_failure("there is no python3 in the sandbox: use an image that has it"))
            if ran.exit_code in SIGNALS or ran.exit_code < 0 or (ran.exit_code == 1 and self._ready):
                return {"killed": "was ended or taken away"}  # by the sandbox's code: the runner worked before any ran
            what = f"sandbox {self.id} gave no answer, with exit code {ran.exit_code}"
            raise SandboxError(infrastructure_failure(what, evidence={"exit_code": ran.exit_code}))
        with self._understanding():
            said = json.loads(last)
            if "in" in said:
                said = json.loads(await self._asked("take an answer out", self._provider.get(self.id, str(said["in"]))))
            return dict(said)

    async def _asked(self, what: str, call: Awaitable[T]) -> T:
        if self._why is not None:
            if asyncio.iscoroutine(call):
                call.close()
            raise SandboxError(self._why)
        try:
            return await asked(self._provider, what, call)
        except SandboxError as error:
            if self._why is None and not error.failure.evidence.get("gone"):
                raise
            over = asyncio.get_running_loop().time() >= self._ends_s
            self._why = self._why or (outlived(self.id, self._ttl_s) if over else error.failure)
            self._tell_gone(self.id)
            raise SandboxError(self._why) from error

    @contextlib.contextmanager
    def _understanding(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
            what = f"sandbox {self.id} sent what can't be understood: {str(error)[:200]}"
            raise SandboxError(infrastructure_failure(what, retry=False)) from error


def _told(request: Mapping[str, Any]) -> bytes:
    return base64.b64encode(json.dumps(request, default=lambda data: base64.b64encode(data).decode()).encode())


def _runner() -> bytes:
    """The zip with the runner's modules that is copied into each sandbox."""
    package = Path(__file__).resolve().parents[2]
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in IN_RUNNER:
            archive.writestr(f"headway/{name}", (package / name).read_bytes())
    return made.getvalue()
