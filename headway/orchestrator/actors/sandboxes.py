"""Opens the sandboxes of a run: the backend that its experiment names, with its pool, reaper and injected faults."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from headway.config.router import RouterConfig
from headway.config.sandbox import SandboxConfig
from headway.runtime.clock import Clock
from headway.runtime.retries import Breaker
from headway.runtime.supervision import cancel_all
from headway.sandbox.backends import backend_of
from headway.sandbox.faults import FaultyBackend, injected_share
from headway.sandbox.guards import RunSandboxes
from headway.sandbox.pool import SandboxPool, pool_settings
from headway.sandbox.protocol import Backend, Reaping
from headway.sandbox.reaper import Reaper

# Starts come in bursts, so some in a row fail together; and a provider's outage lasts longer than a replica's.
BREAKER = RouterConfig(failures_to_open=10, failure_window_s=120.0, cool_down_s=2.0, longest_cool_down_s=60.0)

_REAP_EVERY_S = 60.0  # between two removals of sandboxes that dead owners left: they cost memory, a check little


@contextlib.asynccontextmanager
async def open_sandboxes(
    settings: SandboxConfig,
    clock: Clock,
    *,
    run: str = "",
    snapshots: Path | None = None,
    seed: int = 0,
    backend: Backend | None = None,
) -> AsyncIterator[RunSandboxes]:
    """Start the run's pool of sandboxes; all of them have ended after the block.

    ``run``: the run that owns them; ``snapshots``: the folder of parked ones; ``backend``: instead of the one that
    ``settings`` name. Raises ConfigurationError where the backend isn't installed.
    """
    real_backend = backend if backend is not None else backend_of(settings, run=run, snapshots=snapshots)
    faulty_backend = None
    if share := injected_share():
        faulty_backend = FaultyBackend(real_backend, clock, share=share, slow_s=settings.start_limit_s / 3, seed=seed)
    pool = SandboxPool(faulty_backend or real_backend, pool_settings(settings), clock, breaker=Breaker(BREAKER))
    reaper = Reaper(real_backend, clock, _REAP_EVERY_S, pool.end_leaked) if isinstance(real_backend, Reaping) else None
    reaper_task = asyncio.create_task(reaper.run(), name="sandbox reaper") if reaper is not None else None
    try:
        yield RunSandboxes(pool, reaper, faulty_backend)
    finally:
        await cancel_all(reaper_task)
        await pool.close()
        await real_backend.close()
