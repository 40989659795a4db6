"""The pulse of a run: queue and workers, sampled about once a second for people and machines that watch."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from headway.orchestrator.context import RunContext
from headway.records.errors import HeadwayError
from headway.records.generation import EngineLoad
from headway.records.node import NodeConditions
from headway.records.trace import Pulse, TraceLine, WorkerState

PULSE_S = 1.0

Activity = Callable[[], Awaitable[Iterable[TraceLine]]]
Workers = Callable[[], Iterable[WorkerState]]
Conditions = Callable[[], Iterable[NodeConditions]]


async def take_pulse(run: RunContext, workers: Workers, nodes: Conditions) -> Pulse:
    """Queue, engines and workers now. Raises HeadwayError when no engine can be asked."""
    state = run.state
    engines = await run.generator.statistics()
    return Pulse(
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
async def pulsing(
    run: RunContext,
    observe: Callable[[TraceLine], None],
    activity: Activity,
    workers: Workers,
    nodes: Conditions = tuple,
) -> AsyncIterator[None]:
    """Pass replicas' spans, their engines' steps and a pulse to ``observe`` every PULSE_S within the block. Not one of
    the run's loops: nothing waits for it, and after a HeadwayError it tries again."""

    async def beat() -> None:
        with contextlib.suppress(HeadwayError):  # no replica answers: the loops handle that
            for line in await activity():
                observe(line)
            observe(await take_pulse(run, workers, nodes))

    async def keep_beating() -> None:
        while True:
            await beat()
            await run.clock.sleep(PULSE_S)

    task = asyncio.create_task(keep_beating(), name="pulse")
    try:
        yield
        with contextlib.suppress(TimeoutError):  # a run that ends in order: the last moments as well
            async with asyncio.timeout(PULSE_S):
                await beat()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
