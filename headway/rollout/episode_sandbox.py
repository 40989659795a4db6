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
from headway.runtime.supervision import run_to_completion
from headway.sandbox.pool import SandboxPool
from headway.sandbox.protocol import FILE_BYTES, Sandbox
from headway.sandbox.snapshot_store import drop

T = TypeVar("T")

_MAX_REMAKES = 2  # times that one call remakes a lost sandbox by repeating its operations


class EpisodeSandbox:
    """A rollout's sandbox. Lifecycle: *none* -> *in use* <-> *parked*, and *closed* from any of them.

    A parked sandbox is a snapshot on disk, which survives this process; its processes are stopped, or ended where other
    rollouts wait for a sandbox or the backend can't stop processes. In both cases the files stay as the rollout left
    them; ended processes are lost.

    With ``repeatable`` all operations on it are recorded, and a lost sandbox is remade by repeating them, which is
    correct only where the same commands leave the same files. Without, its loss fails the rollout as infrastructure.
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
        """``timeout_s``: time limit of a command that sets none."""
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
        self._end_offer: Callable[[], None] = lambda: None  # ends the offer of its pool slot while it is parked
        self._closed = False
        self.limits: set[asyncio.Timeout] = set()  # of its current users; suspended while they wait for a sandbox
        self.failure: SandboxFailure | None = None  # of the infrastructure, not repaired by remaking the sandbox

    def forget_snapshot(self, folder: Path, previous: Snapshot | None) -> None:
        """Revert to the snapshot ``previous``, and delete a later one from ``folder``: no saved state refers to it."""
        if self.snapshot is not None and (previous is None or self.snapshot.path != previous.path):
            with contextlib.suppress(OSError):
                drop(folder, self.snapshot.path)
            self.snapshot = previous

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
        """Run a command; the arguments are `Command`'s. ``timeout_s`` None: the environment's; ``alone``:
        `exclusive`."""
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
        """Write a file (`Sandbox.write`)."""
        content = data.encode() if isinstance(data, str) else data
        await self._do(Operation(kind="write", arguments={"path": path, "data": content, "mode": mode}))

    async def read(self, path: str, *, max_bytes: int = FILE_BYTES) -> bytes:
        """Read a file (`Sandbox.read`)."""
        return await self._retry_on_loss(lambda box: box.read(path, max_bytes=max_bytes))

    async def list(self, path: str, *, max_entries: int = 10_000) -> list[FileInfo]:
        """List a directory (`Sandbox.list`)."""
        return await self._retry_on_loss(lambda box: box.list(path, max_entries=max_entries))

    async def park(self, name: str) -> EnvironmentState:
        """Stop the sandbox, snapshot its files as ``name``, and return a state with it. Raises SandboxError."""
        if self._box is not None and not self._paused:
            sandbox, can_pause = self._box, await self._pool.can_pause()
            if not can_pause:  # processes that can't be stopped would change the files after the snapshot
                self.snapshot = await sandbox.snapshot(name)
                await self._release()
            else:
                await sandbox.pause()  # first, so that the snapshot equals the state that resumes here
                try:
                    self.snapshot = await sandbox.snapshot(name)
                except BaseException:
                    with contextlib.suppress(SandboxError):  # it has ended
                        await run_to_completion(sandbox.resume())
                    raise
                self._paused = True
                self._end_offer = self._pool.allow_recall(self._on_recall)
        return EnvironmentState(snapshot=self.snapshot, operations=tuple(self._operations))

    async def unpark(self) -> None:
        """Resume the sandbox; one that was returned to the pool is remade at its next use."""
        if self._box is not None and self._paused:
            self._paused = False
            self._end_offer()
            try:
                await self._box.resume()
            except SandboxError:  # the sandbox is lost, its snapshot isn't
                await self._release()

    async def close(self) -> None:
        """End the sandbox; later calls fail."""
        self._closed = True
        await self._release()

    async def _on_recall(self) -> None:
        """Release a parked sandbox for other rollouts that wait for one."""
        if self._paused:
            await self._release()

    async def _release(self) -> None:
        self._box, self._paused = None, False
        self._end_offer()
        exit_stack, self._lease = self._lease, contextlib.AsyncExitStack()
        await exit_stack.aclose()

    async def _do(self, operation: Operation) -> Any:
        returned = await self._retry_on_loss(lambda box: _execute(box, operation))
        if self._repeatable:
            self._operations.append(operation)
        return returned

    async def _retry_on_loss(self, work: Callable[[Sandbox], Awaitable[T]]) -> T:
        """Run ``work`` on the sandbox; where it was lost and can be remade, run it again on the new one."""
        for remakes_left in range(_MAX_REMAKES, -1, -1):
            sandbox = None
            try:
                sandbox = await self._ensure()
                return await work(sandbox)
            except SandboxError as error:
                if error.failure.cause != "infrastructure":
                    raise
                if not self._repeatable or not remakes_left or self._closed:
                    self.failure = error.failure
                    raise
                if self._box is sandbox:  # else a concurrent user has remade it already
                    self.snapshot = None  # replaced by the repetition of all operations
                    await self._release()
        raise AssertionError("unreachable")

    async def _ensure(self) -> Sandbox:
        async with self._making:
            if self._box is None and not self._closed:
                self._box = await self._create()
            if self._closed:  # possibly while the sandbox was made
                await self._release()
            if self._box is None:
                raise SandboxError(infrastructure_failure("the rollout has ended", retry=False))
            return self._box

    async def _create(self) -> Sandbox:
        """Create a sandbox with the files that it had when it was parked or lost."""
        if self.snapshot is not None:
            try:
                return await self._lease_sandbox(self.snapshot)
            except SandboxError as error:
                if not self._repeatable:
                    message = f"the files of a parked rollout are lost: {error.failure.message}"
                    raise SandboxError(infrastructure_failure(message, retry=False)) from error
                self.snapshot = None
                await self._release()
        sandbox = await self._lease_sandbox(None)
        try:
            for operation in self._operations:
                await _execute(sandbox, operation)
        except BaseException:
            await self._release()
            raise
        return sandbox

    async def _lease_sandbox(self, snapshot: Snapshot | None) -> Sandbox:
        exit_stack = contextlib.AsyncExitStack()
        lease_context = self._pool.lease(self._spec, labels=self._labels, snapshot=snapshot)
        with self.suspend_limits():
            sandbox = await exit_stack.enter_async_context(lease_context)
        self._lease = exit_stack
        return sandbox

    @contextlib.contextmanager
    def suspend_limits(self) -> Iterator[None]:
        """Suspend the time limits of the sandbox's users while they wait for one or run under another limit."""
        now = asyncio.get_running_loop().time
        remaining_s_by_limit = {limit: (limit.when() or now()) - now() for limit in self.limits if not limit.expired()}
        for limit in remaining_s_by_limit:
            limit.reschedule(None)
        try:
            yield
        finally:
            for limit in self.limits & remaining_s_by_limit.keys():
                limit.reschedule(now() + remaining_s_by_limit[limit])


async def _execute(box: Sandbox, operation: Operation) -> Any:
    arguments = operation.arguments
    if operation.kind == "write":
        return await box.write(arguments["path"], arguments["data"], mode=arguments["mode"])
    command_fields = {name: value for name, value in arguments.items() if name != "alone" and value is not None}
    return await box.exec(Command(exclusive=arguments["alone"], **command_fields))
