"""The sandbox of one rollout: made at first use, kept while the rollout is parked, ended with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from headway.records.environment import EnvironmentState, Operation
from headway.records.sandbox import (
    OUTPUT_BYTES,
    Command,
    ExecResult,
    FileInfo,
    SandboxError,
    SandboxFailure,
    SandboxSpec,
    Snapshot,
    infrastructure_failure,
)
from headway.runtime.supervision import to_its_end
from headway.sandbox.pool import SandboxPool
from headway.sandbox.protocol import FILE_BYTES, Sandbox
from headway.sandbox.snapshot_store import drop

T = TypeVar("T")

_REMADE = 2  # how often a lost one is made again by doing everything anew, in one call


class EpisodeSandbox:
    """A rollout's sandbox. Lifecycle: *none* -> *in use* <-> *parked*, and *closed* from any of them.

    Parked, it is a snapshot on disk, which survives this process; its processes are stopped, or, where others wait for
    a sandbox or the backend can't stop any, ended. Either way the files are then as the rollout left them; ended
    processes are lost.

    With ``repeatable`` all operations on it are recorded, and a lost sandbox is made again by repeating them: only
    right where the same commands leave the same files. Without, its loss fails the rollout as infrastructure.
    """

    def __init__(
        self,
        pool: SandboxPool,
        spec: SandboxSpec,
        *,
        labels: Mapping[str, str],
        timeout_s: float,
        repeatable: bool = False,
        restored: EnvironmentState | None = None,
    ) -> None:
        """``timeout_s``: limit of a command that gives none."""
        self._pool = pool
        self._spec = spec
        self._labels = dict(labels)
        self._timeout_s = timeout_s
        self._repeatable = repeatable
        restored = restored or EnvironmentState()
        self.snapshot = restored.snapshot  # the last one; None: the sandbox was never parked
        self._operations = list(restored.operations)
        self._lease = contextlib.AsyncExitStack()
        self._box: Sandbox | None = None
        self._making = asyncio.Lock()
        self._paused = False
        self._end_offer: Callable[[], None] = lambda: None  # of its place, while it is parked
        self._closed = False
        self.limits: set[asyncio.Timeout] = set()  # of what uses it now; waiting in line for it doesn't count
        self.failure: SandboxFailure | None = None  # of the infrastructure, that it couldn't make good

    def forget_snapshot(self, folder: Path, before: Snapshot | None) -> None:
        """Revert to the snapshot ``before``, and delete a later one from ``folder``: no state will ever name it."""
        if self.snapshot is not None and (before is None or self.snapshot.path != before.path):
            with contextlib.suppress(OSError):
                drop(folder, self.snapshot.path)
            self.snapshot = before

    async def exec(
        self,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        workdir: str | None = None,
        stdin: bytes | None = None,
        timeout_s: float | None = None,
        max_output_bytes: int = OUTPUT_BYTES,
        alone: bool = False,
    ) -> ExecResult:
        """Run a command: its fields are `Command`'s. ``timeout_s`` None: the environment's; ``alone``: `exclusive`."""
        arguments: dict[str, Any] = {
            "argv": list(argv),
            "environment": None if environment is None else dict(environment),
            "workdir": workdir,
            "stdin": stdin,
            "timeout_s": timeout_s or self._timeout_s,
            "max_output_bytes": max_output_bytes,
            "alone": alone,
        }
        return await self._do(Operation(kind="exec", arguments=arguments))

    async def write(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        """`Sandbox.write`."""
        content = data.encode() if isinstance(data, str) else data
        await self._do(Operation(kind="write", arguments={"path": path, "data": content, "mode": mode}))

    async def read(self, path: str, *, max_bytes: int = FILE_BYTES) -> bytes:
        """`Sandbox.read`."""
        return await self._with(lambda box: box.read(path, max_bytes=max_bytes))

    async def list(self, path: str, *, max_entries: int = 10_000) -> list[FileInfo]:
        """`Sandbox.list`."""
        return await self._with(lambda box: box.list(path, max_entries=max_entries))

    async def park(self, name: str) -> EnvironmentState:
        """Stop the sandbox, snapshot its files as ``name``, return a state with the snapshot. Raises SandboxError."""
        if self._box is not None and not self._paused:
            box, can_pause = self._box, await self._pool.can_pause()
            if not can_pause:  # what runs on isn't parked
                self.snapshot = await box.snapshot(name)
                await self._give_back()
            else:
                await box.pause()  # first: the snapshot and what goes on here are the same
                try:
                    self.snapshot = await box.snapshot(name)
                except BaseException:
                    with contextlib.suppress(SandboxError):  # it has ended
                        await to_its_end(box.resume())
                    raise
                self._paused = True
                self._end_offer = self._pool.lend(self._recalled)
        return EnvironmentState(snapshot=self.snapshot, operations=tuple(self._operations))

    async def unpark(self) -> None:
        """Let the sandbox run again; one that was given back to the pool is made again at its next use."""
        if self._box is not None and self._paused:
            self._paused = False
            self._end_offer()
            try:
                await self._box.resume()
            except SandboxError:  # it didn't live that long; what it held does
                await self._give_back()

    async def close(self) -> None:
        """End the sandbox; later calls fail."""
        self._closed = True
        await self._give_back()

    async def _recalled(self) -> None:
        """Give a parked sandbox's place to others who wait for it."""
        if self._paused:
            await self._give_back()

    async def _give_back(self) -> None:
        self._box, self._paused = None, False
        self._end_offer()
        lease, self._lease = self._lease, contextlib.AsyncExitStack()
        await lease.aclose()

    async def _do(self, operation: Operation) -> Any:
        result = await self._with(lambda box: _done(box, operation))
        if self._repeatable:
            self._operations.append(operation)
        return result

    async def _with(self, work: Callable[[Sandbox], Awaitable[T]]) -> T:
        """Run ``work`` on the sandbox, or on a new one where it was lost and can be made again."""
        for remaining in range(_REMADE, -1, -1):
            box = None
            try:
                box = await self._ready()
                return await work(box)
            except SandboxError as error:
                if error.failure.cause != "infrastructure":
                    raise
                if not self._repeatable or not remaining or self._closed:
                    self.failure = error.failure
                    raise
                if self._box is box:  # else whoever used it beside this one has made another
                    self.snapshot = None  # of no use to whoever has lost it once
                    await self._give_back()
        raise AssertionError("unreachable")

    async def _ready(self) -> Sandbox:
        async with self._making:
            if self._box is None and not self._closed:
                self._box = await self._made()
            if self._closed:  # before, or meanwhile
                await self._give_back()
            if self._box is None:
                raise SandboxError(infrastructure_failure("the rollout has ended", retry=False))
            return self._box

    async def _made(self) -> Sandbox:
        """A new sandbox with the files it had when it was parked or lost."""
        if self.snapshot is not None:
            try:
                return await self._leased(self.snapshot)
            except SandboxError as error:
                if not self._repeatable:
                    what = f"the files of a parked rollout are lost: {error.failure.what}"
                    raise SandboxError(infrastructure_failure(what, retry=False)) from error
                self.snapshot = None
                await self._give_back()
        box = await self._leased(None)
        try:
            for operation in self._operations:
                await _done(box, operation)
        except BaseException:
            await self._give_back()
            raise
        return box

    async def _leased(self, snapshot: Snapshot | None) -> Sandbox:
        lease = contextlib.AsyncExitStack()
        leased = self._pool.lease(self._spec, labels=self._labels, snapshot=snapshot)
        with self.in_line():
            box = await lease.enter_async_context(leased)
        self._lease = lease
        return box

    @contextlib.contextmanager
    def in_line(self) -> Iterator[None]:
        """Suspend the time limits of the sandbox's users: for waiting in line, or what has a limit of its own."""
        now = asyncio.get_running_loop().time
        left = {limit: (limit.when() or now()) - now() for limit in self.limits if not limit.expired()}
        for limit in left:
            limit.reschedule(None)
        try:
            yield
        finally:
            for limit in self.limits & left.keys():
                limit.reschedule(now() + left[limit])


async def _done(box: Sandbox, operation: Operation) -> Any:
    arguments = operation.arguments
    if operation.kind == "write":
        return await box.write(arguments["path"], arguments["data"], mode=arguments["mode"])
    fields = {name: value for name, value in arguments.items() if name != "alone" and value is not None}
    return await box.exec(Command(exclusive=arguments["alone"], **fields))
