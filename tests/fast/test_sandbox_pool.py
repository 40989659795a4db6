"""Leases of sandboxes: limits, order, retries."""

from __future__ import annotations

import asyncio

import pytest
from fake_sandboxes import FakeBackend

from headway.records.sandbox import (
    SandboxError,
    SandboxSpec,
    environment_failure,
    infrastructure_failure,
    model_failure,
)
from headway.runtime.clock import VirtualClock, run_virtual
from headway.sandbox.pool import PoolSettings, SandboxPool
from headway.sandbox.protocol import Backend

SPEC = SandboxSpec()
PASSING = infrastructure_failure("busy")


def pool_of(backend: FakeBackend, **settings) -> SandboxPool:
    as_protocol: Backend = backend
    return SandboxPool(as_protocol, PoolSettings(**settings), backend.clock)


def test_live_ones_and_starts_are_limited_and_served_in_order():
    async def main():
        backend = FakeBackend(VirtualClock(), start_s=1.0)
        pool = pool_of(backend, live=4, starts=2)
        served: list[int] = []
        most = 0

        async def one(number: int) -> None:
            nonlocal most
            async with pool.lease(SPEC):
                served.append(number)
                most = max(most, len(backend.sandboxes))
                await backend.clock.sleep(10)

        await asyncio.gather(*(one(n) for n in range(12)))
        assert served == list(range(12))
        assert (most, backend.most_starting) == (4, 2)
        seen = pool.statistics()
        assert (seen.used, seen.peak, seen.waiters, seen.started) == (0, 4, 0, 12)
        assert seen.queue_p99_s == pytest.approx(
            23
        )  # two rounds of at most 2 s in line to start and 10 s of use, less 1
        assert backend.sandboxes == {}

    run_virtual(main())


def test_960_that_ask_at_once_are_all_served():
    async def main():
        backend = FakeBackend(VirtualClock())
        pool = pool_of(backend, live=256, starts=8)

        async def one() -> None:
            async with pool.lease(SPEC) as box:
                await box.exec(["true"])

        await asyncio.gather(*(one() for _ in range(960)))
        assert (pool.statistics().started, pool.statistics().used) == (960, 0)

    run_virtual(main())


def test_failures_that_may_pass_are_tried_again_and_others_are_not():
    async def main():
        backend = FakeBackend(VirtualClock(), failures=[PASSING, PASSING])
        pool = pool_of(backend, retries=2, backoff_s=1.0)
        async with pool.lease(SPEC):
            assert 1.5 <= backend.clock.now() <= 4.6
        assert (pool.statistics().retries, pool.statistics().failures) == (2, {"infrastructure": 2})

        for lasting in (
            environment_failure("bad image"),
            model_failure("its own"),
            infrastructure_failure("no", retry=False),
        ):
            pool = pool_of(FakeBackend(backend.clock, failures=[lasting]))
            with pytest.raises(SandboxError):
                async with pool.lease(SPEC):
                    raise AssertionError("there is none")
            assert (pool.statistics().retries, pool.statistics().used) == (0, 0)

        pool = pool_of(FakeBackend(backend.clock, failures=[PASSING] * 3), retries=2)
        with pytest.raises(SandboxError):
            async with pool.lease(SPEC):
                raise AssertionError("there is none")

    run_virtual(main())


def test_whoever_gives_up_waiting_or_fails_takes_no_place():
    async def main():
        backend = FakeBackend(VirtualClock())
        pool = pool_of(backend, live=1)
        async with pool.lease(SPEC):
            waiting = asyncio.create_task(pool.lease(SPEC).__aenter__())
            await backend.clock.sleep(5)
            assert (pool.statistics().waiters, pool.statistics().oldest_wait_s) == (1, 5)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        with pytest.raises(ZeroDivisionError):
            async with pool.lease(SPEC):
                raise ZeroDivisionError
        async with pool.lease(SPEC):
            assert pool.statistics().used == 1
        assert backend.sandboxes == {}

    run_virtual(main())
