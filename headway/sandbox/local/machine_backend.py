"""Defines the base of backends whose sandboxes run our own first process: their maker, their records, preflight."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar

from headway.records.errors import ConfigurationError
from headway.records.sandbox import (
    SandboxError,
    SandboxFailure,
    SandboxInfo,
    SandboxSpec,
    Snapshot,
    infrastructure_failure,
)
from headway.runtime.supervision import run_to_completion
from headway.sandbox import leftovers
from headway.sandbox.local.sandbox import LocalSandbox
from headway.sandbox.machine import no_space
from headway.sandbox.snapshot_store import SnapshotFolder


class SandboxMaker(Protocol):
    """The process that makes a backend's sandboxes, and with which they die: a zygote or a Docker daemon."""

    alive: bool

    async def close(self) -> None: ...


M = TypeVar("M", bound=SandboxMaker)


class MachineBackend(ABC, Generic[M]):
    """A `Backend` on this machine.

    Lifecycle: made -> *started* (by `start`, or the first call that needs it) -> *closed*. When its maker dies its
    sandboxes die with it; the next `create` starts another.
    """

    name: str
    _start_remark = ""  # appended to the message if no sandbox can be started

    def __init__(self, run: str, snapshots: str | Path | None, snapshot_bytes: int | None) -> None:
        self._run = run
        self._snapshots = SnapshotFolder(Path(snapshots), snapshot_bytes) if snapshots is not None else None
        self._maker: M | None = None
        self._starting = asyncio.Lock()
        self._sandboxes: dict[str, LocalSandbox] = {}
        self._closed = False

    async def start(self) -> M:
        """Return the maker; if none is alive, remove dead owners' resources and start one."""
        async with self._starting:
            if self._closed:
                raise SandboxError(infrastructure_failure("the backend is closed", retry=False))
            if self._maker is not None and not self._maker.alive:
                await self._maker.close()  # and again by the next call, if this one is cancelled
                self._maker = None
            if self._maker is None:
                self._maker = await self._new_maker()
            return self._maker

    @abstractmethod
    async def _new_maker(self) -> M: ...

    async def create(
        self, spec: SandboxSpec, *, labels: Mapping[str, str] | None = None, snapshot: Snapshot | None = None
    ) -> LocalSandbox:
        """See :meth:`Backend.create`."""
        spec.limits.check()
        self._check(spec)
        maker = await self.start()
        record = leftovers.SandboxRecord(
            id=f"sb-{secrets.token_hex(6)}",
            backend=self.name,
            run=self._run,
            labels=dict(labels or {}),
            owner_pid=os.getpid(),
            owner_started=leftovers.started(os.getpid()) or 0,
            ttl_s=spec.ttl_s,
            created_s=time.time(),
        )
        return await self._create(maker, record, spec, snapshot)

    @abstractmethod
    def _check(self, spec: SandboxSpec) -> None:
        """Raise ConfigurationError for a specification that this backend can't serve."""

    @abstractmethod
    async def _create(
        self, maker: M, record: leftovers.SandboxRecord, spec: SandboxSpec, snapshot: Snapshot | None
    ) -> LocalSandbox: ...

    @contextlib.asynccontextmanager
    async def _terminate_on_error(self, sandbox: LocalSandbox) -> AsyncIterator[None]:
        """Register the sandbox, and end it if the block, which makes it ready, raises."""
        self._sandboxes[sandbox.id] = sandbox
        try:
            if self._closed:  # since `create` requested the maker
                raise SandboxError(infrastructure_failure("the backend is closed", retry=False))
            yield
        except BaseException:
            with contextlib.suppress(SandboxError):  # it stays recorded; the first error is the one to report
                await run_to_completion(sandbox.terminate())
            raise

    def _on_ended(self, name: str, code: int | None, oom_kills: int, why: SandboxFailure | None) -> None:
        """Handle the maker's report of a sandbox's end; code None: the maker died. ``why``: the cause where known."""
        sandbox = self._sandboxes.pop(name, None)
        if sandbox is not None:
            sandbox.on_ended(code, oom_kills, why)

    async def list(self, labels: Mapping[str, str] | None = None) -> list[SandboxInfo]:
        required_labels = dict(labels or {}).items()
        return [sandbox.info for sandbox in self._sandboxes.values() if required_labels <= sandbox.info.labels.items()]

    async def preflight(self, spec: SandboxSpec, *, live: int = 1) -> list[str]:
        """See :meth:`Backend.preflight`."""
        try:
            await self.start()
        except (SandboxError, ConfigurationError, OSError, TimeoutError) as error:
            return [f"sandboxes can't be started here: {error}{self._start_remark}"]
        problems: list[str] = []
        free = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))
        needed = live * self._open_files(spec)
        if free < needed + 64:
            problems.append(f"{live} sandboxes need {needed} open files, {free} are left: ulimit -n {needed + 1024}")
        return problems + [problem for path, need in self._disk_needs(spec, live) if (problem := no_space(path, need))]

    def _open_files(self, spec: SandboxSpec) -> int:
        """Return the number of open files that a sandbox needs in this process."""
        return 1

    def _disk_needs(self, spec: SandboxSpec, live: int) -> list[tuple[Path, int]]:
        """Return the folders on this machine that are written to, with the free bytes that each needs."""
        return [] if self._snapshots is None else [(self._snapshots.path, spec.limits.disk_bytes)]

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(box.terminate() for box in list(self._sandboxes.values())), return_exceptions=True)
        async with self._starting:
            if self._maker is not None:
                await self._maker.close()
                self._maker = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
