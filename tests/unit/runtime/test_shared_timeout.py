"""Limits that many blocks share: each expires as `asyncio.timeout` would, with one timer for all."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.runtime.clock import Clock, run_virtual
from headway.runtime.shared_timeout import SharedTimeout

LIMIT_S = 10.0


async def _ended_s(clock: Clock, limits: SharedTimeout | None, start_s: float, work_s: float) -> tuple[float, str]:
    """When a block that begins at ``start_s`` and works for ``work_s`` ends, and how."""
    await clock.sleep(start_s)
    try:
        if limits is None:
            async with asyncio.timeout(LIMIT_S):
                await clock.sleep(work_s)
        else:
            with limits.block():
                await clock.sleep(work_s)
    except TimeoutError:
        return clock.now(), "expired"
    return clock.now(), "finished"


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9) | st.integers(11, 40)), max_size=12))
def test_blocks_end_as_with_timeouts_of_their_own(blocks: list[tuple[int, int]]) -> None:
    def ends(limits: SharedTimeout | None) -> list[tuple[float, str]]:
        async def main(clock: Clock) -> list[tuple[float, str]]:
            return await asyncio.gather(*(_ended_s(clock, limits, start, work) for start, work in blocks))

        return run_virtual(main)

    assert ends(SharedTimeout(LIMIT_S)) == ends(None)


def test_cancellation_from_outside_stays_a_cancellation() -> None:
    async def main(clock: Clock) -> None:
        limits = SharedTimeout(LIMIT_S)

        async def work() -> None:
            with limits.block():
                await clock.sleep(100.0)

        task = asyncio.create_task(work())
        await clock.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await _ended_s(clock, limits, 0.0, 100.0) == (11.0, "expired")

    run_virtual(main)


def test_no_limit_never_expires() -> None:
    async def main(clock: Clock) -> tuple[float, str]:
        return await _ended_s(clock, SharedTimeout(None), 0.0, 1e6)

    assert run_virtual(main) == (1e6, "finished")
