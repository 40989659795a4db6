"""Worker slots with scripted workers under the virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from headway.records.errors import ConfigurationError, RemoteError, StorageFailed, WorkerDied
from headway.runtime.clock import Clock, run_virtual
from headway.runtime.process_worker import Death
from headway.runtime.worker_slots import WorkerSlot, live_pids, start_all, stop_all
from headway.runtime.workers import WorkerSpec


class ScriptedWorker:
    def __init__(self, name: str, pid: int) -> None:
        self.name, self.pid = name, pid
        self.died = Death()

    @property
    def alive(self) -> bool:
        return not self.died.done()

    def die(self, cause: str = "killed by SIGKILL (9)", **found: Any) -> None:
        self.died.set(WorkerDied(self.name, cause, **found))

    def kill(self, reason: str = "") -> None:
        self.die(reason, found_by="call")

    async def stop(self, grace_s: float = 5.0) -> None:
        self.die("stopped")


class ScriptedLauncher:
    """Takes 2 s for a start, and refuses as many as ``refusals`` says."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.refusals = 0
        self.error: Exception = WorkerDied("w-0", "no memory")
        self.workers: list[ScriptedWorker] = []
        self.started_s: list[float] = []
        self.specs: list[WorkerSpec] = []

    async def start(self, spec: WorkerSpec) -> Any:
        self.started_s.append(self.clock.now())
        self.specs.append(spec)
        await self.clock.sleep(2.0)
        if self.refusals:
            self.refusals -= 1
            raise self.error
        self.workers.append(ScriptedWorker(spec.name, len(self.workers)))
        return self.workers[-1]


class Setting:
    def __init__(self, clock: Clock, **options: Any) -> None:
        self.clock = clock
        self.launcher = ScriptedLauncher(clock)
        self.events: list[tuple[str, str, dict[str, Any]]] = []
        self.slot = WorkerSlot(WorkerSpec(name="w-0", factory=""), self.launcher, clock, self.note, **options)

    def note(self, name: str, detail: str, /, **data: Any) -> None:
        self.events.append((name, detail, data))

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.events]


def playing(scene: Callable[[Setting], Awaitable[None]], **options: Any) -> None:
    async def main(clock: Clock) -> None:
        one = Setting(clock, **options)
        await one.slot.start()
        await scene(one)
        await one.slot.stop(1.0)
        assert not any(worker.alive for worker in one.launcher.workers)

    run_virtual(main)


def test_an_outage_is_reported_with_who_how_it_was_found_its_cause_and_its_length() -> None:
    async def scene(one: Setting) -> None:
        one.launcher.workers[0].die("no heartbeat for 15.0 s", found_by="health", silent_s=15.0)
        await one.clock.sleep(4.0)  # nobody needs it yet
        assert one.events == [
            (
                "w_died",
                "w-0: no heartbeat for 15.0 s",
                {
                    "worker": "w-0",
                    "cause": "no heartbeat for 15.0 s",
                    "found_by": "health",
                    "lost_samples": 3,
                    "restarts": 0,
                },
            )
        ]
        assert await one.slot.restart() is one.slot.live is one.launcher.workers[1]
        after = {**one.events[0][2], "lost_samples": 0, "lost_s": 21.0, "restarts": 1}
        assert one.events[1:] == [("w_restarted", "w-0: after 21.0 s", after)]
        assert one.slot.state.restarts == 1

    playing(scene, held=lambda: 3)


def test_pauses_grow_with_failures_in_a_row_and_work_forgives_them() -> None:
    async def scene(one: Setting) -> None:
        one.launcher.refusals = 3
        one.launcher.workers[0].die()
        began_s = one.clock.now()
        while await one.slot.restart() is None:
            assert str(one.slot.fault) == "worker w-0 died: no memory"
        starts_s = [second - began_s for second in one.launcher.started_s[1:]]
        assert starts_s == [0.0, 2.5, 5.5, 9.5]  # 2 s each, and pauses of 0, 0.5, 1 and 2 s
        assert one.names == ["w_died", *["w_restart_failed"] * 3, "w_restarted"]
        assert [data.get("lost_s") for _, _, data in one.events] == [*[None] * 4, 11.5], "told once, at the end"
        assert one.slot.failures == 4
        one.slot.reset_failures()
        one.launcher.workers[1].die()
        await one.clock.sleep(1.0)
        died_s = one.clock.now()
        await one.slot.restart()
        assert one.launcher.started_s[-1] == died_s

    playing(scene)


def test_time_in_service_forgives_what_failed_before_it() -> None:
    async def scene(one: Setting) -> None:
        for failures, served_s in [(1, 50.0), (2, 60.0), (2, 60.0), (1, 101.0)]:
            await one.clock.sleep(served_s)
            one.launcher.workers[-1].die()
            await one.slot.dead()
            assert one.slot.failures == failures
            await one.slot.restart()

    playing(scene, failure_expiry_s=100.0)


def test_a_slot_beyond_its_limit_is_exhausted_and_lost_once() -> None:
    async def scene(one: Setting) -> None:
        one.launcher.refusals = 2
        one.launcher.workers[0].die()
        for _ in range(2):
            assert not one.slot.exhausted
            assert await one.slot.restart() is None
        assert one.slot.exhausted
        assert one.slot.live is None
        first, again = one.slot.give_up("gave up"), one.slot.give_up("gave up again")
        assert first is again
        assert one.names[-2:] == ["w_restart_failed", "w_lost"]
        assert one.events[-1][2]["lost_s"] == 4.5

    playing(scene, limit=2)


def test_callers_share_one_restart_and_none_waits_longer_than_it_wants() -> None:
    async def scene(one: Setting) -> None:
        one.launcher.workers[0].die()
        given_up = asyncio.create_task(one.slot.restart())
        await one.clock.sleep(0.5)
        given_up.cancel()
        assert await one.slot.restart(timeout_s=1.0) is None
        assert one.slot.restarting
        assert await one.slot.restart() is one.launcher.workers[1]
        assert len(one.launcher.started_s) == 2

    playing(scene)


def test_a_worker_that_cannot_be_made_ready_is_killed_and_counts_as_a_failed_start() -> None:
    prepared: list[Any] = []

    async def prepare(worker: Any) -> None:
        prepared.append(worker)
        if len(prepared) == 2:
            raise RemoteError("w-0", "update", "checksum", "")

    async def scene(one: Setting) -> None:
        one.launcher.workers[0].die()
        assert await one.slot.restart() is None
        assert not one.launcher.workers[1].alive
        assert await one.slot.restart() is one.launcher.workers[2]
        assert one.names == ["w_died", "w_restart_failed", "w_restarted"], "its death is the failed start, no other"
        assert [spec.arguments for spec in one.launcher.specs] == [{}, {"again": 1}, {"again": 1}]

    playing(scene, prepare=prepare, restart_arguments={"again": 1})


@pytest.mark.parametrize("when_s", [0.0, 1.0, 2.2])
def test_stopping_ends_a_restart_and_reports_nothing(when_s: float) -> None:
    async def scene(one: Setting) -> None:
        one.launcher.refusals = 1
        one.launcher.workers[0].die()
        waiting = asyncio.create_task(one.slot.restart())
        await one.clock.sleep(when_s)
        if when_s > 2:
            waiting = asyncio.create_task(one.slot.restart())
            await one.clock.sleep(0.1)
        before = list(one.names)
        await one.slot.stop(1.0)
        assert await waiting is None
        await one.clock.sleep(100.0)
        assert one.names == before

    playing(scene)


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_death_that_was_wanted_is_no_outage(how: str) -> None:
    async def scene(one: Setting) -> None:
        if how == "stop":
            await one.slot.stop(1.0)
        else:
            one.slot.kill("its pool is stopped")
        await one.clock.sleep(1.0)
        assert one.slot.live is None
        assert one.events == []
        assert not one.slot.has_died

    playing(scene)


def test_an_event_that_cannot_be_recorded_reaches_whoever_needs_the_worker() -> None:
    def full(name: str, detail: str, /, **data: Any) -> None:
        if name == "w_died":
            raise StorageFailed("the disk is full")

    async def scene(one: Setting) -> None:
        one.slot._reporter._on_event = full
        one.launcher.workers[0].die()
        with pytest.raises(StorageFailed, match="the disk is full"):
            await one.slot.restart()

    playing(scene)


def test_all_start_at_once_and_the_first_fault_is_the_workers_own() -> None:
    async def main(clock: Clock) -> None:
        launcher = ScriptedLauncher(clock)
        slots = [WorkerSlot(WorkerSpec(name=f"w-{i}", factory=""), launcher, clock) for i in range(3)]
        await start_all(slots)
        assert launcher.started_s == [0.0] * 3
        assert live_pids(slots) == [0, 1, 2]
        launcher.workers[1].die()
        assert live_pids(slots) == [0, 2]
        await stop_all(slots, 1.0)
        assert live_pids(slots) == []
        launcher.refusals = 1
        launcher.error = RemoteError("w-0", "start", "ConfigurationError: x", "")
        launcher.error.__cause__ = ConfigurationError("verifier.name = 'x:y' can't be imported")
        with pytest.raises(ConfigurationError, match="can't be imported"):
            await start_all([WorkerSlot(WorkerSpec(name="w-0", factory=""), launcher, clock)])

    run_virtual(main)


def test_a_slot_never_started_starts_its_first_worker_when_it_is_needed() -> None:
    async def main(clock: Clock) -> None:
        one = Setting(clock, restart_arguments={"again": 1})
        assert await one.slot.restart() is one.launcher.workers[0]
        assert one.launcher.specs[0].arguments == {}
        assert (one.events, one.slot.restarts) == ([], 0)
        await one.slot.stop(1.0)

    run_virtual(main)


def test_lost_nodes_use_up_no_restarts():
    async def scene(one: Setting) -> None:
        for number in range(5):
            one.launcher.workers[-1].die("node b lost its connection", found_by="node")
            begun_s = one.clock.now()
            await one.slot.restart()
            assert one.clock.now() - begun_s == 2.0, "no pause"
            assert (one.slot.exhausted, one.slot.failures, one.slot.restarts) == (False, 0, number + 1)
        for _ in range(2):
            one.launcher.workers[-1].die()
            await one.slot.dead()
        assert one.slot.failures == 1

    playing(scene, limit=2)
