"""Statistics of sandbox pools, reapers and fault injection: counts, latencies, failures."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

EDGES_S = tuple(0.001 * 2 ** (step / 2) for step in range(46))  # 1 ms to 99 min, two to each doubling


class Latencies(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A histogram of durations: ``counts[i]`` lie within (EDGES_S[i - 1], EDGES_S[i]], the first from 0, the last
    beyond all edges. Example: 3 and 5 ms give 1 at the edge of 4 ms, 1 at that of 5.7 ms."""

    counts: tuple[int, ...] = (0,) * (len(EDGES_S) + 1)
    total_s: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile_s(self, share: float) -> float:
        """The edge below which ``share`` of the durations lie: at most a factor of 1.42 too high. 0 without any."""
        remaining = share * self.count
        for edge_s, count in zip(EDGES_S, self.counts, strict=False):
            remaining -= count
            if count and remaining <= 0:
                return edge_s
        return 2 * EDGES_S[-1] if self.count else 0.0

    def with_duration(self, seconds: float) -> Latencies:
        idx = bisect.bisect_left(EDGES_S, seconds)
        return Latencies(
            counts=(*self.counts[:idx], self.counts[idx] + 1, *self.counts[idx + 1 :]), total_s=self.total_s + seconds
        )

    def since(self, earlier: Latencies) -> Latencies:
        counts = tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        return Latencies(counts=counts, total_s=self.total_s - earlier.total_s)

    @staticmethod
    def total(latencies: Iterable[Latencies]) -> Latencies:
        histograms = [Latencies(), *latencies]
        counts = tuple(map(sum, zip(*(histogram.counts for histogram in histograms), strict=True)))
        return Latencies(counts=counts, total_s=sum(histogram.total_s for histogram in histograms))


class PoolStatistics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A pool's present state, and its counters and histograms since it was made (`since`: since an earlier reading)."""

    used: int = 0  # places: sandboxes that live or are being made
    capacity: int = 0
    peak: int = 0
    waiters: int = 0
    oldest_wait_s: float = 0.0  # of those waiting now
    starting: int = 0
    live: int = 0  # ready, and not ended
    paused: int = 0  # ... of these
    leaked: int = 0  # couldn't be ended: they may still be there, until their time to live is over
    breaker_open: bool = False  # the backend fails: nothing is started but single probes
    started: int = 0
    retries: int = 0  # of starts
    hedges: int = 0  # second starts, beside one that took long
    hedges_won: int = 0  # ... that were ready first
    breaker_openings: int = 0
    start_failures: dict[str, int] = {}  # by cause, retried ones too
    execs: int = 0  # commands that were asked for
    exec_failures: dict[str, int] = {}  # by cause; model_code: timeouts, out of memory, signals
    lost: int = 0  # sandboxes that ended while they were leased: they died, or their time to live was over
    queue: Latencies = Latencies()  # from asking for a sandbox until it has its place
    start: Latencies = Latencies()  # making one that was made, in line for a start not included
    exec: Latencies = Latencies()  # from asking for a command until its result is there
    exec_overhead: Latencies = Latencies()  # ... less what the command ran itself

    def since(self, earlier: PoolStatistics) -> PoolStatistics:
        """These statistics with counters and histograms since ``earlier``, an earlier reading of the same pool."""
        increases = {name: getattr(self, name) - getattr(earlier, name) for name in POOL_COUNTERS}
        increases |= {name: _increase(getattr(self, name), getattr(earlier, name)) for name in POOL_CAUSES}
        increases |= {name: getattr(self, name).since(getattr(earlier, name)) for name in POOL_LATENCIES}
        return msgspec.structs.replace(self, **increases)

    def counted(self) -> PoolStatistics:
        """The counters and histograms alone, which remain of a pool that has ended."""
        kept: dict[str, Any] = {name: getattr(self, name) for name in (*POOL_COUNTERS, *POOL_CAUSES, *POOL_LATENCIES)}
        return PoolStatistics(**kept)

    @staticmethod
    def total(pools: Sequence[PoolStatistics]) -> PoolStatistics:
        """Several pools as one; ``peak`` is then an upper bound, the sum of their peaks."""
        names = (*POOL_COUNTERS, "used", "capacity", "peak", "waiters", "starting", "live", "paused", "leaked")
        figures: dict[str, Any] = {name: sum(getattr(pool, name) for pool in pools) for name in names}
        figures |= {name: _summed(getattr(pool, name) for pool in pools) for name in POOL_CAUSES}
        figures |= {name: Latencies.total(getattr(pool, name) for pool in pools) for name in POOL_LATENCIES}
        oldest_wait_s = max((pool.oldest_wait_s for pool in pools), default=0.0)
        breaker_open = any(pool.breaker_open for pool in pools)
        return PoolStatistics(oldest_wait_s=oldest_wait_s, breaker_open=breaker_open, **figures)


def _increase(later: dict[str, int], earlier: dict[str, int]) -> dict[str, int]:
    """The increase of each count; those that haven't grown are left out."""
    return dict(Counter(later) - Counter(earlier))


def _summed(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for count_by_cause in counts:
        sums.update(count_by_cause)
    return dict(sums)


POOL_COUNTERS = ("started", "retries", "hedges", "hedges_won", "breaker_openings", "execs", "lost")
POOL_CAUSES = ("start_failures", "exec_failures")
POOL_LATENCIES = ("queue", "start", "exec", "exec_overhead")


class Reaped(msgspec.Struct, frozen=True, kw_only=True):
    """The result of cleaning up after one owner that died without doing so."""

    owner: str  # name of its directory, with its process id
    sandboxes: int  # recorded ones
    stuck: bool = False  # something of it couldn't be ended; retried next time

    def __str__(self) -> str:
        return f"{self.owner}: {self.sandboxes} sandboxes" + (", some of whose processes didn't end" * self.stuck)


class ReaperStatistics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counters of a periodic reaper since it was started."""

    checks: int = 0
    owners: int = 0  # dead ones that it cleaned up after
    sandboxes: int = 0  # ... of these, as recorded
    stuck: int = 0  # owners with something that couldn't be ended, at the last check
    failed: str = ""  # why the last check couldn't be made; "": it was


class SandboxStatistics(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Statistics of a run's sandboxes: the pools of all its workers, the reaper, injected faults. In a step's record
    (``since``) counts are the step's, except the reaper's; it has none where no environment uses sandboxes."""

    pool: PoolStatistics = PoolStatistics()
    reaper: ReaperStatistics = ReaperStatistics()
    injected: dict[str, int] = {}  # faults on purpose, by call and kind

    @property
    def any(self) -> bool:
        """Whether there is anything to report: sandboxes, checks of a reaper, or injected faults, now or before."""
        return self != SandboxStatistics()

    def since(self, earlier: SandboxStatistics) -> SandboxStatistics:
        injected = _increase(self.injected, earlier.injected)
        return msgspec.structs.replace(self, pool=self.pool.since(earlier.pool), injected=injected)

    def counted(self) -> SandboxStatistics:
        """The counts that remain of a worker that has ended: everything it counted, and no sandbox."""
        reaper = msgspec.structs.replace(self.reaper, stuck=0, failed="")
        return SandboxStatistics(pool=self.pool.counted(), reaper=reaper, injected=self.injected)

    @staticmethod
    def total(workers: Sequence[SandboxStatistics]) -> SandboxStatistics:
        """Sum several workers. All reapers check the same machine, so ``stuck`` is the maximum, not the sum."""
        reapers = [worker.reaper for worker in workers]
        return SandboxStatistics(
            pool=PoolStatistics.total([worker.pool for worker in workers]),
            reaper=ReaperStatistics(
                checks=sum(reaper.checks for reaper in reapers),
                owners=sum(reaper.owners for reaper in reapers),
                sandboxes=sum(reaper.sandboxes for reaper in reapers),
                stuck=max((reaper.stuck for reaper in reapers), default=0),
                failed=next((reaper.failed for reaper in reapers if reaper.failed), ""),
            ),
            injected=_summed(worker.injected for worker in workers),
        )
