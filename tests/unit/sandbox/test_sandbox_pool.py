"""Leases of sandboxes: limits, order, retries."""

from __future__ import annotations

import asyncio

import pytest
from fake_sandboxes import FakeBackend

from headway.config.router import RouterConfig
from headway.records.sandbox import (
    Command,
    ExecResult,
    SandboxError,
    SandboxSpec,
    Snapshot,
    environment_failure,
    infrastructure_failure,
    model_failure,
)
from headway.runtime.clock import VirtualClock, run_virtual
from headway.runtime.retries import Breaker
from headway.sandbox.leased import LeasedSandbox
from headway.sandbox.pool import PoolSettings, SandboxPool
from headway.sandbox.protocol import Backend

SPEC = SandboxSpec()
PASSING = infrastructure_failure("busy")
ANSWERS = {
    "works": ExecResult(exit_code=0, duration_s=0.4),
    "loops": ExecResult(exit_code=None, timed_out=True, duration_s=0.4, failure=model_failure("too long")),
}


def pool_of(backend: FakeBackend, breaker: Breaker | None = None, **settings) -> SandboxPool:
    as_protocol: Backend = backend
    return SandboxPool(as_protocol, PoolSettings(**settings), backend.clock, breaker=breaker)


def test_live_ones_and_starts_are_limited_and_served_in_order():
    async def main():
        backend = FakeBackend(VirtualClock(), start_s=1.0)
        pool = pool_of(backend, live=4, starts=2)

        async def one(number: int) -> None:
            async with pool.lease(SPEC, labels={"number": str(number)}):
                await backend.clock.sleep(10)

        await asyncio.gather(*(one(n) for n in range(12)))
        assert backend.asked == [{"number": str(n)} for n in range(12)]
        assert (backend.most_living, backend.most_starting) == (4, 2)
        seen = pool.statistics()
        assert (seen.used, seen.peak, seen.waiters, seen.started) == (0, 4, 0, 12)
        assert 23 <= seen.queue.quantile_s(0.99) < 23 * 1.42  # two rounds of 2 s in line and 10 s of use, less 1
        assert (seen.queue.count, seen.start.count, seen.start.total_s) == (12, 12, pytest.approx(12.0))
        assert backend.sandboxes == {}

    run_virtual(main())


def test_960_that_ask_at_once_are_all_served():
    async def main():
        backend = FakeBackend(VirtualClock())
        pool = pool_of(backend, live=256, starts=8)

        async def one() -> None:
            async with pool.lease(SPEC) as box:
                await box.exec(Command(argv=["true"]))

        await asyncio.gather(*(one() for _ in range(960)))
        assert (pool.statistics().started, pool.statistics().used) == (960, 0)

    run_virtual(main())


def test_failures_that_may_pass_are_tried_again_and_others_are_not():
    async def main():
        backend = FakeBackend(VirtualClock(), failures=[PASSING, PASSING])
        pool = pool_of(backend, retries=2, backoff_s=1.0)
        async with pool.lease(SPEC):
            assert 1.5 <= backend.clock.now() <= 4.6
        assert (pool.statistics().retries, pool.statistics().start_failures) == (2, {"infrastructure": 2})

        for lasting in (environment_failure("bad image"), infrastructure_failure("no", retry=False)):
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


def test_no_start_is_a_models_doing_but_that_of_what_was_in_a_snapshot():
    async def main():
        backend = FakeBackend(VirtualClock(), failures=[model_failure("out of memory")] * 2)
        pool = pool_of(backend, retries=0)
        backend.snapshots["one"] = {}
        for snapshot, expected in (
            (None, ("infrastructure", False)),
            (Snapshot(path="one", bytes=0, sha256=""), ("model_code", True)),
        ):
            with pytest.raises(SandboxError) as raised:
                async with pool.lease(SPEC, snapshot=snapshot):
                    raise AssertionError("there is none")
            assert (raised.value.failure.cause, raised.value.failure.reward_valid) == expected

    run_virtual(main())


def test_the_line_for_starts_is_a_line():
    async def main():
        backend = FakeBackend(VirtualClock(), start_s=1.0)
        pool = pool_of(backend, live=4, starts=1, hedge_share=0.0)

        async def one() -> None:
            async with pool.lease(SPEC):
                await backend.clock.sleep(10)

        leases = [asyncio.create_task(one()) for _ in range(5)]
        await backend.clock.sleep(0.5)
        assert (pool.statistics().waiters, pool.statistics().oldest_wait_s) == (4, 0.5)
        await asyncio.gather(*leases)
        seen = pool.statistics()
        assert (seen.queue.count, seen.queue.total_s) == (5, pytest.approx(0 + 1 + 2 + 3 + 11))
        assert seen.start.total_s == pytest.approx(seen.start.count)

    run_virtual(main())


def test_what_couldnt_be_ended_is_tried_again_while_the_pool_is_open():
    async def main():
        backend = FakeBackend(VirtualClock(), end_failures=[PASSING] * 4)
        pool = pool_of(backend, retries=1)
        async with pool.lease(SPEC):
            pass
        assert (pool.statistics().leaked, len(backend.sandboxes)) == (1, 1)
        await pool.end_leaked()
        assert (pool.statistics().leaked, len(backend.sandboxes)) == (1, 1)
        await pool.end_leaked()
        assert (pool.statistics().leaked, len(backend.sandboxes)) == (0, 0)
        assert pool.statistics().lost == 0

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


def test_a_straggler_is_hedged_and_the_first_that_is_ready_wins():
    async def main():
        backend = FakeBackend(VirtualClock(), start_s=2.0, slow_starts=[2.0] * 20 + [500.0])
        pool = pool_of(backend, live=2, start_timeout_s=600)
        for _ in range(20):
            async with pool.lease(SPEC):
                pass
        began_s = backend.clock.now()
        async with pool.lease(SPEC):
            assert backend.clock.now() - began_s == pytest.approx(6.0), "twice what is usual, and a start"
            await backend.clock.sleep(0.1)
            assert len(backend.sandboxes) == 1
            assert (pool.statistics().used, pool.statistics().starting) == (1, 0), "the loser's places are free again"
        seen = pool.statistics()
        assert (seen.hedges, seen.hedges_won, seen.started, seen.used) == (1, 1, 21, 0)
        assert backend.sandboxes == {}

    run_virtual(main())


def test_of_two_that_are_ready_at_once_one_is_ended():
    async def main():
        backend = FakeBackend(VirtualClock(), start_s=2.0, slow_starts=[2.0] * 20 + [6.0])
        pool = pool_of(backend, live=2)
        for _ in range(20):
            async with pool.lease(SPEC):
                pass
        async with pool.lease(SPEC) as box:
            await backend.clock.sleep(0.1)
            assert list(backend.sandboxes) == [box.id]
            assert (backend.made, pool.statistics().used) == (22, 1)
        assert (pool.statistics().hedges, backend.sandboxes) == (1, {})

    run_virtual(main())


@pytest.mark.parametrize("why_not", ["no place", "no place to start", "share", "too few known", "open breaker"])
def test_a_hedge_keeps_nobody_waiting_and_is_rare(why_not: str):
    async def main():
        known = 20 if why_not != "too few known" else 19
        breaker = Breaker(RouterConfig(failures_to_open=1, cool_down_s=1e6, longest_cool_down_s=1e6))
        backend = FakeBackend(VirtualClock(), start_s=2.0, slow_starts=[2.0] * known + [500.0])
        pool = pool_of(
            backend,
            breaker,
            live=1 if why_not == "no place" else 2,
            starts=1 if why_not == "no place to start" else 2,
            hedge_share=0.04 if why_not == "share" else 0.05,
            start_timeout_s=600,
        )
        for _ in range(known):
            async with pool.lease(SPEC):
                pass
        began_s = backend.clock.now()
        if why_not == "open breaker":
            asyncio.get_running_loop().call_later(1.0, lambda: breaker.trip(backend.clock.now()))
        async with pool.lease(SPEC):
            assert backend.clock.now() - began_s == pytest.approx(500.0)
        assert pool.statistics().hedges == 0

    run_virtual(main())


def test_a_start_that_fails_beside_its_hedge_is_no_failure_of_the_lease():
    async def main():
        backend = FakeBackend(
            VirtualClock(), start_s=2.0, slow_starts=[2.0] * 20 + [7.0, 8.0], failures=[None] * 20 + [PASSING]
        )
        pool = pool_of(backend, live=2)
        for _ in range(20):
            async with pool.lease(SPEC):
                pass
        async with pool.lease(SPEC):
            assert pool.statistics().start_failures == {"infrastructure": 1}
        seen = pool.statistics()
        assert (seen.hedges, seen.hedges_won, seen.retries, seen.used) == (1, 1, 0, 0)

    run_virtual(main())


def test_a_backend_that_fails_is_left_alone_but_for_probes():
    async def main():
        breaker = Breaker(RouterConfig(failures_to_open=3, cool_down_s=10.0, successes_to_close=1))
        backend = FakeBackend(VirtualClock(), start_s=1.0, failures=[PASSING] * 4)
        pool = pool_of(backend, breaker, live=8, starts=3, retries=4, backoff_s=0.1)

        async def one() -> None:
            async with pool.lease(SPEC):
                pass

        ending = asyncio.gather(*(one() for _ in range(8)))
        await backend.clock.sleep(10.5)
        assert (len(backend.asked), pool.statistics().breaker_open) == (3, True), "open since 1 s, until 11 s"
        await backend.clock.sleep(10.0)
        assert len(backend.asked) == 4, "one probe, which fails at 12 s: open until 32 s"
        await ending
        seen = pool.statistics()
        assert (seen.started, seen.breaker_openings, seen.breaker_open, backend.most_starting) == (8, 2, False, 3)
        assert 33 <= backend.clock.now() < 40

    run_virtual(main())


def test_what_is_no_fault_of_the_backend_opens_no_breaker_and_ends_its_probe():
    async def main():
        breaker = Breaker(RouterConfig(failures_to_open=1, cool_down_s=1.0))
        backend = FakeBackend(
            VirtualClock(), failures=[environment_failure("bad image"), PASSING, environment_failure("bad")]
        )
        pool = pool_of(backend, breaker, retries=0)
        for _ in range(3):
            with pytest.raises(SandboxError):
                async with pool.lease(SPEC):
                    raise AssertionError("there is none")
        assert pool.statistics().breaker_openings == 1
        async with pool.lease(SPEC):
            assert backend.clock.now() < 3

    run_virtual(main())


def test_an_outage_that_lasts_fails_who_waits():
    async def main():
        breaker = Breaker(RouterConfig(failures_to_open=1, cool_down_s=1e5, longest_cool_down_s=1e5))
        pool = pool_of(FakeBackend(VirtualClock(), failures=[PASSING]), breaker, outage_s=50.0)
        with pytest.raises(SandboxError, match="kept failing") as raised:
            async with pool.lease(SPEC):
                raise AssertionError("there is none")
        assert raised.value.failure.cause == "infrastructure"
        assert pool.statistics().used == 0

    run_virtual(main())


def test_closing_ends_all_and_fails_who_waits():
    async def main():
        backend = FakeBackend(VirtualClock(), start_s=1.0, end_s=0.5)
        pool = pool_of(backend, live=3, starts=1)
        ends: list[str] = []

        async def one() -> None:
            try:
                async with pool.lease(SPEC) as box:
                    await backend.clock.sleep(100.0)
                    await box.exec(Command(argv=["true"]))
            except SandboxError as error:
                ends.append(error.failure.message)

        tasks = [asyncio.create_task(one()) for _ in range(6)]
        await backend.clock.sleep(1.5)  # one is ready, one is made, one waits to be made, three wait for a place
        await pool.close()
        assert backend.clock.now() == pytest.approx(2.0)
        assert (backend.sandboxes, backend.starting) == ({}, 0)
        await backend.clock.sleep(0.0)
        assert ends == ["the pool of sandboxes is closed"] * 5
        await asyncio.gather(*tasks)
        assert "has ended" in ends[5]
        with pytest.raises(SandboxError, match="closed"):
            async with pool.lease(SPEC):
                raise AssertionError("there is none")
        assert pool.statistics().used == 0

    run_virtual(main())


def test_one_that_cant_be_ended_is_tried_again_then_counts_as_leaked_until_the_pool_closes():
    async def main():
        backend = FakeBackend(VirtualClock(), end_failures=[PASSING, *[PASSING] * 3])
        pool = pool_of(backend, live=1, retries=2)
        async with pool.lease(SPEC):
            backend.end_failures = [PASSING]
        assert (pool.statistics().leaked, backend.sandboxes) == (0, {})
        async with pool.lease(SPEC):
            backend.end_failures = [PASSING] * 3
        assert (pool.statistics().leaked, len(backend.sandboxes), pool.statistics().used) == (1, 1, 0)
        await pool.close()
        assert (pool.statistics().leaked, backend.sandboxes) == (0, {})

    run_virtual(main())


def test_commands_are_measured_and_their_failures_counted_by_cause():
    async def main():
        backend = FakeBackend(VirtualClock(), exec_s=0.5, answer=lambda argv: ANSWERS[argv[0]])
        pool = pool_of(backend)
        async with pool.lease(SPEC) as box:
            assert (await box.exec(Command(argv=["works"]))).ok
            await box.exec(Command(argv=["loops"]))
            await box.pause()
            assert (pool.statistics().live, pool.statistics().paused) == (1, 1)
            await box.resume()
            await backend.sandboxes[box.id].terminate()
            with pytest.raises(SandboxError):
                await box.exec(Command(argv=["works"]))
        seen = pool.statistics()
        assert (seen.execs, seen.exec.count, seen.exec_failures) == (3, 2, {"model_code": 1, "environment": 1})
        assert (seen.exec.total_s, seen.exec_overhead.total_s) == (
            pytest.approx(0.5 * seen.exec.count),
            pytest.approx(0.1 * seen.exec_overhead.count),
        )
        assert (seen.lost, seen.live, seen.paused) == (1, 0, 0)
        later = pool.statistics().since(seen)
        assert (later.execs, later.exec_failures, later.exec.count, later.capacity) == (0, {}, 0, seen.capacity)

    run_virtual(main())


def test_the_time_to_live_starts_again_before_a_command_that_might_run_into_its_end():
    async def main():
        backend = FakeBackend(VirtualClock(), start_s=500.0)
        pool = pool_of(backend, start_timeout_s=600.0)
        async with pool.lease(SandboxSpec(ttl_s=400.0)) as box:
            await box.exec(Command(argv=["true"], timeout_s=10.0))
            assert backend.renewals == [], "the start doesn't count"
            await backend.clock.sleep(150.0)
            await box.exec(Command(argv=["true"], timeout_s=10.0))
            assert backend.renewals == [], "250 s are left"
            await backend.clock.sleep(100.0)
            await box.exec(Command(argv=["score"], timeout_s=10.0))
            assert backend.renewals == [400.0]
            await box.exec(Command(argv=["score"], timeout_s=1000.0))
            assert backend.renewals == [400.0, 1060.0]

    run_virtual(main())


@pytest.mark.parametrize("use", ["read", "write", "list", "snapshot", "resume"])
def test_whoever_works_with_files_alone_keeps_its_sandbox_alive(use: str):
    async def main():
        backend = FakeBackend(VirtualClock())
        pool = pool_of(backend)

        async def used(box: LeasedSandbox) -> None:
            if use == "resume":
                await box.pause()
            await {
                "read": lambda: box.read("f"),
                "write": lambda: box.write("f", b""),
                "list": lambda: box.list("."),
                "snapshot": lambda: box.snapshot("s"),
                "resume": box.resume,
            }[use]()

        async with pool.lease(SandboxSpec(ttl_s=400.0)) as box:
            backend.sandboxes[box.id].files["f"] = b""
            await used(box)
            assert backend.renewals == [], "nearly all of it is left"
            for passed in (1, 2, 3):
                await backend.clock.sleep(201.0)
                await used(box)
                assert backend.renewals == [400.0] * passed

    run_virtual(main())


def test_a_paused_sandbox_isnt_asked_to_live_on():
    async def main():
        backend = FakeBackend(VirtualClock())
        pool = pool_of(backend)
        async with pool.lease(SandboxSpec(ttl_s=400.0)) as box:
            await box.pause()
            await backend.clock.sleep(300.0)
            await box.snapshot("parked")
            assert backend.renewals == []

    run_virtual(main())
