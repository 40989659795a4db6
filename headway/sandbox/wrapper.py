"""Defines a base for wrappers of a sandbox, which forwards every call that a subclass doesn't override."""

from __future__ import annotations

from headway.records.sandbox import Command, ExecResult, FileInfo, Snapshot
from headway.sandbox.protocol import FILE_BYTES, Sandbox


class SandboxWrapper:
    """A `Sandbox` that forwards to another, with hooks before commands and before any use."""

    def __init__(self, box: Sandbox) -> None:
        self._box = box

    @property
    def id(self) -> str:
        return self._box.id

    @property
    def ended(self) -> bool:
        return self._box.ended

    def inner(self) -> Sandbox:
        """Return the sandbox that gets the next call. May raise SandboxError instead."""
        return self._box

    async def exec(self, command: Command) -> ExecResult:
        await self.before_exec(command.timeout_s)
        return await self.inner().exec(command)

    async def before_exec(self, timeout_s: float) -> None:
        """Hook: called before a command that may run for ``timeout_s``."""
        await self.before_use(timeout_s)

    async def before_use(self, longest_s: float = 0.0) -> None:
        """Hook: called before any command or file access, which may take ``longest_s``."""

    async def read(self, path: str, *, max_bytes: int = FILE_BYTES) -> bytes:
        await self.before_use()
        return await self.inner().read(path, max_bytes=max_bytes)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await self.before_use()
        await self.inner().write(path, data, mode=mode)

    async def list(self, path: str, *, max_entries: int = 10_000) -> list[FileInfo]:
        await self.before_use()
        return await self.inner().list(path, max_entries=max_entries)

    async def snapshot(self, name: str) -> Snapshot:
        await self.before_use()
        return await self.inner().snapshot(name)

    async def pause(self) -> None:
        await self.inner().pause()

    async def resume(self) -> None:
        await self.inner().resume()

    async def renew(self, ttl_s: float) -> None:
        await self.inner().renew(ttl_s)

    async def terminate(self) -> None:
        await self._box.terminate()
