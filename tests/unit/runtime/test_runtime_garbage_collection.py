"""Cycles are freed by short collections, or by the whole one; the process gets its collector back as it was."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

from headway.runtime.clock import Clock, RealClock, run_virtual
from headway.runtime.garbage_collection import short_collections


class Thing:
    other: Any = None


def cycle() -> Thing:
    one, two = Thing(), Thing()
    one.other, two.other = two, one
    return one


def watched(freed: list[str]) -> Thing:
    thing = cycle()
    weakref.finalize(thing, freed.append, "freed")
    return thing


def test_a_cycle_that_dies_young() -> None:
    async def main(clock: Clock) -> None:
        freed: list[str] = []
        async with short_collections(clock, short_s=1.0, whole_s=1000.0):
            watched(freed)
            assert not freed
            await clock.sleep(1.5)
            assert freed

    run_virtual(main)


@pytest.mark.slow
def test_a_cycle_that_has_outlived_short_collections() -> None:
    async def main(clock: Clock) -> None:
        freed: list[str] = []
        async with short_collections(clock, short_s=1.0, whole_s=30.0):
            kept = watched(freed)
            await clock.sleep(10.5)
            del kept
            await clock.sleep(10.0)
            assert not freed
            await clock.sleep(10.0)
            assert freed

    run_virtual(main)


def test_pythons_own_rule_holds_again_behind_it() -> None:
    async def main() -> None:
        async with short_collections(RealClock()):
            assert not gc.isenabled()
            assert gc.get_freeze_count() > 0

    assert gc.isenabled()
    asyncio.run(main())
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
