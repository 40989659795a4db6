"""A rollout's sandbox: lent while it is parked, made again, given back however its rollout ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_sandboxes import FakeBackend, FakeSandbox
from played import play
from test_environments import SAID, Counting, waiting

from headway.config.sandbox import SandboxConfig
from headway.records.rollout import Failure
from headway.records.sandbox import SandboxError, infrastructure_failure
from headway.rollout.episode_sandbox import EpisodeSandbox
from headway.runtime.clock import VirtualClock, run_virtual
from headway.sandbox.pool import PoolSettings, SandboxPool

SPEC = SandboxConfig().spec
WHY = Failure(boundary="engine", cause="the group is overdue", infrastructure=True)
MESSAGE = {"role": "assistant", "content": "a"}


def test_a_sandbox_that_is_ready_after_its_rollout_ended_is_given_back() -> None:
    async def main() -> None:
        clock = VirtualClock()
        backend = FakeBackend(clock, start_s=5.0)
        pool = SandboxPool(backend, PoolSettings(live=1, retries=0), clock)
        box = EpisodeSandbox(pool, SPEC, labels={}, timeout_s=5.0)
        writing = asyncio.create_task(box.write("a", b"a"))
        await clock.sleep(1)
        await box.close()
        with pytest.raises(SandboxError, match="the rollout has ended"):
            await writing
        assert (pool.statistics().used, backend.sandboxes) == (0, {})

    run_virtual(main())


def test_a_sandbox_that_dies_while_it_is_parked_comes_back_with_its_files() -> None:
    async def meanwhile(rollouts: Any, boxes: Any, clock: Any) -> None:
        await clock.sleep(4)
        [box] = boxes._backend.sandboxes.values()
        box.die()  # of its age, say

    played = play(Counting(), SAID, gate=waiting([]), meanwhile=meanwhile)
    assert (played.rollout.failure, played.rollout.attempts) == (None, 1)
    assert played.rollout.verdict["file"] == "ab1b2c"


def test_a_parked_sandbox_is_lent_to_whoever_comes_later_and_to_no_more_than_come() -> None:
    async def main() -> None:
        clock = VirtualClock()
        backend = FakeBackend(clock)
        pool = SandboxPool(backend, PoolSettings(live=2, retries=0), clock)
        boxes = [EpisodeSandbox(pool, SPEC, labels={}, timeout_s=5.0) for _ in range(2)]
        for number, box in enumerate(boxes):
            await box.write("mine", f"{number}")
            await box.park(f"snapshot-{number}")
        await clock.sleep(100)
        assert len(backend.sandboxes) == 2, "nobody waits"
        async with pool.lease(SPEC):
            assert clock.now() < 101
            assert pool.statistics().paused == 1, "one was enough"
            for box in boxes:
                await box.unpark()
            assert await boxes[1].read("mine") == b"1"
            reading = asyncio.create_task(boxes[0].read("mine"))
            await clock.sleep(10)
            assert not reading.done(), "nothing is lent that is used again"
        assert await reading == b"0"
        for box in boxes:
            await box.close()
        assert (pool.statistics().used, backend.sandboxes) == (0, {})

    run_virtual(main())


def test_what_is_parked_stands_still_from_before_its_snapshot_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[str] = []
    full = infrastructure_failure("no space for another snapshot", retry=False)

    def told(name: str) -> Any:
        call = getattr(FakeSandbox, name)

        async def doing(box: FakeSandbox, *given: str) -> Any:
            did.append(name)
            if given == ("full",):
                raise SandboxError(full)
            return await call(box, *given)

        return doing

    async def main() -> None:
        clock = VirtualClock()
        pool = SandboxPool(FakeBackend(clock), PoolSettings(live=1, retries=0), clock)
        box = EpisodeSandbox(pool, SPEC, labels={}, timeout_s=5.0)
        await box.write("a", b"a")
        for name in ("pause", "snapshot", "resume"):
            monkeypatch.setattr(FakeSandbox, name, told(name))
        with pytest.raises(SandboxError, match="no space"):
            await box.park("full")
        assert did == ["pause", "snapshot", "resume"], "it isn't parked: it goes on"
        assert await box.read("a") == b"a"
        did.clear()
        await box.park("one")
        assert did == ["pause", "snapshot"]
        await box.close()

    run_virtual(main())


def test_where_nothing_can_stand_still_a_parked_one_is_given_back_and_comes_back_with_its_files() -> None:
    async def main() -> None:
        clock = VirtualClock()
        backend = FakeBackend(clock, can_pause=False)
        pool = SandboxPool(backend, PoolSettings(live=1, retries=0), clock)
        box = EpisodeSandbox(pool, SPEC, labels={}, timeout_s=5.0)
        await box.write("mine", b"1")
        state = await box.park("one")
        assert state.snapshot is not None
        assert (pool.statistics().used, backend.sandboxes) == (0, {})
        await box.unpark()
        assert await box.read("mine") == b"1"
        await box.close()

    run_virtual(main())


def test_two_that_use_a_lost_sandbox_at_once_share_the_one_that_is_made_again() -> None:
    async def main() -> None:
        clock = VirtualClock()
        backend = FakeBackend(clock)
        pool = SandboxPool(backend, PoolSettings(live=2, retries=0), clock)
        box = EpisodeSandbox(pool, SPEC, labels={}, timeout_s=5.0, repeatable=True)
        await box.write("a", b"a")
        lost: list[float] = [1.0, 3.0]  # the second hears of it later

        async def work(inner: Any) -> str:
            if inner.id == "fake-1":
                await clock.sleep(lost.pop(0))
                raise SandboxError(infrastructure_failure("lost"))
            await clock.sleep(10.0)
            assert not inner.ended
            return inner.id

        assert await asyncio.gather(box._retry_on_loss(work), box._retry_on_loss(work)) == ["fake-2", "fake-2"]
        await box.close()

    run_virtual(main())
