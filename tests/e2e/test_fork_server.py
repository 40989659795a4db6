"""Workers forked from a server: whatever becomes of it, a worker is started, once, and is this process's own."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from worker_processes import CLASSES, exists, own_servers, reaped, run, running, spec, until

from headway.runtime import fork_server
from headway.runtime.fork_server import SERVERS, ForkServer
from headway.runtime.workers import WorkerSpec

pytestmark = [pytest.mark.real, pytest.mark.timeout(60), pytest.mark.usefixtures("servers")]
FORKED, STARTED = "headway.runtime.fork_server", "headway.runtime.child"


@pytest.fixture
def servers() -> Iterator[None]:
    with own_servers():
        yield


def forked(name: str = "w", **more: object) -> WorkerSpec:
    return spec(name=name, preload=("numpy",), **more)


def pid_of(server: ForkServer) -> int:
    return server._process.pid  # pyright: ignore[reportPrivateUsage]


Recv = Callable[[int], bytes]


def received_by(
    server: ForkServer, how: Callable[[socket.socket, Recv, int], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have ``how`` receive what the server answers."""

    class Receiving(socket.socket):
        def recv(self, size: int, flags: int = 0) -> bytes:
            return how(self, super().recv, size)

    real = server._socket  # pyright: ignore[reportPrivateUsage]
    ours = Receiving(fileno=os.dup(real.fileno()))
    ours.settimeout(real.gettimeout())
    monkeypatch.setattr(server, "_socket", ours)


def test_workers_outlive_their_server_and_the_next_have_a_new_one():
    async def main() -> None:
        async with running(forked("a")) as first:
            (old,) = SERVERS.values()
            os.kill(pid_of(old), signal.SIGKILL)
            await until(lambda: not old.alive)
            async with running(forked("b")) as second:
                (new,) = SERVERS.values()
                assert new is not old
                for worker in (first, second):
                    seen = await worker.call("seen")
                    assert (seen["started_as"], seen["parent"]) == (FORKED, os.getpid())
                    assert seen["threads"] == 2  # the one that computes, the one that reads: none of the server's
        assert all(reaped(pid) for pid in (first.pid, second.pid, pid_of(old)))

    run(main)


def test_each_draws_numbers_of_its_own():
    async def main() -> None:
        of_both = spec(name="a", preload=("numpy.random", "torch"))
        async with running(of_both) as first, running(replace(of_both, name="b")) as second:
            drawn = [await worker.call("draw") for worker in (first, second)]
        assert all(one != other for one, other in zip(*drawn, strict=True))

    run(main)


def test_an_environment_that_is_too_large_for_a_request_costs_a_start_of_its_own(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        async with running(forked("a")):
            (server,) = SERVERS.values()
        for number in range(20):
            monkeypatch.setenv(f"LARGE_{number}", "x" * 50_000)
        async with running(forked("b")) as worker:
            assert (await worker.call("seen"))["started_as"] == STARTED
        assert server.alive

    run(main)


def test_servers_death_amid_a_start_costs_a_start_of_its_own(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        async with running(forked("a")):
            pass
        (server,) = SERVERS.values()
        monkeypatch.setattr(ForkServer, "alive", True)  # it dies after the look at it
        os.kill(pid_of(server), signal.SIGKILL)
        async with running(forked("b")) as worker:
            assert (await worker.call("seen"))["started_as"] == STARTED

    run(main)


def test_server_that_does_not_answer_is_killed_and_costs_a_start_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fork_server, "_FORK_S", 0.3)

    async def main() -> None:
        async with running(forked("a")):
            (server,) = SERVERS.values()
        os.kill(pid_of(server), signal.SIGSTOP)
        for name, started_as in (("b", STARTED), ("c", FORKED)):
            async with running(forked(name)) as worker:
                assert (await worker.call("seen"))["started_as"] == started_as
            assert reaped(pid_of(server))

    run(main)


def test_a_child_that_its_killed_server_had_forked_is_the_worker(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fork_server, "_FORK_S", 0.3)

    async def main() -> None:
        async with running(forked("a")):
            (server,) = SERVERS.values()

        def late(sock: socket.socket, recv: Recv, size: int) -> bytes:
            select.select([sock], [], [])
            monkeypatch.undo()
            raise TimeoutError

        received_by(server, late, monkeypatch)
        async with running(forked("b")) as worker:
            assert (await worker.call("seen"))["started_as"] == FORKED
            assert not server.alive

    run(main)


def test_event_loops_of_two_threads_start_each_its_own_workers(monkeypatch: pytest.MonkeyPatch):
    asked, answered = list[int](), threading.Event()

    def crosswise(sock: socket.socket, recv: Recv, size: int) -> bytes:
        """Whoever asks first receives last, if it may."""
        asked.append(threading.get_ident())
        if asked[0] == threading.get_ident():
            answered.wait(1.0)
        reply = recv(size)
        answered.set()
        return reply

    async def first() -> None:
        async with running(forked("a")):
            (server,) = SERVERS.values()
        received_by(server, crosswise, monkeypatch)

    async def main() -> None:
        async with running(forked("b")) as worker:
            assert (await worker.call("seen"))["group"] == worker.pid

    run(first)
    with ThreadPoolExecutor(2) as threads:
        for ran in [threads.submit(run, main) for _ in range(2)]:
            ran.result()
    assert len(set(asked)) == 2


def test_modules_that_cannot_be_imported_are_the_workers_own_affair():
    async def main() -> None:
        async with running(spec(preload=("json", "nowhere"))) as worker:
            assert (await worker.call("seen"))["started_as"] == STARTED

    run(main)


def test_variables_are_those_of_the_start(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        async with running(forked("a")):
            pass
        monkeypatch.setenv("EXTRA", "set since")
        async with running(forked("b")) as worker:
            seen = await worker.call("seen")
            assert (seen["started_as"], seen["environment"]["EXTRA"]) == (FORKED, "set since")
        # Libraries may read a worker's own variables as they are imported: others need another server, of two at most.
        for value, started_as in (("2", FORKED), ("3", STARTED), ("2", FORKED)):
            async with running(forked("c", environment={"EXTRA": value})) as worker:
                seen = await worker.call("seen")
                assert (seen["started_as"], seen["environment"]["EXTRA"]) == (started_as, value)

    run(main)


def test_a_worker_starts_in_the_folder_of_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        async with running(forked("a")):
            pass
        for number in range(3):  # of which only the first has a server of its own
            (tmp_path / str(number)).mkdir()
            monkeypatch.chdir(tmp_path / str(number))
            async with running(forked("b")) as worker:
                assert (await worker.call("seen"))["folder"] == str(tmp_path / str(number))

    run(main)


@pytest.mark.parametrize("variable", ["OMP_PROC_BIND", "GOMP_CPU_AFFINITY"])
def test_where_threads_are_bound_to_cores_nothing_is_forked(variable: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(variable, "0")

    async def main() -> None:
        async with running(forked()) as worker:
            assert (await worker.call("seen"))["started_as"] == STARTED

    run(main)


def test_a_worker_on_another_device_is_an_interpreter_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    async def main() -> None:
        for device in ("cuda:0", "http://127.0.0.1:1"):
            async with running(forked(device=device)) as worker:
                assert (await worker.call("seen"))["started_as"] == STARTED
        assert not SERVERS

    run(main)


def test_nobody_else_becomes_a_child_of_this_process():
    async def main() -> None:
        async with running(forked()):
            pass

    run(main)
    orphan = subprocess.run(
        ["sh", "-c", "sleep 30 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True, check=True
    ).stdout
    assert int(Path(f"/proc/{int(orphan)}/stat").read_text().rpartition(")")[2].split()[1]) != os.getpid()
    os.kill(int(orphan), signal.SIGKILL)


PARENT = """
import asyncio, sys
sys.path[:0] = {path!r}
from headway.runtime.clock import RealClock
from headway.runtime.fork_server import SERVERS
from headway.runtime.workers import LocalLauncher, WorkerSpec

async def main():
    worker = await LocalLauncher(RealClock()).start(WorkerSpec(name="w", factory="{classes}:Echo", preload=("numpy",)))
    print(worker.pid, *(server._process.pid for server in SERVERS.values()), flush=True)
    if {waits}:
        await asyncio.sleep(1000)
    await worker.stop()

asyncio.run(main())
"""


@pytest.mark.parametrize("killed", [True, False])
def test_a_server_ends_with_its_parent(killed: bool):
    program = PARENT.format(path=[str(Path(__file__).parents[1] / "support")], classes=CLASSES, waits=killed)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        if killed:
            assert all(exists(pid) for pid in pids)
            parent.kill()
        parent.wait()
    asyncio.run(until(lambda: not any(exists(pid) for pid in pids)))
