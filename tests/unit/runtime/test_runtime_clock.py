"""Virtual time: jumps, order, deadlocks named, the real clock's contract."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from headway.runtime.clock import Clock, Deadlock, OutOfTime, RealClock, VirtualClock, run_virtual


def test_time_jumps_over_sleeps_and_timeouts():
    async def main(clock: Clock) -> list[float]:
        seen = [clock.now()]
        await clock.sleep(3600)
        seen.append(clock.now())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.25):
                await asyncio.Event().wait()
        seen.append(clock.now())
        await asyncio.sleep(0)
        seen.append(clock.now())
        return seen

    started = time.monotonic()
    assert run_virtual(main) == [0.0, 3600.0, 3600.25, 3600.25]
    assert time.monotonic() - started < 2


def test_a_coroutine_is_accepted_and_every_clock_shows_the_loops_time():
    clock = VirtualClock()
    assert clock.now() == 0.0

    async def main() -> float:
        await clock.sleep(5)
        assert clock.now() == 5.0
        return VirtualClock().now()

    assert run_virtual(main()) == 5.0
    assert clock.now() == 5.0  # outside: the time it last saw


def test_virtual_clock_refuses_to_sleep_on_a_real_loop():
    with pytest.raises(RuntimeError, match="run_virtual"):
        asyncio.run(VirtualClock().sleep(1))


def _schedule(seed: int) -> list[tuple[float, int, int]]:
    """Twenty workers on random timers and one lock: the order of all that happens."""

    async def main(clock: Clock) -> list[tuple[float, int, int]]:
        numbers = random.Random(seed)
        lock = asyncio.Lock()
        happened: list[tuple[float, int, int]] = []

        async def work(index: int) -> None:
            for turn in range(10):
                await clock.sleep(numbers.choice([0.0, 0.1, 0.3, numbers.random()]))
                async with lock:
                    await clock.sleep(numbers.random() * 0.01)
                    happened.append((clock.now(), index, turn))

        async with asyncio.TaskGroup() as group:
            for index in range(20):
                group.create_task(work(index))
        return happened

    return run_virtual(main)


def test_schedules_are_reproducible_and_in_order_of_time():
    first = _schedule(1)
    assert first == _schedule(1)
    assert first != _schedule(2)
    assert [entry[0] for entry in first] == sorted(entry[0] for entry in first)


def test_deadlock_names_every_waiting_task_and_where():
    async def wait_for_nothing() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.gather(
            asyncio.create_task(wait_for_nothing(), name="collect"),
            asyncio.create_task(asyncio.Lock().acquire(), name="fine"),
        )

    with pytest.raises(Deadlock) as caught:
        run_virtual(main())
    message = str(caught.value)
    assert isinstance(caught.value, RuntimeError)
    assert "collect: Event.wait" in message
    assert "fine" not in message
    assert "main" in message


def test_deadlock_cancels_what_is_left():
    cleaned: list[str] = []

    async def main() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append("main")

    with pytest.raises(Deadlock):
        run_virtual(main())
    assert cleaned == ["main"]


def test_periodic_timers_do_not_hide_a_stuck_program_from_the_limit():
    async def tick(clock: Clock) -> None:
        while True:
            await clock.sleep(1)

    async def main(clock: Clock) -> None:
        ticking = asyncio.create_task(tick(clock), name="ticking")
        await asyncio.Event().wait()
        ticking.cancel()

    with pytest.raises(OutOfTime, match="ticking"):
        run_virtual(main, limit_s=1000)


def test_errors_come_through_and_threads_run_in_place():
    async def fails() -> None:
        await asyncio.sleep(1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_virtual(fails())

    async def threads() -> int:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)
        return await asyncio.to_thread(sum, [1, 2])

    assert run_virtual(threads()) == 3


def test_real_clock_is_monotonic():
    async def main() -> float:
        clock = RealClock()
        before = clock.now()
        await clock.sleep(0.02)
        return clock.now() - before

    assert asyncio.run(main()) >= 0.019
