"""What a link to another machine costs: calls, arrays and weights over loopback TCP, as ratios to plainer ways.

    python benchmarks/links.py [--ray-python PATH] [--rounds 7] [--quick]

A real agent (`headway node`) on this machine, joined over loopback TCP, with the run's key. In every round everything
is measured once, one after the other, so that a ratio compares neighbours in time; a ratio is the median over the
rounds, with the smallest and largest beside it. The first rounds, in which memory is taken, are left out.

    call            echo of an integer, median of 300: a worker on the node, a worker of this machine over a
                    socket pair, and Ray's actor (in an interpreter that has Ray: `pip install ray`). For calls the
                    caller runs on the first core and what it calls on the last, as on two machines: else the kernel
                    puts both ends on one core or on two as it likes, and a socket pair takes 0.04 or 0.13 ms by that
    transfer        an array of 100 MB to the worker on the node; a bare `sendall` to a `recv_into` loop
    small tensors   1,000 arrays of 16 KiB in one call; one array of as many bytes
    mirror          a version of 200 MB from the trainer's mirror to one node's; a bare loop with as many bytes
    uplink          bytes that the trainer's mirror sent for one version that four nodes want, over its size
    TLS             calls and arrays once more with `cluster.encryption = "tls"`

Last line, one JSON object: `tcp_over_socketpair`, `tcp_over_ray` (null without Ray), `transfer_over_plain` (rate over
rate), `small_tensors` (time over time), `mirror_over_plain` (rate over rate), `uplink_copies`, `tls_call`,
`tls_transfer` (rate over rate without).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine import machine

from headway.runtime.clock import RealClock
from headway.runtime.nodes.encryption import make_certificate
from headway.runtime.nodes.handshake import KEY_VARIABLE, make_key
from headway.runtime.nodes.nodes import Nodes
from headway.runtime.workers import LocalLauncher, WorkerHandle, WorkerSpec
from headway.weights.mirrors import Mirrors
from headway.weights.shared_memory import Publisher

KEY = make_key()
ECHO = "parts.link_workers:Echo"
NODES = ("b", "c", "d", "e")
WARM_UP = 3  # rounds
Times = dict[str, list[float]]  # s, by what was measured


class Plain:
    """A bare socket to a process that receives in a loop."""

    def __init__(self, size_bytes: int) -> None:
        self._data = np.ones(size_bytes, dtype=np.uint8)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            command = [sys.executable, "-m", "parts.link_workers", str(listener.getsockname()[1]), str(size_bytes)]
            where = str(Path(__file__).parent)
            path = os.pathsep.join((str(Path(__file__).parents[1]), where))
            self._process = subprocess.Popen(command, cwd=where, env=os.environ | {"PYTHONPATH": path})
            self._sock, _ = listener.accept()

    def send(self) -> None:
        self._sock.sendall(self._data.data)
        assert self._sock.recv(1) == b"x"

    def close(self) -> None:
        self._sock.close()
        self._process.wait()


class Ray:
    """An actor's calls, measured in a process that has Ray."""

    def __init__(self, python: str) -> None:
        command = [python, str(Path(__file__).parent / "parts" / "link_ray.py")]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._read()

    def call_s(self, calls: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{calls}\n")
        self._process.stdin.flush()
        return float(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("Ray's process has ended")
        return line.strip()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def ray_calls(python: str) -> Iterator[Ray | None]:
    """Ray in the interpreter ``python``; None where that hasn't got it."""
    if subprocess.run([python, "-c", "import ray"], check=False, stderr=subprocess.DEVNULL).returncode:
        print(f"Ray: {python} has none")
        yield None
        return
    ray = Ray(python)
    try:
        yield ray
    finally:
        ray.close()


@asynccontextmanager
async def joined(names: tuple[str, ...], **settings: Any) -> AsyncIterator[Nodes]:
    """Nodes with an agent for each of ``names`` on this machine."""
    clock = RealClock()
    agents: list[subprocess.Popen[bytes]] = []
    environment = os.environ | {KEY_VARIABLE: KEY, "PYTHONPATH": str(Path(__file__).parents[1])}
    try:
        async with Nodes("127.0.0.1:0", KEY, 1, clock, LocalLauncher(clock), **settings) as nodes:
            for name in names:
                command = [sys.executable, "-m", "headway.cli.main", "node", "--join", nodes.address, "--name", name]
                agents.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))  # noqa: ASYNC220
            await asyncio.gather(*(nodes.wait_for(name, 60.0) for name in names))
            yield nodes
    finally:
        for agent in agents:
            agent.wait(30.0)


@asynccontextmanager
async def a_core_each(*workers: WorkerHandle) -> AsyncIterator[None]:
    """This thread runs on the first core, and the workers on the last one, within the block."""
    cores = sorted(os.sched_getaffinity(0))
    await asyncio.gather(*(worker.call("pin", cores[-1:]) for worker in workers))
    os.sched_setaffinity(0, cores[:1])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        await asyncio.gather(*(worker.call("pin", cores) for worker in workers))


async def call_s(worker: WorkerHandle, calls: int) -> float:
    """The median time of a call."""
    times_s: list[float] = []
    for _ in range(calls):
        started = time.perf_counter()
        await worker.call("echo", 1)
        times_s.append(time.perf_counter() - started)
    return statistics.median(times_s)


async def timed_s(work: Callable[[], Awaitable[object]]) -> float:
    started = time.perf_counter()
    await work()
    return time.perf_counter() - started


def plain_s(plain: Plain) -> float:
    started = time.perf_counter()
    plain.send()
    return time.perf_counter() - started


async def measure_links(rounds: int, calls: int, megabytes: int, ray: Ray | None) -> Times:
    """Calls and arrays of all kinds of links."""
    times: Times = defaultdict(list)
    big = np.ones(megabytes * 10**6, dtype=np.uint8)
    small = [np.ones(16384, dtype=np.uint8) for _ in range(1000)]
    whole = np.ones(16384 * 1000, dtype=np.uint8)
    plain = Plain(len(big))
    async with joined(("b",)) as nodes, joined(("b",), certificate=make_certificate()) as secret:
        near = await nodes.start(WorkerSpec(name="near", factory=ECHO))
        far = await nodes.start(WorkerSpec(name="far", factory=ECHO, device="b/cpu:all"))
        tls = await secret.start(WorkerSpec(name="tls", factory=ECHO, device="b/cpu:all"))
        for _ in range(rounds + WARM_UP):
            async with a_core_each(near, far, tls):
                times["socketpair"].append(await call_s(near, calls))
                times["tcp"].append(await call_s(far, calls))
                times["tls call"].append(await call_s(tls, calls))
            if ray is not None:
                times["ray"].append(ray.call_s(calls))
            times["transfer"].append(await timed_s(lambda: far.call("count", big)))
            times["plain"].append(plain_s(plain))
            times["tls transfer"].append(await timed_s(lambda: tls.call("count", big)))
            times["small"].append(await timed_s(lambda: far.call("count", small)))
            times["whole"].append(await timed_s(lambda: far.call("count", whole)))
        for worker in (near, far, tls):
            await worker.stop()
    plain.close()
    return times


async def measure_mirrors(rounds: int, megabytes: int, folder: Path) -> tuple[Times, float]:
    """A version's way to one node, beside a bare loop; and how often it leaves the trainer's machine for four."""
    times: Times = defaultdict(list)
    weights = {"w": torch.ones(megabytes * 10**6 // 4)}
    plain = Plain(megabytes * 10**6)
    run_id = f"links-{os.getpid()}"
    settings: dict[str, Any] = {"run_id": run_id, "ports": list(range(29800, 29900)), "key": KEY, "epoch": 1}
    async with joined(NODES) as nodes:
        mirrors = Mirrors(nodes, RealClock(), "", nodes.host_of, settings | {"orphan_s": 60.0})
        try:
            with Publisher(run_id, directory=folder) as publisher:
                for version in range(rounds + WARM_UP):
                    published = publisher.publish(version, weights)
                    times["mirror"].append(await timed_s(lambda p=published: mirrors.on_node(p, "b")))
                    times["plain 200"].append(plain_s(plain))
                origin, _ = await mirrors._mirror("")
                before = (await origin.call("statistics"))["served_bytes"]
                published = publisher.publish(rounds + WARM_UP, weights)
                await asyncio.gather(*(mirrors.on_node(published, node) for node in NODES))
                sent = (await origin.call("statistics"))["served_bytes"] - before
        finally:
            await mirrors.stop()
    plain.close()
    return times, sent / published.size_bytes


def ratio(above: list[float], below: list[float]) -> list[float]:
    """Median, smallest and largest ratio of a round."""
    each = [one / other for one, other in zip(above[WARM_UP:], below[WARM_UP:], strict=True)]
    return [round(value, 3) for value in (statistics.median(each), min(each), max(each))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ray-python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a few seconds: two rounds, small arrays")
    arguments = parser.parse_args()
    rounds, calls, big, version = (2, 50, 10, 20) if arguments.quick else (arguments.rounds, 300, 100, 200)
    print(machine())
    print(f"load average {os.getloadavg()[0]:.1f} before the start")
    with ExitStack() as stack:
        ray = stack.enter_context(ray_calls(arguments.ray_python))
        times = asyncio.run(measure_links(rounds, calls, big, ray))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        mirrored, uplink = asyncio.run(measure_mirrors(rounds, version, Path(folder)))
    times |= mirrored
    for name, taken in times.items():
        low, middle, high = (1e3 * f(taken[WARM_UP:]) for f in (min, statistics.median, max))
        print(f"  {name:14} {middle:9.3f} ms [{low:.3f}, {high:.3f}]")
    ratios = {
        "tcp_over_socketpair": ratio(times["tcp"], times["socketpair"]),
        "tcp_over_ray": ratio(times["tcp"], times["ray"]) if times["ray"] else None,
        "transfer_over_plain": ratio(times["plain"], times["transfer"]),
        "small_tensors": ratio(times["small"], times["whole"]),
        "mirror_over_plain": ratio(times["plain 200"], times["mirror"]),
        "tls_call": ratio(times["tls call"], times["tcp"]),
        "tls_transfer": ratio(times["transfer"], times["tls transfer"]),
    }
    for name, values in ratios.items():
        print(f"  {name:20} {values and '{} [{}, {}]'.format(*values)}")
    last = {name: values and values[0] for name, values in ratios.items()}
    print(json.dumps(last | {"uplink_copies": round(uplink, 3)}))


if __name__ == "__main__":
    main()
