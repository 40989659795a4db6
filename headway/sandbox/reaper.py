"""Removes resources of dead owners on this machine during a run, not only at its start."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from headway.records.sandbox import SandboxError
from headway.records.sandbox_statistics import ReaperStatistics
from headway.runtime.clock import Clock
from headway.sandbox.protocol import Reaping


class Reaper:
    """Reaps every ``every_s`` seconds. The backend's owner runs `run` as one of its loops, cancelled at the end."""

    def __init__(
        self, backend: Reaping, clock: Clock, every_s: float, end_leaked: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """``end_leaked``: called after each reap, to retry ending sandboxes that this process couldn't end."""
        self._backend = backend
        self._clock = clock
        self._every_s = every_s
        self._end_leaked = end_leaked
        self._statistics = ReaperStatistics()

    async def run(self) -> None:
        """Consumes nothing, waits for time to pass, and is unblocked by it. Never returns."""
        while True:
            await self._clock.sleep(self._every_s)
            await self.reap_once()

    async def reap_once(self) -> None:
        statistics, failure_text = self._statistics, ""
        reaped = []
        try:
            reaped = await self._backend.reap()
        except (SandboxError, OSError) as error:  # a failure stops no run: the next reap may succeed
            failure_text = str(error)
        removed_owners = [owner for owner in reaped if not owner.stuck]
        self._statistics = ReaperStatistics(
            checks=statistics.checks + 1,
            owners=statistics.owners + len(removed_owners),
            sandboxes=statistics.sandboxes + sum(owner.sandboxes for owner in removed_owners),
            stuck=len(reaped) - len(removed_owners),
            failed=failure_text,
        )
        if self._end_leaked is not None:
            await self._end_leaked()

    def statistics(self) -> ReaperStatistics:
        return self._statistics
