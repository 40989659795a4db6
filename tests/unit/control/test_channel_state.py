"""A channel against a plain list: whatever the schedule, every item arrives once, in order, and nobody is stuck."""

from __future__ import annotations

import math
import random

import pytest

from headway.control.channel_state import ChannelState, Get, Put


def state(capacity: int = 4, size: int = 1000, **more: object) -> ChannelState:
    return ChannelState("answers", capacity, size, **more)  # pyright: ignore[reportArgumentType]


def put(channel: ChannelState, *payloads: object, weight: float = 1.0, size: int = 1) -> Put:
    return channel.put("p", [(payload, weight, size) for payload in payloads])


def values(get: Get) -> list[object]:
    return [item.payload for item in get.items]


def schedule(seed: int) -> None:
    """One producer or several, one consumer or several, with deaths and calls that end; compared with a list."""
    rng = random.Random(seed)
    channel = state(rng.randint(1, 5), rng.choice([3, 1000]))
    consumers = [f"c{number}" for number in range(rng.randint(1, 3))]
    sent = 0
    total = rng.randint(1, 40)
    expected: list[int] = []  # the list model: what has been put and nobody has got
    held: dict[str, list[int]] = {name: [] for name in consumers}  # got by calls that haven't ended
    done: list[int] = []
    waiting: dict[str, Get] = {}
    puts: list[Put] = []
    came_back = 0

    def advance() -> None:
        for one in channel.advance(0.0):
            if isinstance(one, Put):
                puts.remove(one)
                continue
            name = next(name for name, get in waiting.items() if get is one)
            del waiting[name]
            got = [int(str(item.payload)) for item in one.items]
            # First in, first out: the oldest but for what others collect; after items came back at least in order.
            collected = {int(str(item.payload)) for get in waiting.values() for item in get.items}
            rest = [value for value in expected if value not in collected]
            assert got == (sorted(got) if came_back else rest[: len(got)]), seed
            for value in got:
                expected.remove(value)
            held[name] += got

    for _ in range(400):
        choice = rng.random()
        name = rng.choice(consumers)
        if choice < 0.35 and sent < total:
            count = min(rng.randint(1, 3), total - sent)
            puts.append(put(channel, *range(sent, sent + count)))
            expected += range(sent, sent + count)
            sent += count
        elif choice < 0.75 and name not in waiting:
            waiting[name] = channel.get(name, rng.choice([None, 1.0, 2.0, 3.0, math.inf]))
        elif choice < 0.85:
            done += [int(str(item.payload)) for item in channel.acknowledge(name)]
            held[name] = []
        elif choice < 0.92:  # it dies: what it had is there again, before everything later
            if name in waiting:
                came_back += len(waiting.pop(name).items)
            returned = channel.redeliver(name)
            assert returned == len(held[name]), seed
            expected = sorted(expected + held[name])
            held[name] = []
            came_back += returned
        elif choice < 0.95 and name in waiting:
            came_back += len(waiting[name].items)
            channel.withdraw(waiting.pop(name))
        advance()
        statistics = channel.statistics(0.0)
        assert statistics.used <= channel.capacity + came_back
    while sent < total:
        puts.append(put(channel, sent))
        expected.append(sent)
        sent += 1
    channel.close()
    advance()
    for _ in range(200):  # the end: somebody goes on asking until nothing is left
        for name in consumers:
            if name not in waiting:
                waiting[name] = channel.get(name)
        advance()
        for name in consumers:
            done += [int(str(item.payload)) for item in channel.acknowledge(name)]
            held[name] = []
    assert sorted(done) == list(range(total)), seed
    assert not puts, seed
    assert channel.statistics(0.0).used == 0


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 1000, 100))
def test_a_thousand_schedules_agree_with_a_list(start: int):
    for seed in range(start, start + 100):
        schedule(seed)


def test_items_come_in_order_and_a_full_channel_makes_its_producer_wait():
    channel = state(2)
    waiting = put(channel, 1, 2, 3)
    assert channel.advance(0.0) == []
    first = channel.get("c")
    assert channel.advance(0.0) == [first, waiting]
    assert values(first) == [1]
    assert channel.statistics(5.0).oldest_age_s == 5.0


def test_a_request_for_a_weight_collects_across_a_smaller_channel():
    channel = state(1)
    put(channel, 1, 2, 3, 4)
    get = channel.get("c", 4.0)
    assert get in channel.advance(0.0)
    assert values(get) == [1, 2, 3, 4]


def test_bytes_bound_a_channel_as_items_do():
    channel = state(10, 100)
    waiting = put(channel, 1, 2, size=60)
    assert channel.advance(0.0) == []
    assert channel.statistics(0.0).used_bytes == 60
    get = channel.get("c")
    assert channel.advance(0.0) == [get, waiting]
    with pytest.raises(ValueError, match=r"an item of 101 bytes is larger than the channel \(100 bytes\)"):
        put(channel, 1, size=101)


def test_the_end_of_a_closed_channel_serves_what_is_left_then_nothing():
    channel = state()
    put(channel, 1, 2)
    channel.close()
    everything, nothing = channel.get("c", math.inf), channel.get("d")
    channel.advance(0.0)
    assert (values(everything), values(nothing)) == ([1, 2], [])
    with pytest.raises(ValueError, match="is closed"):
        put(channel, 3)


def test_weights_of_nine_to_one_are_balanced_within_five_percent():
    channel = state(10_000, 10**9, balance="weight", consumers=["a", "b"])
    rng = random.Random(0)
    for _ in range(1000):
        put(channel, 0, weight=rng.choice([9.0, 1.0]))
    channel.advance(0.0)
    loads = channel.statistics(0.0).weights
    assert abs(loads["a"] - loads["b"]) <= 0.05 * max(loads.values())


def test_consumers_take_turns_or_follow_a_function():
    turns = state(10, balance="round_robin", consumers=["a", "b"])
    put(turns, 1, 2, 3, 4)
    get = turns.get("b", math.inf)
    turns.advance(0.0)
    turns.close()
    turns.advance(0.0)
    assert values(get) == [2, 4]
    heavy = state(10, balance=lambda weight, loads: "a" if weight > 2 else "b", consumers=["a", "b"])
    put(heavy, "light", weight=1.0)
    put(heavy, "heavy", weight=3.0)
    heavy.advance(0.0)
    assert heavy.statistics(0.0).weights == {"a": 3.0, "b": 1.0}
    astray = state(10, balance=lambda weight, loads: "c", consumers=["a"])
    put(astray, 1)
    with pytest.raises(ValueError, match="balance chose 'c'; valid: a"):
        astray.advance(0.0)


def test_a_dead_producers_items_are_dropped_where_they_died_with_it():
    channel = state(2)
    put(channel, "kept", "lost")
    put(channel, "never in")
    channel.advance(0.0)
    lost = channel.lose("p", kept=lambda item: item.payload == "kept")
    assert [item.payload for item in lost] == ["lost"]
    get = channel.get("c", math.inf)
    channel.close()
    channel.advance(0.0)
    assert values(get) == ["kept"]
