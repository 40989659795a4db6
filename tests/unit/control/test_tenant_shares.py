"""Tenants' turns by tokens: shares on a device of a virtual clock, whatever the sizes; late tenants and debts."""

from __future__ import annotations

import asyncio

from hypothesis import example, given, settings
from hypothesis import strategies as st

from headway.control.tenant_shares import DeficitRoundRobin
from headway.runtime.clock import Clock, run_virtual

QUANTUM, SECONDS = 100, 20.0
sizes = st.lists(st.integers(1, 1000), min_size=1, max_size=6)
large_sizes = st.lists(st.integers(50, 1000), min_size=1, max_size=6)


@settings(deadline=None, max_examples=40)
@given(st.lists(sizes, min_size=2, max_size=5), st.integers(10, 60))
def test_tenants_that_always_have_work_are_served_the_same_tokens(patterns: list[list[int]], items: int) -> None:
    turns = DeficitRoundRobin[int](QUANTUM)
    for tenant, pattern in enumerate(patterns):
        for number in range(items):
            turns.add(str(tenant), pattern[number % len(pattern)])
    served = dict.fromkeys(map(str, range(len(patterns))), 0)
    largest = max(max(pattern) for pattern in patterns)
    while all(turns.waiting(tenant) for tenant in served):
        entry = turns.take()
        assert entry is not None
        tenant, tokens = entry
        served[tenant] += tokens
        turns.charge(tenant, tokens)
        assert max(served.values()) - min(served.values()) <= 2 * (QUANTUM + largest)


@settings(deadline=None, max_examples=15)
@example([([1000], 1, 0.0), ([50], 1, 0.0)], 0)
@example([([50], 1, 0.0), ([1000], 1, 0.0)], 0)
@given(
    st.lists(st.tuples(large_sizes, st.integers(1, 4), st.floats(0, 0.5)), min_size=2, max_size=4),
    st.integers(0, 10),
)
def test_clients_that_wait_for_each_reply_share_a_device(
    clients: list[tuple[list[int], int, float]], idle_clients: int
) -> None:
    """Each keeps so many requests open; the device computes 1000 tokens a second. A client that is never without
    requests gets its share or more; the device never rests while there is work."""

    async def main(clock: Clock) -> None:
        turns, work = DeficitRoundRobin[tuple[int, asyncio.Event]](QUANTUM), asyncio.Event()
        served = [0] * len(clients)
        busy_s = 0.0

        async def client(number: int, stream: int) -> None:
            pattern, _, think_s = clients[number]
            for step in range(10_000):
                done = asyncio.Event()
                tokens = pattern[(step + stream) % len(pattern)]
                turns.add(str(number), (tokens, done))
                work.set()
                await done.wait()
                served[number] += tokens
                await clock.sleep(think_s if number else 0.0)

        async def device() -> None:
            nonlocal busy_s
            while True:
                while (entry := turns.take()) is None:
                    work.clear()
                    await work.wait()
                tenant, (tokens, done) = entry
                await clock.sleep(tokens / 1000)
                busy_s += tokens / 1000
                turns.charge(tenant, tokens)
                done.set()
                await asyncio.sleep(0)
                await asyncio.sleep(0)

        for number in range(idle_clients):
            turns.add(f"idle{number}", (1, asyncio.Event()))
        streams = [client(n, s) for n, (_, count, _) in enumerate(clients) for s in range(count)]
        tasks = [asyncio.ensure_future(one) for one in (device(), *streams)]
        await clock.sleep(SECONDS)
        for task in tasks:
            task.cancel()
        largest = max(max(pattern) for pattern, _, _ in clients)
        assert busy_s >= SECONDS - 2 * largest / 1000
        share = sum(served) / len(clients)
        assert served[0] >= share - 4 * (QUANTUM + largest)

    run_virtual(main, 100.0)


def test_a_late_tenant_has_its_turn_at_once_and_debts_are_repaid() -> None:
    turns = DeficitRoundRobin[str](10)
    for number in range(100):
        turns.add("a", f"a{number}")
    order: list[str] = []
    for number in range(12):
        if number == 4:
            for item in ("b0", "b1", "b2", "b3"):
                turns.add("b", item)
        entry = turns.take()
        assert entry is not None
        order.append(entry[1])
        turns.charge(entry[0], 35 if entry[0] == "a" else 10)
    assert order[4:9].count("b0") == 1
    assert {"b0", "b1", "b2"} <= set(order[4:9])
    assert turns.take() is not None
    assert len(turns) == 100 + 4 - 13


def test_fewer_tokens_than_were_charged_are_given_back() -> None:
    turns = DeficitRoundRobin[str](10)
    for tenant in ("a", "b"):
        for number in range(4):
            turns.add(tenant, f"{tenant}{number}")
    entry = turns.take()
    assert entry == ("a", "a0")
    turns.charge("a", 1000)
    turns.charge("a", -1000)
    assert turns.take() == ("a", "a1")
