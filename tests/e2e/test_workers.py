"""Workers in real processes: calls, events, back-pressure, groups."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest
from worker_processes import BOTH_STARTS, own_servers, reaped, run, running, spec

from headway.records.errors import CheckpointCorrupt, RemoteError, WorkerDied
from headway.runtime.clock import RealClock
from headway.runtime.devices import machine_cores
from headway.runtime.workers import LocalLauncher, call_all

pytestmark = [pytest.mark.real, pytest.mark.timeout(60), pytest.mark.usefixtures("servers")]


@pytest.fixture(scope="module")
def servers() -> Iterator[None]:
    with own_servers():
        yield


@BOTH_STARTS
def test_device_environment_and_arguments_reach_the_worker(preload: tuple[str, ...]):
    async def main() -> None:
        last = len(machine_cores()) - 1
        made = spec(preload=preload, device=f"cpu:{last}", arguments={"greeting": "hello"}, environment={"EXTRA": "1"})
        async with running(made) as worker:
            seen = await worker.call("seen")
            assert seen["imported_on"] == [machine_cores()[last]]
            assert seen["device"] == f"cpu:{last}"
            assert seen["greeting"] == "hello"
            assert seen["environment"]["OMP_NUM_THREADS"] == "1"
            assert seen["environment"]["EXTRA"] == "1"
            assert seen["environment"]["MALLOC_TRIM_THRESHOLD_"] == "8000000000"
            assert seen["group"] == worker.pid
            assert not seen["torch"]
            assert seen["started_as"] == ("headway.runtime.fork_server" if preload else "headway.runtime.child")
            assert seen["parent"] == os.getpid()
            assert os.getpgid(worker.pid) == worker.pid

    run(main)


@BOTH_STARTS
def test_a_pinned_parent_still_gives_its_workers_all_cores(preload: tuple[str, ...]):
    async def main() -> None:
        mask = os.sched_getaffinity(0)
        os.sched_setaffinity(0, machine_cores()[:1])
        try:
            async with running(spec(preload=preload, device=f"cpu:{len(machine_cores()) - 1}")) as worker:
                assert (await worker.call("seen"))["imported_on"] == [machine_cores()[-1]]
        finally:
            os.sched_setaffinity(0, mask)

    run(main)


def test_calls_run_in_order_on_the_main_thread_two_hundred_at_once():
    async def main() -> None:
        async with running() as worker:
            threads = await asyncio.gather(*(worker.call("add", number) for number in range(200)))
            assert set(threads) == {0}
            assert await worker.call("ordered") == list(range(200))

    run(main)


@BOTH_STARTS
def test_a_call_that_returns_a_future_is_answered_once_that_is_done(preload: tuple[str, ...]):
    async def main() -> None:
        deferring = spec("Deferring", preload=preload)
        async with running(deferring) as worker:
            later = asyncio.create_task(worker.call("wait_for_release"))
            assert await worker.call("release", "now") == "released"
            assert await later == "now"
        async with running(deferring) as worker:
            later = asyncio.create_task(worker.call("wait_for_release"))
            await worker.call("fail")
            with pytest.raises(RemoteError, match="CheckpointCorrupt: later"):
                await later

    run(main)


def test_fifty_megabytes_there_and_back():
    async def main() -> None:
        async with running() as worker:
            array = np.ones(50_000_000 // 8)
            assert await worker.call("total", array) == array.size
            back = await worker.call("make", 50_000_000)
            assert back.size == 50_000_000
            assert back[257] == 1
            back[0] = 7  # received arrays are writable
            # Both directions at once, and small calls behind them:
            results = await asyncio.gather(*(worker.call("echo", value) for value in (array, array, 5)))
            assert [np.array_equal(result, array) for result in results[:2]] == [True, True]
            assert results[2] == 5

    run(main)


def test_an_exception_carries_its_remote_traceback_and_the_worker_lives_on():
    async def main() -> None:
        async with running() as worker:
            with pytest.raises(RemoteError) as caught:
                await worker.call("fail", "a key")
            assert (caught.value.worker, caught.value.method) == ("w", "fail")
            assert caught.value.error == "KeyError: 'a key'"
            assert "in fail" in caught.value.traceback
            assert "runtime_worker_classes.py" in caught.value.traceback
            assert await worker.call("echo", 1) == 1

    run(main)


def test_typed_errors_are_the_cause_where_they_survive_pickling():
    async def main() -> None:
        async with running() as worker:
            with pytest.raises(RemoteError) as caught:
                await worker.call("fail_typed")
            assert isinstance(caught.value.__cause__, CheckpointCorrupt)
            assert str(caught.value.__cause__) == "model.safetensors: wrong checksum"
            with pytest.raises(RemoteError, match="worker inner died: exited with code 1") as caught:
                await worker.call("fail_unpicklable")
            assert caught.value.__cause__ is None

    run(main)


@pytest.mark.parametrize(
    ("method", "message"),
    [("give_unpicklable", "lambda"), ("missing", "has no attribute 'missing'"), ("_private", "not a public"),
     ("give_unreadable", "unreadable result: invalid literal")],
)  # fmt: skip
def test_bad_calls_fail_alone(method: str, message: str):
    async def main() -> None:
        async with running() as worker:
            with pytest.raises(RemoteError, match=message):
                await worker.call(method)
            assert await worker.call("echo", 1) == 1

    run(main)


def test_arguments_that_do_not_pickle_raise_here():
    async def main() -> None:
        async with running() as worker:
            with pytest.raises((AttributeError, TypeError)):
                await worker.call("echo", lambda: None)
            assert await worker.call("echo", 1) == 1

    run(main)


def test_a_late_call_times_out_and_its_result_is_dropped():
    async def main() -> None:
        async with running() as worker:
            with pytest.raises(TimeoutError, match=r"w\.hang gave no result in 0\.1 s"):
                await worker.call("hang", timeout_s=0.1)
            assert worker.alive
            waiting = asyncio.create_task(worker.call("echo", 1))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    run(main)


def test_events_arrive_in_order_under_back_pressure():
    async def main() -> None:
        async with running(events_capacity=4, heartbeat_interval_s=0.05, heartbeat_timeout_s=1.0) as worker:
            emitting = asyncio.create_task(worker.call("emit", 400, 200))
            before = time.thread_time()
            await asyncio.sleep(1.5)  # full, and longer than the heartbeat's patience: the child blocks in emit
            assert time.thread_time() - before < 0.5  # waiting is not polling
            assert not emitting.done()
            assert worker.alive
            assert worker.events.statistics().used == worker.events.statistics().peak == 4
            for version in range(400):
                deltas = await worker.events.get()
                assert (len(deltas), deltas[0].version) == (200, version)
            await emitting
            assert worker.events.statistics().peak == 4

    run(main)


def test_ticks_interleave_with_calls_and_sleep_when_idle():
    async def main() -> None:
        async with running(spec("Engine")) as worker:
            await asyncio.gather(*(worker.call("submit", request, 20 + request) for request in range(10)))
            await worker.call("submit", 99, 1_000_000)
            assert [await worker.events.get() for _ in range(10)] == list(range(10))
            counts = [await worker.call("count") for _ in range(20)]  # calls are answered between ticks
            assert counts == sorted(counts)
            assert counts[-1] > counts[0]
            await worker.call("submit", 99, 1)
            assert await worker.events.get() == 99
            idle = await worker.call("count")
            await asyncio.sleep(0.1)
            assert await worker.call("count") == idle

    run(main)


@BOTH_STARTS
def test_workers_ignore_an_interrupt(preload: tuple[str, ...]):
    async def main() -> None:
        async with running(spec(preload=preload)) as worker:
            os.kill(worker.pid, signal.SIGINT)
            assert await worker.call("echo", 1) == 1

    run(main)


def test_call_all_fails_at_the_first_error():
    async def main() -> None:
        launcher = LocalLauncher(RealClock())
        workers = await asyncio.gather(*(launcher.start(spec(name=f"r{rank}")) for rank in range(3)))
        try:
            assert await call_all(workers, "echo", 5) == [5, 5, 5]
            workers[2].kill()
            with pytest.raises(WorkerDied, match="worker r2 died"):
                await call_all(workers, "hang")
        finally:
            await asyncio.gather(*(worker.stop(grace_s=0.2) for worker in workers))
        assert all(reaped(worker.pid) for worker in workers)

    run(main)


def test_the_parent_stays_cheap():
    """A hundred messages of sixty-four token deltas cost the parent well under a tenth of a second of CPU."""

    async def main() -> None:
        async with running() as worker:
            before = time.process_time()
            emitting = asyncio.create_task(worker.call("emit", 100, 64))
            for _ in range(100):
                await worker.events.get()
            await emitting
            assert time.process_time() - before < 0.1

    run(main)
