"""Removes what dead owners on this machine have left during a run, not only at its start."""

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
        """``end_leaked``: retries at each look to end what this process couldn't."""
        self._backend = backend
        self._clock = clock
        self._every_s = every_s
        self._end_leaked = end_leaked
        self._seen = ReaperStatistics()

    async def run(self) -> None:
        """Consumes nothing, waits for time to pass, and is unblocked by it. Never returns."""
        while True:
            await self._clock.sleep(self._every_s)
            await self.look()

    async def look(self) -> None:
        seen, failed = self._seen, ""
        reaped = []
        try:
            reaped = await self._backend.reap()
        except (SandboxError, OSError) as error:  # a failed look stops no run: the next may succeed
            failed = str(error)
        done = [owner for owner in reaped if not owner.stuck]
        self._seen = ReaperStatistics(
            looks=seen.looks + 1,
            owners=seen.owners + len(done),
            sandboxes=seen.sandboxes + sum(owner.sandboxes for owner in done),
            stuck=len(reaped) - len(done),
            failed=failed,
        )
        if self._end_leaked is not None:
            await self._end_leaked()

    def statistics(self) -> ReaperStatistics:
        return self._seen
