"""A stand-in for a backend on the injected clock: nothing runs, and everything takes as long as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from headway.records.sandbox import (
    Capabilities,
    Command,
    ExecResult,
    FileInfo,
    SandboxError,
    SandboxFailure,
    SandboxInfo,
    SandboxSpec,
    Snapshot,
    environment_failure,
)
from headway.runtime.clock import Clock
from headway.sandbox.protocol import FILE_BYTES

Answer = Callable[[Sequence[str]], ExecResult]


class FakeSandbox:
    """Its files are a dictionary, its commands one function."""

    def __init__(self, backend: FakeBackend, info: SandboxInfo) -> None:
        self._backend = backend
        self._info = info
        self.files: dict[str, bytes] = {}
        self.ended = False

    @property
    def id(self) -> str:
        return self._info.id

    @property
    def info(self) -> SandboxInfo:
        return self._info

    async def exec(self, command: Command) -> ExecResult:
        await self._after(self._backend.exec_s)
        return self._backend.answer(command.argv)

    async def read(self, path: str, *, max_bytes: int = FILE_BYTES) -> bytes:
        await self._after(0.0)
        if path not in self.files:
            raise SandboxError(environment_failure(f"{path}: no such file"))
        return self.files[path]

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await self._after(0.0)
        self.files[path] = data

    async def list(self, path: str, *, max_entries: int = 10_000) -> list[FileInfo]:
        await self._after(0.0)
        return [FileInfo(name=name, kind="file", size_bytes=len(data)) for name, data in sorted(self.files.items())]

    async def snapshot(self, name: str) -> Snapshot:
        await self._after(0.0)
        self._backend.snapshots[name] = dict(self.files)
        return Snapshot(path=name, bytes=sum(map(len, self.files.values())), sha256="")

    async def pause(self) -> None:
        await self._after(0.0)
        if not self._backend.can_pause:
            raise SandboxError(environment_failure("it has no pauses"))

    async def resume(self) -> None:
        await self._after(0.0)

    async def renew(self, ttl_s: float) -> None:
        await self._after(0.0)
        self._backend.renewals.append(ttl_s)

    async def terminate(self) -> None:
        await self._backend.clock.sleep(self._backend.end_s)
        if self._backend.end_failures:
            raise SandboxError(self._backend.end_failures.pop(0))
        self.die()

    def die(self) -> None:
        self.ended = True
        self._backend.sandboxes.pop(self.id, None)

    async def _after(self, seconds: float) -> None:
        if self.ended:
            raise SandboxError(environment_failure(f"sandbox {self.id} has ended"))
        await self._backend.clock.sleep(seconds)


class FakeBackend:
    """``start_s``, ``exec_s``, ``end_s``: how long these take; ``slow_starts``: the next ones, in turn. ``failures``:
    of the next starts, in turn; None: it succeeds. ``end_failures``: of the next ends. ``can_pause``: its sandboxes can
    stand still."""

    def __init__(
        self,
        clock: Clock,
        *,
        start_s: float = 0.01,
        exec_s: float = 0.005,
        end_s: float = 0.0,
        answer: Answer = lambda argv: ExecResult(exit_code=0),
        failures: Sequence[SandboxFailure | None] = (),
        slow_starts: Sequence[float] = (),
        end_failures: Sequence[SandboxFailure] = (),
        can_pause: bool = True,
    ) -> None:
        self.clock = clock
        self.can_pause = can_pause
        self.start_s = start_s
        self.exec_s = exec_s
        self.answer = answer
        self.sandboxes: dict[str, FakeSandbox] = {}
        self.snapshots: dict[str, dict[str, bytes]] = {}
        self.starting = self.most_starting = self.made = 0
        self.most_living = 0
        self.asked: list[dict[str, str]] = []  # labels of all starts, in order
        self.renewals: list[float] = []
        self.end_s = end_s
        self.end_failures = list(end_failures)
        self._failures = list(failures)
        self._slow_starts = list(slow_starts)

    async def create(
        self, spec: SandboxSpec, *, labels: Mapping[str, str] | None = None, snapshot: Snapshot | None = None
    ) -> FakeSandbox:
        self.asked.append(dict(labels or {}))
        self.starting += 1
        self.most_starting = max(self.most_starting, self.starting)
        self.most_living = max(self.most_living, self.starting + len(self.sandboxes))
        try:
            await self.clock.sleep(self._slow_starts.pop(0) if self._slow_starts else self.start_s)
        except asyncio.CancelledError:
            await self.clock.sleep(self.end_s)  # what there is of it is ended
            raise
        finally:
            self.starting -= 1
        failure = self._failures.pop(0) if self._failures else None
        if failure is not None:
            raise SandboxError(failure)
        self.made += 1
        info = SandboxInfo(id=f"fake-{self.made}", labels=dict(labels or {}), state="running")
        box = self.sandboxes[info.id] = FakeSandbox(self, info)
        box.files = dict(self.snapshots[snapshot.path]) if snapshot is not None else {}
        return box

    async def list(self, labels: Mapping[str, str] | None = None) -> list[SandboxInfo]:
        wanted = dict(labels or {}).items()
        return [box.info for box in self.sandboxes.values() if wanted <= box.info.labels.items()]

    async def capabilities(self) -> Capabilities:
        return Capabilities(
            backend="fake",
            memory_limit=True,
            process_limit=True,
            cpu_limit=True,
            disk_limit=True,
            pause=self.can_pause,
            snapshot=True,
        )

    async def preflight(self, spec: SandboxSpec, *, live: int = 1) -> list[str]:
        return []

    async def close(self) -> None:
        for box in list(self.sandboxes.values()):
            await box.terminate()
