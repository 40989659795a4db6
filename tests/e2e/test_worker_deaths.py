"""Every way a worker can die, be killed or fail to start: an event with a cause, never a hang."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from worker_processes import BOTH_STARTS, CLASSES, children, exists, own_servers, reaped, run, running, spec, until

from headway.records.errors import ConfigurationError, RemoteError, WorkerDied
from headway.runtime.bounded_queue import QueueClosed
from headway.runtime.clock import RealClock
from headway.runtime.workers import LocalLauncher, WorkerSpec

pytestmark = [pytest.mark.real, pytest.mark.timeout(60), pytest.mark.usefixtures("servers")]


@pytest.fixture(scope="module")
def servers() -> Iterator[None]:
    with own_servers():
        yield


@BOTH_STARTS
def test_kill_in_mid_call_fails_all_calls_and_is_an_event(tmp_path: Path, preload: tuple[str, ...]):
    async def main() -> None:
        async with running(spec(preload=preload)) as worker:
            calls = [asyncio.create_task(worker.call("hang", str(tmp_path / "in"))) for _ in range(3)]
            await until((tmp_path / "in").exists)
            os.kill(worker.pid, signal.SIGKILL)
            death = await worker.died
            assert (death.worker, death.cause) == ("w", "killed by SIGKILL (9)")
            assert (death.found_by, death.silent_s) == ("exit", 0.0)
            for result in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(result, WorkerDied)
                assert result.cause == death.cause
            assert not worker.alive
            assert reaped(worker.pid)
            with pytest.raises(WorkerDied, match="SIGKILL"):
                await worker.call("echo", 1)
            with pytest.raises(QueueClosed):
                await worker.events.get()
            assert await worker.died is death

    run(main)


def test_death_can_be_awaited_by_many_and_by_asyncio_wait():
    async def main() -> None:
        async with running() as worker:
            given_up = asyncio.create_task(asyncio.wait_for(worker.died, 0.01))
            with pytest.raises(TimeoutError):
                await given_up
            assert not worker.died.done()
            waiting = asyncio.create_task(asyncio.wait([worker.died]))  # type: ignore[type-var]
            worker.kill("it is stuck")
            done, _ = await waiting
            assert done == {worker.died}
            assert worker.died.result().cause == "it is stuck (killed by SIGKILL (9))"
            assert worker.died.result().found_by == "call"

    run(main)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["hang", "hold_interpreter"])
@BOTH_STARTS
def test_a_stopped_or_wedged_worker_is_killed(method: str, tmp_path: Path, preload: tuple[str, ...]):
    async def main() -> None:
        async with running(spec(preload=preload), heartbeat_interval_s=0.05, heartbeat_timeout_s=1.0) as worker:
            await asyncio.sleep(1.5)
            assert worker.alive  # idle, and answering
            if method == "hang":
                call = asyncio.create_task(worker.call("hang", str(tmp_path / "in")))
                await until((tmp_path / "in").exists)
                await asyncio.sleep(1.5)
                assert worker.alive  # busy is not wedged
                os.kill(worker.pid, signal.SIGSTOP)
            else:
                call = asyncio.create_task(worker.call(method))
            started = time.monotonic()
            death = await worker.died
            assert 0.5 < time.monotonic() - started < 5
            assert death.cause.startswith("no heartbeat for 1.0")
            assert death.found_by == "health"
            assert death.silent_s == pytest.approx(1.0, abs=0.2)
            assert "SIGKILL" in death.cause
            assert death.found_by == "health"
            with pytest.raises(WorkerDied, match="no heartbeat"):
                await call
            assert reaped(worker.pid)

    run(main)


def test_a_stall_is_an_event_at_half_the_limit_and_so_is_its_end():
    events: list[tuple[str, dict[str, object]]] = []

    def note(name: str, detail: str, **fields: object) -> None:
        events.append((name, fields))

    async def main() -> None:
        async with running(heartbeat_interval_s=0.05, heartbeat_timeout_s=4.0, on_event=note) as worker:
            os.kill(worker.pid, signal.SIGSTOP)
            await until(lambda: [name for name, _ in events] == ["worker_stalled"])
            os.kill(worker.pid, signal.SIGCONT)
            await until(lambda: [name for name, _ in events] == ["worker_stalled", "worker_answers"])
            assert worker.alive
            worker.kill("it is stuck")
            assert (await worker.died).found_by == "call"

    run(main)
    assert all(fields["worker"] == "w" and fields["found_by"] == "health" for _, fields in events)
    assert all(2.0 <= float(str(fields["lost_s"])) < 4.0 for _, fields in events)


def test_a_stall_of_the_parent_kills_nobody():
    async def main() -> None:
        async with running(heartbeat_interval_s=0.05, heartbeat_timeout_s=1.0) as worker:
            os.kill(worker.pid, signal.SIGSTOP)
            await asyncio.sleep(0.2)  # a ping is on its way; now both stand still, as in a suspended machine ...
            stalled_until = time.monotonic() + 1.5
            while time.monotonic() < stalled_until:
                pass
            await asyncio.sleep(0)
            os.kill(worker.pid, signal.SIGCONT)  # ... and both go on
            assert await worker.call("echo", 1) == 1
            await asyncio.sleep(0.3)
            assert worker.alive

    run(main)


@BOTH_STARTS
def test_exit_codes_signals_and_the_last_output_are_the_cause(tmp_path: Path, preload: tuple[str, ...]):
    async def main() -> None:
        log = tmp_path / "logs" / "w.log"
        async with running(spec(log_path=log, preload=preload)) as worker:
            await worker.call("say", "first life")
            with pytest.raises(WorkerDied):
                await worker.call("exit", 7)
            cause = (await worker.died).cause
            assert cause.startswith("exited with code 7\nlast output:\n")
            assert cause.endswith("about to leave")
        async with running(spec(log_path=log, preload=preload)) as worker:
            with pytest.raises(WorkerDied):
                await worker.call("raise_signal", signal.SIGSEGV)
            cause = (await worker.died).cause
            assert cause.startswith("killed by SIGSEGV (11)")
            assert "in raise_signal" in cause  # the stack of a crash in native code
            assert "first life" not in cause  # only this life's output
        text = log.read_text()
        assert text.index("logged first life") < text.index("about to leave") < text.index("Segmentation fault")

    run(main)


def test_a_system_exit_ends_the_worker_with_its_traceback():
    async def main() -> None:
        async with running() as worker:
            with pytest.raises(WorkerDied, match="exited with code 1\nTraceback"):
                await worker.call("leave_system_exit")
            assert "leave_system_exit" in (await worker.died).cause

    run(main)


@pytest.mark.slow
@BOTH_STARTS
def test_building_errors_are_raised_by_start(preload: tuple[str, ...]):
    before: set[int] = set()

    async def main() -> None:
        async with running(spec(preload=preload)):
            before.update(children())  # with a server that forks
        launcher = LocalLauncher(RealClock(), start_timeout_s=20)
        with pytest.raises(RemoteError, match="the model folder is empty") as caught:
            await launcher.start(spec("Broken", preload=preload))
        assert "in __init__" in caught.value.traceback
        with pytest.raises(RemoteError, match="has no Nothing") as caught:
            await launcher.start(spec("Nothing"))
        assert isinstance(caught.value.__cause__, ConfigurationError)
        with pytest.raises(RemoteError, match="No module named 'nowhere'"):
            await launcher.start(WorkerSpec(name="w", factory="nowhere:Class", preload=preload))
        with pytest.raises(RemoteError, match="unexpected keyword argument"):
            await launcher.start(spec(arguments={"wrong": 1}))
        with pytest.raises(WorkerDied, match=r"killed by SIGKILL \(9\)\nlast output:\nhalf built"):
            await launcher.start(spec("DiesWhileBuilt", preload=preload))
        with pytest.raises(ConfigurationError, match="cpu:4096: this machine has"):
            await launcher.start(spec(device="cpu:4096"))
        with pytest.raises(WorkerDied, match=r"not built within 0\.3 s \(killed by SIGKILL"):
            await LocalLauncher(RealClock(), start_timeout_s=0.3).start(spec("SlowToBuild", preload=preload))
        with pytest.raises(TypeError):
            await launcher.start(spec(arguments={"greeting": (part for part in "x")}))

    run(main)
    assert not any(exists(pid) for pid in children() - before)


def test_a_process_that_cannot_be_had_is_a_typed_error_and_leaves_nothing_open(tmp_path, monkeypatch):
    (tmp_path / "file").touch()

    def refused(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    async def main() -> None:
        launcher = LocalLauncher(RealClock())
        before = os.listdir("/proc/self/fd")
        with pytest.raises(WorkerDied, match=r"could not be started: .*file"):
            await launcher.start(spec(log_path=tmp_path / "file" / "w.log"))
        monkeypatch.setattr(subprocess, "Popen", refused)
        with pytest.raises(WorkerDied, match=r"could not be started: .*Resource temporarily unavailable"):
            await launcher.start(spec(log_path=tmp_path / "w.log"))
        assert os.listdir("/proc/self/fd") == before

    run(main)


@BOTH_STARTS
def test_a_cancelled_start_leaves_no_process(preload: tuple[str, ...]):
    async def main() -> None:
        async with running(spec(preload=preload)):
            before = children()  # with a server that forks
        starting = asyncio.create_task(LocalLauncher(RealClock()).start(spec("SlowToBuild", preload=preload)))
        await asyncio.sleep(0.3)
        assert len(children() - before) == 1
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert children() <= before

    run(main)


def test_what_was_sent_before_death_is_delivered_even_beyond_the_capacity():
    async def main() -> None:
        async with running(events_capacity=1) as worker:
            emitting = asyncio.create_task(worker.call("emit", 3, 1))  # one in the channel, the next stops the reading
            await until(lambda: worker.events.statistics().putters == 1)
            with pytest.raises(WorkerDied):
                await worker.call("emit_then_die", 50, 1000)  # stays in the socket
            await emitting
            events = [event async for event in worker.events]
            assert len(events) == 53
            assert [index for index, _ in events[3:]] == list(range(50))

    run(main)


def test_an_unreadable_event_ends_the_worker():
    async def main() -> None:
        async with running() as worker:
            with contextlib.suppress(WorkerDied):  # the kill may overtake the call's result
                await worker.call("emit_unreadable")
            assert "cannot be read: ValueError" in (await worker.died).cause

    run(main)


def test_a_failing_tick_ends_the_worker_with_its_traceback():
    async def main() -> None:
        async with running(spec("Engine", arguments={"fail_at": 3})) as worker:
            await worker.call("submit", 1, 100)
            cause = (await worker.died).cause
            assert cause.startswith("exited with code 1\nTraceback")
            assert cause.endswith("RuntimeError: decode failed")

    run(main)


@BOTH_STARTS
def test_stop_closes_in_order_and_reaps(tmp_path: Path, preload: tuple[str, ...]):
    async def main() -> None:
        async with running(spec("Closing", preload=preload, arguments={"path": str(tmp_path / "closed")})) as worker:
            await worker.stop(grace_s=10)
            assert (await worker.died).cause == "stopped"
            assert (tmp_path / "closed").read_text() == "closed"
            assert reaped(worker.pid)
            await worker.stop()  # again is a no-op
            with pytest.raises(WorkerDied, match="stopped"):
                await worker.call("echo", 1)

    run(main)


@pytest.mark.slow
@pytest.mark.parametrize("busy", ["hang", "stopped", "emitting"])
def test_stop_kills_what_does_not_stop(busy: str, tmp_path: Path):
    async def main() -> None:
        async with running(events_capacity=1) as worker:
            if busy == "hang":
                call = asyncio.create_task(worker.call("hang", str(tmp_path / "in")))
                await until((tmp_path / "in").exists)
            elif busy == "emitting":  # blocked in emit, nobody reads: stopping lets it go on
                call = asyncio.create_task(worker.call("emit", 3000, 100))
                await asyncio.sleep(0.3)
            else:
                call = asyncio.create_task(worker.call("echo", 1))
                await call
                os.kill(worker.pid, signal.SIGSTOP)
            await worker.stop(grace_s=0.3 if busy != "emitting" else 20)
            cause = (await worker.died).cause
            assert cause == "stopped" if busy == "emitting" else cause.startswith("did not stop within 0.3 s")
            assert reaped(worker.pid)
            if busy == "hang":
                with pytest.raises(WorkerDied):
                    await call
            await asyncio.gather(call, return_exceptions=True)

    run(main)


@BOTH_STARTS
def test_killing_reaches_what_the_worker_started(preload: tuple[str, ...]):
    async def main() -> None:
        async with running(spec(preload=preload)) as worker:
            sleeper = await worker.call("spawn_sleeper")
            assert exists(sleeper)
            os.kill(worker.pid, signal.SIGKILL)
            await worker.died
            await until(lambda: not exists(sleeper))

    run(main)


PARENT = """
import asyncio, sys
sys.path[:0] = {path!r}
from headway.runtime.clock import RealClock
from headway.runtime.workers import LocalLauncher, WorkerSpec

async def main():
    launcher = LocalLauncher(RealClock())
    specs = [WorkerSpec(name=str(i), factory="{classes}:Echo", preload={preload!r}) for i in range(2)]
    workers = [await launcher.start(spec) for spec in specs]
    asyncio.create_task(workers[0].call("hang"))
    asyncio.create_task(workers[1].call("hold_interpreter"))
    await asyncio.sleep(0.2)
    print(*(worker.pid for worker in workers), flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


@BOTH_STARTS
def test_workers_die_with_their_parent(preload: tuple[str, ...]):
    program = PARENT.format(path=[str(Path(__file__).parents[1] / "support")], classes=CLASSES, preload=preload)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(exists(pid) for pid in pids)
        parent.kill()
        parent.wait()
    asyncio.run(until(lambda: not any(exists(pid) for pid in pids)))


@BOTH_STARTS
def test_without_process_descriptors_death_is_still_noticed(monkeypatch: pytest.MonkeyPatch, preload: tuple[str, ...]):
    def refuse(pid: int, flags: int = 0) -> int:
        raise PermissionError("no pidfd here")

    monkeypatch.setattr(os, "pidfd_open", refuse)

    async def main() -> None:
        async with running(spec(preload=preload)) as worker:
            with pytest.raises(WorkerDied, match="exited with code 7"):
                await worker.call("exit", 7)
            assert reaped(worker.pid)

    run(main)
