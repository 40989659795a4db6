"""Brings published versions to the replicas of a pool, each as fast as it can take them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from headway.generator.routing.replica import Replica
from headway.records.errors import WeightsCorrupt
from headway.records.generation import AppliedWeights, PublishedWeights
from headway.runtime.clock import Clock
from headway.runtime.supervision import cancel_all

_LEAST_PATIENCE_S = 1.0  # with replicas that take longer than the first one
_RETRY_S = 0.1


class VersionUpdates:
    """The updates of replicas to the newest version: at most one is under way for each.

    A replica that has applied a version goes on to the newest one announced meanwhile, past those between. A version
    that can't be read is passed over for a newer one.
    """

    def __init__(self, clock: Clock, apply: Callable[[Replica, PublishedWeights, int], Awaitable[AppliedWeights]]):
        """``apply(replica, weights, number)`` makes a replica's weights those of an update. Raises WeightsCorrupt,
        WorkerDied, RemoteError."""
        self.newest: PublishedWeights | None = None
        self.count = 0  # announced so far: never decreases, though versions may
        self._clock, self._apply = clock, apply
        self._tasks: dict[str, asyncio.Task[AppliedWeights | None]] = {}  # by replica

    async def announce(
        self, weights: PublishedWeights, replicas: Sequence[Replica], *, leave_slow: bool
    ) -> list[AppliedWeights | BaseException]:
        """Apply a version on ``replicas`` concurrently; returns their outcomes. ``leave_slow``: without those that
        still apply an older one, or take more than twice as long as the first one, and at least a second longer. They
        go on."""
        self.newest, self.count, started_s = weights, self.count + 1, self._clock.now()
        busy_tasks = {task for task in self._tasks.values() if not task.done()} if leave_slow else set()
        tasks = [task for replica in replicas if (task := self._begin(replica)) not in busy_tasks]
        pending, first_s, patience_s = set(tasks), None, None
        try:
            while pending and (patience_s is None or patience_s > 0):
                done, pending = await asyncio.wait(pending, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                if leave_slow and any(task.done() and not task.exception() for task in tasks):
                    elapsed_s = self._clock.now() - started_s
                    first_s = elapsed_s if first_s is None else first_s
                    patience_s = first_s + max(first_s, _LEAST_PATIENCE_S) - elapsed_s
        except asyncio.CancelledError:
            await cancel_all(*pending)
            raise
        outcomes = [task.exception() or task.result() for task in tasks if task.done()]
        return [outcome for outcome in outcomes if outcome is not None]

    async def bring_up(self, replica: Replica) -> None:
        """Apply the newest version on a replica that lacks it. Raises the error of `announce`'s ``apply``."""
        await asyncio.shield(self._begin(replica))

    async def catch_up(self, replica: Replica, patience_s: float = 0.0) -> AppliedWeights | None:
        """Apply the newest version until none newer has been announced. Waits up to ``patience_s`` for one that can
        be read: if its publisher died too, its successor announces it again."""
        applied = None
        while (newest := self.newest) is not None and replica.update != self.count:
            try:
                applied = await self._apply(replica, newest, self.count)
            except WeightsCorrupt:
                deadline_s = self._clock.now() + patience_s
                while self.newest is newest:  # else a newer version overwrote the slot: apply that one
                    if self._clock.now() >= deadline_s or replica.worker is None or not replica.worker.alive:
                        raise
                    await self._clock.sleep(_RETRY_S)
        return applied

    async def stop(self) -> None:
        """End what is under way."""
        await cancel_all(*self._tasks.values())

    def _begin(self, replica: Replica) -> asyncio.Task[AppliedWeights | None]:
        task = self._tasks.get(replica.name)
        if task is None or task.done():
            task = asyncio.create_task(self.catch_up(replica), name=f"{replica.name}-weights")
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # another may look later
            self._tasks[replica.name] = task
        return task
