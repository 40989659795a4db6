"""Bundles a run's pool of sandboxes with its reaper and its fault injection."""

from __future__ import annotations

from headway.records.sandbox_statistics import PoolStatistics, ReaperStatistics
from headway.sandbox.faults import FaultyBackend
from headway.sandbox.pool import SandboxPool
from headway.sandbox.reaper import Reaper


class RunSandboxes:
    """A run's pool of sandboxes, its reaper, and its injected faults."""

    def __init__(self, pool: SandboxPool, reaper: Reaper | None, faults: FaultyBackend | None) -> None:
        self.pool = pool
        self._reaper = reaper
        self._faults = faults

    def statistics(self) -> PoolStatistics:
        return self.pool.statistics()

    def reaped(self) -> ReaperStatistics:
        return self._reaper.statistics() if self._reaper is not None else ReaperStatistics()

    def injected(self) -> dict[str, int]:
        """Return the number of injected faults (`faults.SHARE`), by call and kind."""
        return dict(self._faults.injected) if self._faults is not None else {}
