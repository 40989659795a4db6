"""Garbage collection for a process that must answer quickly: frequent short collections, rare full ones."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headway.runtime.clock import Clock

_SHORT_S = 0.25  # between collections of new objects
_WHOLE_S = 120.0  # between full collections, at least
_SHARE = 1e-3  # share of the time that full collections may take


@asynccontextmanager
async def short_collections(clock: Clock, short_s: float = _SHORT_S, whole_s: float = _WHOLE_S) -> AsyncIterator[None]:
    """Inside the block, collect only new objects every ``short_s`` seconds; surviving ones only in a full collection,
    every ``whole_s`` seconds and at most a thousandth of the time.

    Python's own rule scans all objects whenever their number has grown by a quarter: with thousands of recorded
    conversations that is a pause of a tenth of a second, every few seconds. Nearly all garbage is freed at once by its
    reference count. Only cycles that survived a short collection wait for the full one.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    gc.collect()
    gc.freeze()
    task = asyncio.create_task(_collect(clock, short_s, whole_s), name="garbage collector")
    try:
        yield
    finally:
        task.cancel()
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        finally:
            gc.unfreeze()
            if was_enabled:
                gc.enable()


async def _collect(clock: Clock, short_s: float, whole_s: float) -> None:
    due_s = clock.now() + whole_s
    while True:
        await clock.sleep(short_s)
        started_s = clock.now()
        full = started_s >= due_s
        if full:
            gc.unfreeze()
        gc.collect()  # objects that aren't frozen
        gc.freeze()
        if full:
            ended_s = clock.now()
            due_s = ended_s + max(whole_s, (ended_s - started_s) / _SHARE)
