"""Samples a run's queue and workers about once a second, for live views and exporters."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from headway.orchestrator.context import RunContext
from headway.records.errors import HeadwayError
from headway.records.generation import EngineLoad
from headway.records.node import NodeConditions
from headway.records.trace import QueueSnapshot, TraceLine, WorkerState

SNAPSHOT_INTERVAL_S = 1.0

Activity = Callable[[], Awaitable[Iterable[TraceLine]]]
Workers = Callable[[], Iterable[WorkerState]]
Conditions = Callable[[], Iterable[NodeConditions]]


async def take_snapshot(run: RunContext, workers: Workers, nodes: Conditions) -> QueueSnapshot:
    """Read the state of queue, engines and workers. Raises HeadwayError when no engine answers."""
    state = run.state
    engines = await run.generator.statistics()
    return QueueSnapshot(
        time_s=round(run.clock.now(), 6),
        version=state.version,
        applied_version=await run.generator.applied_version(),
        open_groups=state.open_groups,
        running_groups=len(state.running),
        parked_groups=state.parked_groups,
        buffered_groups=len(state.finished),
        oldest_age_s=round(state.oldest_age_s(), 3),
        engines=EngineLoad.total(engines),
        workers=tuple(workers()),
        nodes=tuple(nodes()),
    )


@contextlib.asynccontextmanager
async def recording_snapshots(
    run: RunContext,
    observe: Callable[[TraceLine], None],
    activity: Activity,
    workers: Workers,
    nodes: Conditions = tuple,
) -> AsyncIterator[None]:
    """Pass replicas' spans, engine steps and a snapshot to ``observe`` every SNAPSHOT_INTERVAL_S within the block. This
    is none of the run's loops: nothing waits for it, and after a HeadwayError it tries again."""

    async def record_snapshot() -> None:
        with contextlib.suppress(HeadwayError):  # no replica answers: the loops handle that
            for line in await activity():
                observe(line)
            observe(await take_snapshot(run, workers, nodes))

    async def record_snapshots() -> None:
        while True:
            await record_snapshot()
            await run.clock.sleep(SNAPSHOT_INTERVAL_S)

    snapshot_task = asyncio.create_task(record_snapshots(), name="pulse")
    try:
        yield
        with contextlib.suppress(TimeoutError):  # a run that ends in order: the last moments as well
            async with asyncio.timeout(SNAPSHOT_INTERVAL_S):
                await record_snapshot()
    finally:
        snapshot_task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await snapshot_task
