"""Implements a sandbox at a provider, by requests to the runner inside it (`hosted_runner.py`)."""

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
from headway.sandbox.failures import file_failure, request_of, result_of, ttl_failure
from headway.sandbox.guest.hosted_runner import MARKER
from headway.sandbox.hosted.provider import Provider, ShellResult, call_provider
from headway.sandbox.protocol import FILE_BYTES
from headway.sandbox.snapshot_store import note_hosted

T = TypeVar("T")
FOLDER = "/tmp/.headway"  # in a sandbox
ARGUMENT_BYTES = 1 << 16  # of a request in a command line; a longer one is sent as a file
GRACE_S = 20.0  # beyond a command's own time, for the provider
SIGNALS = range(129, 129 + 64)  # exit codes by which shells report a signal; Python and Go give a negative number
RUNNER_FILES = (
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
        on_gone: Callable[[str], None],
        snapshots: Path | None = None,
    ) -> None:
        """``snapshots``: the folder with notes of snapshots at the provider; None: they aren't noted."""
        self._info = info
        self._spec = spec
        self._provider = provider
        self._on_gone = on_gone
        self._snapshots = snapshots
        self._processes: list[Any] = []  # the provider's, which run before any command
        self._count = 0
        self._paused = False
        self._ready = False  # the runner has answered
        self._failure: SandboxFailure | None = None
        self._ends_s = 0.0  # by the loop's clock
        self._timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None
        self._set_ttl(spec.ttl_s)

    @property
    def id(self) -> str:
        return self._info.id

    @property
    def ended(self) -> bool:
        return self._failure is not None

    async def open(self) -> None:
        """Copy the runner into the sandbox and make the working directory. Raises SandboxError."""
        await self._call("put the runner in", self._provider.put(self.id, f"{FOLDER}/runner.zip", _runner_zip()))
        answer = await self._request({"do": "begin", "workdir": self._spec.workdir})
        if "error" in answer:
            raise SandboxError(environment_failure(f"{self._spec.workdir} can't be made: {answer['what']}"))
        with self._parsing():
            self._processes = list(answer["processes"])
        self._ready = True

    async def exec(self, command: Command) -> ExecResult:
        """See :meth:`Sandbox.exec`."""
        request = request_of(command, self._spec, self._spec.environment)
        request |= {"stdin": command.stdin or b"", "processes": self._processes}
        answer = await self._request(request, command.timeout_s)
        if answer.get("killed"):
            failure = model_failure(f"the process that ran the command {answer['killed']}", signal=9)
            return ExecResult(exit_code=None, signal=9, failure=failure)
        if "error" in answer:
            raise SandboxError(infrastructure_failure(f"a command can't be started: {answer['what']}"))
        with self._parsing():
            stdout, stderr = base64.b64decode(answer["stdout"]), base64.b64decode(answer["stderr"])
            return result_of(answer, stdout, stderr, command.timeout_s)

    async def read(self, path: str, *, max_bytes: int = FILE_BYTES) -> bytes:
        answer = await self._file_request({"do": "read", "path": path, "max_bytes": max_bytes})
        with self._parsing():
            return base64.b64decode(answer["data"])

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await self._file_request({"do": "write", "path": path, "mode": mode, "data": data})

    async def list(self, path: str, *, max_entries: int = 10_000) -> list[FileInfo]:
        answer = await self._file_request({"do": "list", "path": path, "max_entries": max_entries})
        with self._parsing():
            return msgspec.convert(answer["entries"], list[FileInfo])

    async def _file_request(self, request: dict[str, Any]) -> dict[str, Any]:
        path = request["path"]
        answer = await self._request({**request, "path": posixpath.join(self._spec.workdir, path)})
        if "error" in answer:
            raise SandboxError(file_failure(path, answer))
        if answer.get("killed"):
            raise SandboxError(model_failure(f"{path}: the watcher {answer['killed']}", errno="ESRCH"))
        return answer

    # Lifecycle.

    async def snapshot(self, name: str) -> Snapshot:
        """Take a snapshot at the provider, and note its id here; no data is transferred."""
        was_paused = self._paused
        if was_paused:  # E2B takes no snapshot of a paused sandbox
            await self.resume()
        snapshot_id = await self._call("take a snapshot", self._provider.snapshot(self.id, name))
        path = f"{self._provider.name}:{snapshot_id}"
        if self._snapshots is not None:
            with contextlib.suppress(OSError):  # the disk is full: the snapshot is then never deleted at the provider
                note_hosted(self._snapshots, path)
        if was_paused:
            await self.pause()
        return Snapshot(path=path, bytes=0, sha256="")

    async def pause(self) -> None:
        await self._call("pause", self._provider.pause(self.id))
        self._paused = True

    async def resume(self) -> None:
        await self._call("resume", self._provider.resume(self.id, self._ttl_s))
        self._paused = False

    async def renew(self, ttl_s: float) -> None:
        await self._call("give it more time", self._provider.renew(self.id, ttl_s))
        self._set_ttl(ttl_s)

    def _set_ttl(self, ttl_s: float) -> None:
        """Restart the time to live. A timer here enforces it where the provider's can't be renewed."""
        loop = asyncio.get_running_loop()
        self._ttl_s, self._ends_s = ttl_s, loop.time() + ttl_s
        if self._timer is not None:
            self._timer.cancel()
        if self._provider.life_s is not None:
            self._timer = loop.call_later(ttl_s, self._on_ttl)

    def _on_ttl(self) -> None:
        self._failure = self._failure or ttl_failure(self.id, self._ttl_s)
        self._ending = asyncio.create_task(self._end_late())

    async def _end_late(self) -> None:
        with contextlib.suppress(SandboxError):  # its leaseholder tries again
            await self.terminate()

    async def terminate(self) -> None:
        """See :meth:`Sandbox.terminate`. Raises SandboxError when the provider's call fails."""
        if self._failure is None:
            self._failure = environment_failure(f"sandbox {self.id} was ended by its owner")
        await call_provider(self._provider, f"end {self.id}", self._provider.terminate(self.id))
        if self._timer is not None:  # until here the timer is a second try
            self._timer.cancel()
        self._on_gone(self.id)

    # Requests.

    async def _request(self, request: dict[str, Any], timeout_s: float = 0.0) -> dict[str, Any]:
        """Send a request and return the runner's answer. An answer with ``killed`` means that the runner was killed
        before it answered, and that the sandbox is alive."""
        if self._paused:
            raise SandboxError(environment_failure(f"sandbox {self.id} is paused: resume it first"))
        self._count += 1
        request_path = f"{FOLDER}/{self._count}"
        is_long = len(request.get("data", b"")) + len(request.get("stdin", b"")) > ARGUMENT_BYTES
        encoded = await asyncio.to_thread(_encode, request) if is_long else _encode(request)  # it would block the loop
        if len(encoded) > ARGUMENT_BYTES:
            await self._call("put a request in", self._provider.put(self.id, request_path, encoded))
            encoded = f"@{request_path}".encode()
        line = (
            f"PYTHONPATH={FOLDER}/runner.zip exec python3 -m headway.sandbox.guest.hosted_runner"
            f" {shlex.quote(encoded.decode())} {request_path}.out"
        )
        limit_s = timeout_s + GRACE_S + self._provider.settings.request_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                shell_result = await self._call("run a command", self._provider.run(self.id, line, timeout_s + GRACE_S))
        except TimeoutError:
            self._failure = infrastructure_failure(f"no answer of sandbox {self.id} in {limit_s:g} s")
            with contextlib.suppress(SandboxError):
                await call_provider(self._provider, f"end {self.id}", self._provider.terminate(self.id))
            raise SandboxError(self._failure) from None
        return await self._parse_answer(shell_result)

    async def _parse_answer(self, shell: ShellResult) -> dict[str, Any]:
        answer_json = shell.stdout.rpartition(f"\n{MARKER}")[2] if f"\n{MARKER}" in shell.stdout else ""
        if not answer_json:
            if shell.exit_code in (126, 127):
                raise SandboxError(environment_failure("there is no python3 in the sandbox: use an image that has it"))
            if shell.exit_code in SIGNALS or shell.exit_code < 0 or (shell.exit_code == 1 and self._ready):
                return {"killed": "was ended or removed"}  # by the sandbox's code: the runner worked before any ran
            message = f"sandbox {self.id} gave no answer, with exit code {shell.exit_code}"
            raise SandboxError(infrastructure_failure(message, evidence={"exit_code": shell.exit_code}))
        with self._parsing():
            answer = json.loads(answer_json)
            if "in" in answer:
                content = await self._call("take an answer out", self._provider.get(self.id, str(answer["in"])))
                answer = json.loads(content)
            return dict(answer)

    async def _call(self, action: str, call: Awaitable[T]) -> T:
        if self._failure is not None:
            if asyncio.iscoroutine(call):
                call.close()
            raise SandboxError(self._failure)
        try:
            return await call_provider(self._provider, action, call)
        except SandboxError as error:
            if self._failure is None and not error.failure.evidence.get("gone"):
                raise
            is_expired = asyncio.get_running_loop().time() >= self._ends_s
            self._failure = self._failure or (ttl_failure(self.id, self._ttl_s) if is_expired else error.failure)
            self._on_gone(self.id)
            raise SandboxError(self._failure) from error

    @contextlib.contextmanager
    def _parsing(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
            message = f"sandbox {self.id} sent an unreadable message: {str(error)[:200]}"
            raise SandboxError(infrastructure_failure(message, retry=False)) from error


def _encode(request: Mapping[str, Any]) -> bytes:
    return base64.b64encode(json.dumps(request, default=lambda data: base64.b64encode(data).decode()).encode())


def _runner_zip() -> bytes:
    """Return the zip with the runner's modules, which is copied into each sandbox."""
    package = Path(__file__).resolve().parents[2]
    zip_buffer = io.BytesIO()
    with zipfile.ZipFile(zip_buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in RUNNER_FILES:
            archive.writestr(f"headway/{name}", (package / name).read_bytes())
    return zip_buffer.getvalue()
