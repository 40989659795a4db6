"""What the tests of real workers share: starting one for a test, and looking at processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headway.runtime.clock import RealClock
from headway.runtime.workers import LocalLauncher, ProcessWorker, WorkerSpec

CLASSES = "runtime_worker_classes"


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


def reaped(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(50):
            await main()

    asyncio.run(limited())
