"""Cycles are freed by short collections, or by the whole one; the process gets its collector back as it was."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

from headway.runtime.clock import RealClock
from headway.runtime.collector import short_collections


class Thing:
    other: Any = None


def cycle() -> Thing:
    one, two = Thing(), Thing()
    one.other, two.other = two, one
    return one


async def gone(thing: Thing) -> None:
    """Return when it is; the caller must have let go of it."""
    freed = asyncio.Event()
    weakref.finalize(thing, freed.set)
    del thing
    await asyncio.wait_for(freed.wait(), 10)


def test_a_cycle_that_dies_young() -> None:
    async def main() -> None:
        async with short_collections(RealClock(), short_s=0.01, whole_s=1000):
            await gone(cycle())

    asyncio.run(main())


def test_a_cycle_that_has_outlived_short_collections() -> None:
    async def main() -> None:
        async with short_collections(RealClock(), short_s=0.01, whole_s=0.3):
            kept = cycle()
            await asyncio.sleep(0.1)
            waiting = asyncio.create_task(gone(kept))
            del kept
            await asyncio.sleep(0.1)
            assert not waiting.done()
            await waiting

    asyncio.run(main())


def test_pythons_own_rule_holds_again_behind_it() -> None:
    async def main() -> None:
        async with short_collections(RealClock()):
            assert not gc.isenabled()
            assert gc.get_freeze_count() > 0

    assert gc.isenabled()
    asyncio.run(main())
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
