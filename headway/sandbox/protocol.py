"""Defines the Protocols of sandboxes and their backends, local or at a provider: the interface common to all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from headway.records.sandbox import Capabilities, Command, ExecResult, FileInfo, SandboxInfo, SandboxSpec, Snapshot
from headway.records.sandbox_statistics import Reaped

FILE_BYTES = 16 << 20  # of a file that is read, by default


class Sandbox(Protocol):
    """A sandbox that is ready.

    Lifecycle: *running* <-> *paused*, then *ended*: by ``terminate``, its time to live, its own death or its owner's.
    An ended sandbox raises SandboxError from every call but ``terminate``. Invariant: no process of an ended sandbox
    keeps running; only snapshots stay. All calls raise SandboxError, whose failure names the side that caused it.

    Example: ``exec(Command(argv=["sh", "-c", "while :; do :; done"], timeout_s=2))`` ends after two seconds with
    ``timed_out``, a failure of the model's code whose reward is valid; a machine that kills the sandbox meanwhile
    raises SandboxError with a failure of the infrastructure.
    """

    @property
    def id(self) -> str: ...

    @property
    def ended(self) -> bool: ...

    async def exec(self, command: Command) -> ExecResult:
        """Run a command to its end."""
        ...

    async def read(self, path: str, *, max_bytes: int = FILE_BYTES) -> bytes:
        """Return the bytes of a regular file; no link, pipe or device is followed or opened."""
        ...

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Replace a file, or create it and its parent directories. A link at the last component isn't followed."""
        ...

    async def list(self, path: str, *, max_entries: int = 10_000) -> list[FileInfo]: ...

    async def snapshot(self, name: str) -> Snapshot:
        """Save its files while all its processes are stopped; `create(snapshot=...)` restores them."""
        ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def renew(self, ttl_s: float) -> None: ...

    async def terminate(self) -> None:
        """End the sandbox and all its processes; no-op if it has ended. Returns when its resources are removed."""
        ...


class SandboxSource(Protocol):
    """The part of a `Backend` that leases need."""

    async def create(
        self, spec: SandboxSpec, *, labels: Mapping[str, str] | None = None, snapshot: Snapshot | None = None
    ) -> Sandbox:
        """Make a sandbox and return it ready."""
        ...

    async def capabilities(self) -> Capabilities: ...


class Backend(SandboxSource, Protocol):
    """Makes sandboxes."""

    async def list(self, labels: Mapping[str, str] | None = None) -> list[SandboxInfo]:
        """Return this owner's sandboxes with all of ``labels``."""
        ...

    async def preflight(self, spec: SandboxSpec, *, live: int = 1) -> list[str]:
        """Return problems, quotas included, that would stop a run with ``live`` such sandboxes at once: a line with the
        remedy for each. Makes no sandbox; `preflight.findings` does."""
        ...

    async def close(self) -> None:
        """End all sandboxes of this backend."""
        ...


@runtime_checkable
class Reaping(Protocol):
    """A backend that can find sandboxes left by owners on this machine that died without ending them."""

    async def reap(self) -> list[Reaped]:
        """Remove dead owners' resources; living owners' sandboxes aren't touched. Doesn't block the event loop."""
        ...
