"""Channels: order, bounds, closing, cancellation, statistics."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.runtime.bounded_queue import BoundedQueue, QueueClosed, QueueFull
from headway.runtime.clock import Clock, VirtualClock, run_virtual


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def start() -> None:
        await main()

    run_virtual(start())


def test_first_in_first_out_and_bounded():
    async def main() -> None:
        queue: BoundedQueue[int] = BoundedQueue(2, "c", VirtualClock())
        await queue.put(1)
        queue.put_nowait(2)
        with pytest.raises(QueueFull):
            queue.put_nowait(3)
        waiting = asyncio.create_task(queue.put(3))
        await asyncio.sleep(1)
        assert not waiting.done()
        assert queue.statistics().putters == queue.statistics().waiters == 1
        assert await queue.get() == 1
        with pytest.raises(QueueFull):  # the freed place is the waiting putter's
            queue.put_nowait(4)
        await waiting
        assert [await queue.get(), await queue.get()] == [2, 3]

    run(main)


def test_getters_are_served_in_the_order_they_came():
    async def main() -> None:
        queue: BoundedQueue[int] = BoundedQueue(4)
        got: list[tuple[str, int]] = []

        async def getter(name: str) -> None:
            got.append((name, await queue.get()))

        tasks = [asyncio.create_task(getter(name)) for name in "abc"]
        await asyncio.sleep(0)
        assert queue.statistics().getters == 3
        for item in range(3):
            queue.put_nowait(item)
        await asyncio.gather(*tasks)
        assert got == [("a", 0), ("b", 1), ("c", 2)]

    run(main)


def test_close_ends_putters_at_once_and_getters_after_draining():
    async def main() -> None:
        queue: BoundedQueue[str] = BoundedQueue(1, "c")
        await queue.put("a")
        waiting = asyncio.create_task(queue.put("b"))
        await asyncio.sleep(0)
        queue.close(remaining=["late"])  # kept although it is full
        queue.close()
        with pytest.raises(QueueClosed):
            await waiting
        with pytest.raises(QueueClosed):
            await queue.put("c")
        with pytest.raises(QueueClosed):
            queue.put_nowait("c")
        assert queue.statistics().closed
        assert [item async for item in queue] == ["a", "late"]
        with pytest.raises(QueueClosed):
            await queue.get()

    run(main)


def test_close_wakes_waiting_getters():
    async def main() -> None:
        queue: BoundedQueue[str] = BoundedQueue(1)
        waiting = [asyncio.create_task(queue.get()) for _ in range(2)]
        await asyncio.sleep(0)
        queue.close(remaining=["one"])
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert results[0] == "one"
        assert isinstance(results[1], QueueClosed)

    run(main)


def test_statistics_know_peak_and_the_age_of_the_oldest():
    async def main(clock: Clock) -> None:
        queue: BoundedQueue[int] = BoundedQueue(3, "queue", clock)
        assert queue.statistics().oldest_age_s == 0.0
        queue.put_nowait(1)
        await clock.sleep(2)
        queue.put_nowait(2)
        await clock.sleep(1)
        state = queue.statistics()
        assert (state.name, state.used, state.capacity, state.peak, state.oldest_age_s) == ("queue", 2, 3, 2, 3.0)
        await queue.get()
        await queue.get()
        state = queue.statistics()
        assert (state.used, state.peak, state.oldest_age_s) == (0, 2, 0.0)

    run_virtual(main)


def test_a_getter_cancelled_with_an_item_in_hand_does_not_lose_it():
    async def main() -> None:
        queue: BoundedQueue[str] = BoundedQueue(2)
        getter = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        queue.put_nowait("a")  # handed over; the getter has not run yet
        getter.cancel()
        await asyncio.gather(getter, return_exceptions=True)
        assert await queue.get() == "a"

        first, second = asyncio.create_task(queue.get()), asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        queue.put_nowait("b")
        first.cancel()
        assert await second == "b"

    run(main)


def test_a_putter_cancelled_with_a_place_in_hand_puts_nothing_and_passes_it_on():
    async def main() -> None:
        queue: BoundedQueue[str] = BoundedQueue(1)
        await queue.put("a")
        first, second = asyncio.create_task(queue.put("b")), asyncio.create_task(queue.put("c"))
        await asyncio.sleep(0)
        assert await queue.get() == "a"  # the place is first's now
        first.cancel()
        await second
        assert await queue.get() == "c"
        queue.put_nowait("d")  # and it is free again

    run(main)


def test_capacity_must_be_positive():
    with pytest.raises(ValueError, match="capacity 0"):
        BoundedQueue(0)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), capacity=st.integers(1, 4))
def test_nothing_is_lost_or_doubled_under_random_cancellation(seed: int, capacity: int):
    async def main(clock: Clock) -> None:
        numbers = random.Random(seed)
        queue: BoundedQueue[int] = BoundedQueue(capacity, "c", clock)
        put: list[int] = []
        got: list[int] = []

        async def produce(item: int) -> None:
            await clock.sleep(numbers.randrange(20))
            await queue.put(item)
            put.append(item)

        async def consume() -> None:
            await clock.sleep(numbers.randrange(20))
            got.append(await queue.get())

        async def cancel_some(tasks: list[asyncio.Task[None]]) -> None:
            for task in numbers.sample(tasks, 15):
                await clock.sleep(numbers.randrange(3))
                task.cancel()

        tasks = [asyncio.create_task(produce(item)) for item in range(25)]
        tasks += [asyncio.create_task(consume()) for _ in range(25)]
        await cancel_some(tasks)
        await clock.sleep(100)
        assert queue.statistics().used <= capacity
        while not all(task.done() for task in tasks[:25]):
            got.append(await queue.get())
            await clock.sleep(0)
        queue.close()
        got.extend([item async for item in queue])
        await asyncio.gather(*tasks, return_exceptions=True)
        assert sorted(got) == sorted(put)

    run_virtual(main, limit_s=10_000)
