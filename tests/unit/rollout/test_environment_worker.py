"""Workers of environments that are held up, die, or can't be started again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from played import TASK, InProcess, play

from headway.config.endpoint import EnvironmentConfig
from headway.config.sandbox import SandboxConfig
from headway.records.errors import WorkerDied
from headway.rollout.environment import Environment
from headway.rollout.hosting.client import EnvironmentDied, EnvironmentPool
from headway.runtime.bounded_queue import BoundedQueue
from headway.runtime.clock import VirtualClock, run_virtual
from headway.runtime.stalls.waits import Waits


class Stuck:
    """A worker that takes calls, and answers none."""

    def __init__(self) -> None:
        self.events: BoundedQueue[Any] = BoundedQueue(8)
        self.waits = Waits(lambda: 0.0)
        self.died: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    @property
    def alive(self) -> bool:
        return not self.died.done()

    async def call(self, method: str, *arguments: Any) -> None:
        return None

    async def stop(self, grace_s: float) -> None:
        self.kill("stopped")

    def kill(self, reason: str = "") -> None:
        if self.alive:
            self.died.set_result(WorkerDied("environment-0", reason))
            self.events.close()


def test_a_worker_that_an_environment_holds_up_for_ever_dies_of_it() -> None:
    class Launcher:
        started = 0

        async def start(self, spec: Any) -> Any:
            self.started += 1
            return Stuck()

    async def main() -> None:
        clock, launcher = VirtualClock(), Launcher()
        settings = EnvironmentConfig(name="mine:Mine", timeout_s=10.0)
        pool = EnvironmentPool(cast("Any", launcher), settings, SandboxConfig(), clock, sandboxes="none:none")
        await pool.start()

        async def one() -> None:
            async with pool.lease("7-1") as lease:
                await lease.begin(TASK, 3)

        async with asyncio.timeout(1000):
            with pytest.raises(EnvironmentDied, match="no answer to begin in 310 s"):
                await one()
        async with asyncio.timeout(1000):  # also where the rollout was cancelled, and its end isn't answered
            playing = asyncio.create_task(one())
            await clock.sleep(5)
            playing.cancel()
            await asyncio.wait((playing,))
        assert launcher.started == 2
        await pool.stop()

    run_virtual(main())


class Answering(Stuck):
    """A worker that answers everything."""

    clock_offset_s = 0.0

    async def call(self, method: str, number: int, *arguments: Any) -> None:
        await self.events.put((number, True, None, 0.25))


class Refusing:
    """Starts workers, but none of those in ``refused``."""

    def __init__(self) -> None:
        self.starts_s = 3.0
        self.refused: set[str] = set()
        self.workers: dict[str, Answering] = {}
        self.tries: list[str] = []

    async def start(self, spec: Any) -> Any:
        self.tries.append(spec.name)
        await asyncio.sleep(self.starts_s)
        if spec.name in self.refused:
            raise WorkerDied(spec.name, "no memory")
        self.workers[spec.name] = Answering()
        return self.workers[spec.name]


def pooled(main: Callable[[EnvironmentPool, Refusing, VirtualClock], Coroutine[Any, Any, None]], workers: int) -> None:
    async def whole() -> None:
        clock, launcher = VirtualClock(), Refusing()
        settings = EnvironmentConfig(name="mine:Mine", workers=workers)
        pool = EnvironmentPool(cast("Any", launcher), settings, SandboxConfig(), clock, sandboxes="none:none")
        await pool.start()
        for number in range(workers):
            await played(pool, str(number))
        await main(pool, launcher, clock)
        await pool.stop()

    run_virtual(whole())


async def played(pool: EnvironmentPool, name: str) -> str:
    """Where."""
    async with pool.lease(name) as lease:
        await lease.begin(TASK, 3)
        await asyncio.sleep(10)
        return lease._client.name


def test_a_lease_counts_how_long_its_worker_had_answers_to_reply_to_and_to_score() -> None:
    async def main(pool: EnvironmentPool, launcher: Refusing, clock: VirtualClock) -> None:
        async with pool.lease("7-1") as lease:
            await lease.begin(TASK, 3)
            assert lease.working_s == 0.0
            await lease.reply({}, "", False)
            await lease.score()
            assert lease.working_s == 0.5

    pooled(main, workers=1)


def test_rollouts_go_where_a_worker_lives_while_another_can_not_be_started() -> None:
    async def main(pool: EnvironmentPool, launcher: Refusing, clock: VirtualClock) -> None:
        launcher.refused = {"environment-0"}
        launcher.workers["environment-0"].kill("gone")
        for _ in range(10):
            began = await asyncio.gather(*(played(pool, f"7-{number}") for number in range(5)))
            assert set(began) == {"environment-1"}
        assert 5 < len(launcher.tries) < 12, "it is tried again, ever more rarely, beside"
        assert [state.up for state in pool.worker_states] == [False, True]
        launcher.refused.clear()
        await asyncio.gather(*(played(pool, f"8-{number}") for number in range(5)))
        await clock.sleep(40)
        began = await asyncio.gather(*(played(pool, f"9-{number}") for number in range(4)))
        assert sorted(began) == ["environment-0"] * 2 + ["environment-1"] * 2

    pooled(main, workers=2)


def test_a_worker_that_died_in_service_is_waited_for() -> None:
    async def main(pool: EnvironmentPool, launcher: Refusing, clock: VirtualClock) -> None:
        launcher.workers["environment-0"].kill("gone")
        began = await asyncio.gather(*(played(pool, f"7-{number}") for number in range(4)))
        assert sorted(began) == ["environment-0"] * 2 + ["environment-1"] * 2

    pooled(main, workers=2)


def test_a_start_that_hangs_holds_nobody_up_for_long_where_another_worker_lives() -> None:
    async def main(pool: EnvironmentPool, launcher: Refusing, clock: VirtualClock) -> None:
        launcher.starts_s = 600.0
        launcher.workers["environment-0"].kill("gone")
        for limit_s in (45, 15):
            async with asyncio.timeout(limit_s):
                began = await asyncio.gather(*(played(pool, f"7-{number}") for number in range(6)))
            assert set(began) == {"environment-1"}
        await clock.sleep(600)
        began = await asyncio.gather(*(played(pool, f"8-{number}") for number in range(4)))
        assert sorted(began) == ["environment-0"] * 2 + ["environment-1"] * 2

    pooled(main, workers=2)


def test_when_no_worker_can_be_started_the_cause_is_told() -> None:
    async def main(pool: EnvironmentPool, launcher: Refusing, clock: VirtualClock) -> None:
        launcher.refused = {"environment-0", "environment-1"}
        for worker in launcher.workers.values():
            worker.kill("gone")
        for error in await asyncio.gather(*(played(pool, str(number)) for number in range(6)), return_exceptions=True):
            assert isinstance(error, WorkerDied)
            assert "gave up after 5 starts; last: worker environment-" in error.cause
            assert "no memory" in error.cause

    pooled(main, workers=2)


def test_a_worker_that_dies_before_it_has_done_anything_is_not_started_for_ever() -> None:
    class Dying(Refusing):
        async def start(self, spec: Any) -> Any:
            worker = await super().start(spec)
            worker.kill("exit code 1")
            return worker

    async def main() -> None:
        clock, launcher = VirtualClock(), Dying()
        settings = EnvironmentConfig(name="mine:Mine")
        pool = EnvironmentPool(cast("Any", launcher), settings, SandboxConfig(), clock, sandboxes="none:none")
        await pool.start()
        with pytest.raises(WorkerDied, match="gave up after 5 starts; last: worker environment-0 died: exit code 1"):
            await played(pool, "7-1")
        await pool.stop()

    run_virtual(main())


def test_rollouts_that_each_kill_their_worker_at_once_end_no_run() -> None:
    class Poisoned(Answering):
        async def call(self, method: str, number: int, *arguments: Any) -> None:
            if arguments and "bad" in arguments[1][0]:
                self.kill("SIGSEGV")
                raise WorkerDied("environment-0", "SIGSEGV")
            await super().call(method, number, *arguments)

    class Launcher(Refusing):
        async def start(self, spec: Any) -> Any:
            await super().start(spec)
            self.workers[spec.name] = Poisoned()
            return self.workers[spec.name]

    async def main() -> None:
        clock, launcher = VirtualClock(), Launcher()
        settings = EnvironmentConfig(name="mine:Mine", concurrency=1)
        pool = EnvironmentPool(cast("Any", launcher), settings, SandboxConfig(), clock, sandboxes="none:none")
        await pool.start()
        for _ in range(10):
            with pytest.raises(EnvironmentDied, match="SIGSEGV"):
                await played(pool, "bad")
        assert await played(pool, "good") == "environment-0"
        await pool.stop()

    run_virtual(main())


def test_a_pool_that_stops_waits_for_no_start() -> None:
    async def main(pool: EnvironmentPool, launcher: Refusing, clock: VirtualClock) -> None:
        launcher.workers["environment-0"].kill("gone")
        playing = asyncio.create_task(played(pool, "7-1"))
        await asyncio.sleep(1)
        await pool.stop()
        with pytest.raises(EnvironmentDied, match="stopped"):
            await playing

    pooled(main, workers=1)


def test_without_workers_a_rollout_ends_the_run() -> None:
    class NoneLeft(InProcess):
        @asynccontextmanager
        async def lease(self, name: str) -> AsyncIterator[Any]:
            raise WorkerDied("environment-0", "gave up after 5 starts")
            yield

    with pytest.raises(WorkerDied, match="gave up after 5 starts"):
        play(Environment(), ["a"], pool_of=NoneLeft)


def test_a_death_is_an_event_with_the_rollouts_it_cost_and_so_is_the_restart() -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    workers: list[Answering] = []

    class Launcher:
        async def start(self, spec: Any) -> Any:
            workers.append(Answering())
            return workers[-1]

    async def main() -> None:
        clock = VirtualClock()
        settings = EnvironmentConfig(name="mine:Mine")
        pool = EnvironmentPool(
            cast("Any", Launcher()),
            settings,
            SandboxConfig(),
            clock,
            sandboxes="none:none",
            on_event=lambda name, detail, **fields: events.append((name, fields)),
        )
        await pool.start()
        async with pool.lease("1-0"), pool.lease("1-1"):
            workers[0].kill("killed by SIGKILL (9)")
            await clock.sleep(4.0)
        await played(pool, "1-2")
        await pool.stop()

    run_virtual(main())
    assert [name for name, _ in events] == ["environment_died", "environment_restarted"]
    died, back = (fields for _, fields in events)
    assert (died["worker"], died["cause"], died["lost_samples"]) == ("environment-0", "killed by SIGKILL (9)", 2)
    assert back["lost_s"] == pytest.approx(4.0)  # the first restart has no pause before it
