"""Turns on devices under the virtual clock: recalls, moves, timeouts, deaths, and errors that hang nobody."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from headway.flow.device_locks import WAIT, DeviceLocks
from headway.records.errors import DeviceBusy, StorageFailed, WorkerDied
from headway.records.execution import Participant
from headway.runtime.clock import Clock, run_virtual
from headway.runtime.stalls.waits import Waits


def party(name: str, *devices: str, order: int = 0) -> Participant:
    return Participant(name=name, stage=f"stage of {name}", devices=frozenset(devices or {"cpu:0"}), order=order)


class Diary:
    """Locks whose moves take a second each and are written down."""

    def __init__(self, clock: Clock) -> None:
        self.lines: list[tuple[float, str]] = []
        self.spans: list[tuple[Any, ...]] = []
        self.events: list[str] = []
        self.clock, self.waits = clock, Waits(clock.now)
        self.locks = DeviceLocks(
            clock,
            self.waits,
            on_event=lambda name, detail, /, **data: self.events.append(f"{name}: {detail}"),
            on_span=lambda *span: self.spans.append(span),
        )

    def move(self, what: str, seconds: float = 1.0, fails: Exception | None = None) -> Callable[[], Awaitable[None]]:
        async def go() -> None:
            await self.clock.sleep(seconds)
            self.lines.append((self.clock.now(), what))
            if fails is not None:
                raise fails

        return go

    def standing(self, name: str, *devices: str, **moves: Any) -> None:
        recall, resume = self.move(f"{name} paused"), self.move(f"{name} resumed")
        self.locks.add(party(name, *devices), **{"recall": recall, "resume": resume} | moves)


def played(scene: Callable[[Diary], Awaitable[Any]]) -> Any:
    async def main(clock: Clock) -> Any:
        return await scene(Diary(clock))

    return run_virtual(main)


def test_a_standing_party_is_paused_for_exactly_the_turn_of_another():
    async def scene(diary: Diary) -> None:
        diary.standing("generator-0", "cpu:0")
        diary.standing("generator-1", "cpu:1")
        diary.locks.add(party("trainer", "cpu:0", "cpu:1", order=1))
        for _ in range(2):
            async with diary.locks.turn("trainer"):
                diary.lines.append((diary.clock.now(), "trains"))
                await diary.clock.sleep(5.0)
        assert sorted(diary.lines[:2]) == [(1.0, "generator-0 paused"), (1.0, "generator-1 paused")]
        assert diary.lines[2] == (1.0, "trains")
        assert sorted(diary.lines[3:5]) == [(7.0, "generator-0 resumed"), (7.0, "generator-1 resumed")]
        assert (8.0, "trains") in diary.lines
        counts = diary.locks.statistics()
        assert (counts.switches, counts.idle_wanted_s) == (4, 0.0)  # both gave up at the same time

    played(scene)


def test_a_party_that_joins_while_its_device_is_held_pauses():
    async def scene(diary: Diary) -> None:
        diary.locks.add(party("trainer", order=1))
        async with diary.locks.turn("trainer"):
            diary.standing("generator-0")
            await diary.clock.sleep(5.0)
        assert diary.lines == [(1.0, "generator-0 paused"), (6.0, "generator-0 resumed")]

    played(scene)


def test_moves_come_in_order_and_only_when_needed():
    async def scene(diary: Diary) -> None:
        for order, name in enumerate("ab"):
            moves = {what: diary.move(f"{name} {what}s") for what in ("onload", "offload")}
            diary.locks.add(party(name, order=order), **moves)
        for name in "aabb":
            async with diary.locks.turn(name):
                pass
        assert [line for _, line in diary.lines] == ["a onloads", "a offloads", "b onloads"]
        assert diary.spans == [
            ("cpu:0", "a", "onload", 0.0, 1.0), ("cpu:0", "a", "offload", 1.0, 2.0), ("cpu:0", "b", "onload", 2.0, 3.0)
        ]  # fmt: skip

    played(scene)


def test_a_timeout_names_the_holder_and_so_does_the_register_of_waits():
    async def scene(diary: Diary) -> None:
        for name in ("holder", "asker"):
            diary.locks.add(party(name))
        await diary.locks.acquire("holder")
        await diary.clock.sleep(3.0)
        waiting = asyncio.create_task(diary.locks.acquire("asker", timeout_s=4.0))
        await diary.clock.sleep(1.0)
        (wait,) = diary.waits.open()
        assert (wait.kind, wait.owner, wait.waiter) == (WAIT, "holder", "asker")
        with pytest.raises(DeviceBusy, match=r"asker .*after 4 s: holder \(stage .*\) has cpu:0 for 7.0 s"):
            await waiting
        assert not diary.waits.open()
        diary.locks.release("holder")
        await diary.locks.acquire("asker", timeout_s=1.0)

    played(scene)


def test_a_cancelled_wait_and_a_failed_load_leave_the_device_free():
    async def scene(diary: Diary) -> None:
        diary.locks.add(party("a"))
        diary.locks.add(party("b"), onload=diary.move("b", fails=WorkerDied("b", "killed")))
        diary.locks.add(party("c"))
        await diary.locks.acquire("a")
        waiting = asyncio.create_task(diary.locks.acquire("c"))
        await diary.clock.sleep(1.0)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        diary.locks.release("a")
        with pytest.raises(WorkerDied):
            await diary.locks.acquire("b")
        await diary.locks.acquire("c", timeout_s=0.5)

    played(scene)


def test_who_cannot_leave_stays_and_the_run_is_told():
    async def scene(diary: Diary) -> None:
        onload = diary.move("a onloads")
        diary.locks.add(party("a"), onload=onload, offload=diary.move("a", fails=StorageFailed("the disk is full")))
        diary.locks.add(party("b"))
        for name in "aba":
            async with diary.locks.turn(name):
                pass
        assert [line for _, line in diary.lines] == ["a onloads", "a"]  # it never left
        assert diary.events == ["offload_failed: a stays on its devices: the disk is full"]

    played(scene)


def test_a_recall_that_fails_ends_the_wait_for_it():
    async def scene(diary: Diary) -> None:
        diary.standing("generator-0", recall=diary.move("x", fails=RuntimeError("broken")))
        diary.locks.add(party("trainer", order=1))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="broken"):
                await diary.locks.acquire("trainer", timeout_s=60.0)

    played(scene)


def test_a_dead_holders_devices_go_on_when_its_memory_is_free():
    async def scene(diary: Diary) -> None:
        for name in "ab":
            diary.locks.add(party(name))
        await diary.locks.acquire("a")
        diary.locks.died("a", memory_free=False)
        with pytest.raises(DeviceBusy, match="dead; its memory may still be in use"):
            await diary.locks.acquire("b", timeout_s=1.0)
        diary.locks.died("a")
        await diary.locks.acquire("b", timeout_s=1.0)

    played(scene)


@pytest.mark.parametrize("cancelled_after_s", [0.0, 0.5])
def test_a_party_that_is_cancelled_before_it_loads_leaves_room_for_the_next(cancelled_after_s: float):
    async def scene(diary: Diary) -> list[tuple[float, str]]:
        locks = diary.locks
        locks.add(party("first"), loaded=True, offload=diary.move("first is off", 2.0))
        for name in ("second", "third"):
            locks.add(party(name), onload=diary.move(f"{name} is on"))
        second = asyncio.create_task(locks.acquire("second"))
        await asyncio.sleep(0)  # it has asked, and was granted
        await diary.clock.sleep(cancelled_after_s)
        second.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await second
        async with locks.turn("third"):
            pass
        return diary.lines

    assert played(scene) == [(2.0, "first is off"), (3.0, "third is on")]


def test_room_can_be_made_for_one_that_loads_by_itself():
    async def scene(diary: Diary) -> list[tuple[float, str]]:
        locks = diary.locks
        locks.add(party("first"), loaded=True, offload=diary.move("first is off"))
        locks.add(party("second"), onload=diary.move("second is on"), offload=diary.move("second is off"))
        await locks.acquire("second", load=False)
        locks.release("second")
        async with locks.turn("first"):
            pass
        await locks.wait_until_idle()
        return diary.lines

    assert played(scene) == [(1.0, "first is off"), (2.0, "second is off")]
