"""What the tests of real workers share: starting one for a test, and looking at processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from headway.runtime.clock import RealClock
from headway.runtime.fork_server import SERVERS
from headway.runtime.workers import LocalLauncher, ProcessWorker, WorkerSpec

CLASSES = "runtime_worker_classes"
# For tests of what a worker has in common whether it was started as an interpreter of its own or forked.
BOTH_STARTS = pytest.mark.parametrize("preload", [(), ("numpy",)], ids=["started", "forked"])


def spec(cls: str = "Echo", name: str = "w", **more: Any) -> WorkerSpec:
    return WorkerSpec(name=name, factory=f"{CLASSES}:{cls}", **more)


@asynccontextmanager
async def running(worker_spec: WorkerSpec | None = None, **settings: Any) -> AsyncIterator[ProcessWorker]:
    worker = await LocalLauncher(RealClock(), **settings).start(worker_spec or spec())
    try:
        yield worker
    finally:
        worker.kill()
        await worker.died


@contextmanager
def own_servers() -> Iterator[None]:
    """Inside the block, no fork server that was started before is known; those started in it are ended."""
    others = dict(SERVERS)
    SERVERS.clear()
    try:
        yield
    finally:
        for server in SERVERS.values():
            server.end()
        SERVERS.clear()
        SERVERS.update(others)


async def until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110  (what happens in another process sets no event here)
            await asyncio.sleep(0.01)


def exists(pid: int) -> bool:
    """Is there a process that has not ended? A zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children() -> set[int]:
    """The processes that are this one's own."""
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def reaped(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(110):  # of a hang; a busy machine takes its time
            await main()

    asyncio.run(limited())
