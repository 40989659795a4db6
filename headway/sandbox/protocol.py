"""What every backend of sandboxes does, local or at a provider: the smallest protocol common to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from headway.records.sandbox import Capabilities, Command, ExecResult, FileInfo, SandboxInfo, SandboxSpec, Snapshot
from headway.records.sandbox_statistics import Reaped

FILE_BYTES = 16 << 20  # of a file that is read, unless told otherwise


class Sandbox(Protocol):
    """One sandbox that is ready.

    Lifecycle: *running* <-> *paused*, then *ended*: by ``terminate``, its time to live, its own death or its owner's.
    An ended one raises SandboxError from every call but ``terminate``. Invariant: nothing of it lives on, whatever its
    processes did; only snapshots stay. All calls raise SandboxError, whose failure says whose doing it was.

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
        """A regular file; no link, pipe or device is followed or opened."""
        ...

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Replace a file, or make it and the directories above it. No link is followed at its end."""
        ...

    async def list(self, path: str, *, max_entries: int = 10_000) -> list[FileInfo]: ...

    async def snapshot(self, name: str) -> Snapshot:
        """Its files as they are, all processes stopped meanwhile; made anew by `create(snapshot=...)`."""
        ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def renew(self, ttl_s: float) -> None: ...

    async def health(self) -> None:
        """Return if it answers; raise SandboxError if it doesn't."""
        ...

    async def terminate(self) -> None:
        """End it and everything in it; nothing to do if it has ended. Returns when nothing of it is left."""
        ...


class Backend(Protocol):
    """Where sandboxes are made."""

    async def create(
        self,
        spec: SandboxSpec,
        *,
        idempotency_key: str | None = None,
        labels: Mapping[str, str] | None = None,
        ttl_s: float | None = None,
        snapshot: Snapshot | None = None,
    ) -> Sandbox:
        """A new one, ready. The same ``idempotency_key`` again gives the same one, as long as it lives."""
        ...

    async def attach(self, sandbox_id: str) -> Sandbox: ...

    async def list(self, labels: Mapping[str, str] | None = None) -> list[SandboxInfo]:
        """Those with all of ``labels``."""
        ...

    async def terminate(self, sandbox_id: str) -> None:
        """Idempotent: one that is unknown has ended."""
        ...

    async def capabilities(self) -> Capabilities: ...

    async def preflight(
        self, specs: Sequence[SandboxSpec], *, live: int = 1, allow_unbounded: bool = False
    ) -> list[str]:
        """What would stop a run with these, ``live`` of them at once, quotas and images included: one line each, with
        the remedy. ``allow_unbounded``: go on though the memory of a sandbox can't be limited. Nothing is left."""
        ...

    async def close(self) -> None:
        """End all of its sandboxes."""
        ...


@runtime_checkable
class Reaping(Protocol):
    """A backend that can tell what owners on this machine have left who died without ending their sandboxes."""

    async def reap(self) -> list[Reaped]:
        """Remove that; what living owners have isn't touched. Takes its time in a thread, not on the event loop."""
        ...
