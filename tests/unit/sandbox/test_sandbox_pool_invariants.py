"""What holds of a pool whatever happens to it: random schedules, and cancellations at every point."""

from __future__ import annotations

import asyncio
import random

import pytest
from fake_sandboxes import FakeBackend
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config.router import RouterConfig
from headway.records.sandbox import Command, SandboxError, SandboxSpec, infrastructure_failure
from headway.runtime.clock import VirtualClock, run_virtual
from headway.runtime.retries import Breaker
from headway.sandbox.pool import PoolSettings, SandboxPool

SPEC = SandboxSpec()
PASSING = infrastructure_failure("busy")
KNOWN = 20  # starts before any counts as a straggler


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1 << 32),
    live=st.integers(1, 6),
    starts=st.integers(1, 4),
    share=st.sampled_from([0.0, 0.05, 1.0]),
    failing=st.sampled_from([0.0, 0.1, 0.6]),
    with_breaker=st.booleans(),
)
def test_random_schedules(seed: int, live: int, starts: int, share: float, failing: float, with_breaker: bool):
    drawn = random.Random(seed)
    number = 60

    async def main() -> None:
        clock = VirtualClock()
        backend = FakeBackend(
            clock,
            end_s=drawn.choice([0.0, 0.3]),
            failures=[PASSING if drawn.random() < failing else None for _ in range(4 * number)],
            slow_starts=[1.0] * KNOWN + [drawn.choice([0.5, 1.0, 1.0, 60.0]) for _ in range(4 * number)],
            end_failures=[PASSING] * drawn.choice([0, 0, 2]),
        )
        breaker = Breaker(RouterConfig(failures_to_open=2, longest_cool_down_s=4.0)) if with_breaker else None
        wanted = PoolSettings(live=live, starts=starts, hedge_share=share, retries=2)
        pool = SandboxPool(backend, wanted, clock, breaker=breaker)
        had: list[str] = []
        cancelled: set[int] = set()

        async def one(lease: int) -> None:
            try:
                async with pool.lease(SPEC, labels={"lease": str(lease)}) as box:
                    had.append(box.id)
                    await box.exec(Command(argv=["true"]))
                    await clock.sleep(drawn.uniform(0, 5))
            except SandboxError:
                pass
            except asyncio.CancelledError:
                cancelled.add(lease)
                raise

        async def trouble(task: asyncio.Task[None]) -> None:
            await clock.sleep(drawn.uniform(0, 40))
            for _ in range(drawn.choice([1, 3])):
                task.cancel()
                await clock.sleep(drawn.choice([0.0, 0.1, 1.0]))

        tasks: list[asyncio.Task[None]] = []
        troubles: list[asyncio.Task[None]] = []
        for lease in range(number):
            tasks.append(asyncio.create_task(one(lease)))
            if drawn.random() < 0.3:
                troubles.append(asyncio.create_task(trouble(tasks[-1])))
            await clock.sleep(drawn.choice([0.0, 0.0, 0.5]))
        await asyncio.gather(*tasks, *troubles, return_exceptions=True)
        await clock.sleep(100.0)  # losers of hedged starts end behind their leases' backs

        assert backend.most_living <= live
        assert backend.most_starting <= starts
        assert len(had) == len(set(had)), "nobody shares one"
        seen = pool.statistics()
        assert (seen.used, seen.starting, seen.live, seen.waiters, backend.starting) == (0, 0, 0, 0, 0)
        assert len(backend.sandboxes) == seen.leaked == 0
        assert seen.started == backend.made
        assert seen.hedges <= share * len(backend.asked)
        assert seen.hedges_won <= seen.hedges
        asked = [int(labels["lease"]) for labels in backend.asked]
        firsts = [lease for lease in dict.fromkeys(asked) if lease not in cancelled]
        assert firsts == sorted(firsts), "first come, first served"

    run_virtual(main(), limit_s=1e6)


@pytest.mark.parametrize("again", [None, 0, 1, 3], ids=lambda n: f"again-after-{n}")
@pytest.mark.parametrize("at_s", [0.0, 0.5, 1.0, 2.5, 4.0, 5.0, 5.5])
def test_a_cancellation_at_any_point_leaves_nothing(at_s: float, again: int | None):
    """The lease waits for a place until 0.5 s, starts until 2.5 s at which it is hedged, has the hedge's sandbox at 4 s
    and ends it from 5 s to 5.5 s. ``again``: turns of the loop until it is cancelled once more."""
    for turns in range(12):

        async def main(turns: int = turns) -> None:
            clock = VirtualClock()
            backend = FakeBackend(clock, start_s=1.5, end_s=0.5, slow_starts=[1e-3] * KNOWN + [0.0, 0.0, 100.0])
            pool = SandboxPool(backend, PoolSettings(live=2, starts=2, hedge_share=1.0, hedge_least_s=2.0), clock)
            for _ in range(KNOWN):
                async with pool.lease(SPEC):
                    pass
            backend.end_s, began_s = 0.0, clock.now()

            async def occupy() -> None:
                async with pool.lease(SPEC):
                    await clock.sleep(0.5)

            async def one() -> None:
                async with pool.lease(SPEC):
                    backend.end_s = 0.5
                    await clock.sleep(1.0)

            others = [asyncio.create_task(occupy()) for _ in range(2)]
            await asyncio.sleep(0)
            task = asyncio.create_task(one())
            await clock.sleep(began_s + at_s - clock.now())
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            if again is not None:
                for _ in range(again):
                    await asyncio.sleep(0)
                task.cancel()
            await asyncio.gather(task, *others, return_exceptions=True)
            await clock.sleep(1.0)
            seen = pool.statistics()
            assert (backend.sandboxes, backend.starting) == ({}, 0)
            assert (seen.used, seen.starting, seen.live, seen.waiters, seen.leaked) == (0, 0, 0, 0, 0)
            async with pool.lease(SPEC), pool.lease(SPEC):
                pass

        run_virtual(main(), limit_s=1e4)
