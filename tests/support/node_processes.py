"""Nodes for tests: real agents on this machine, in network namespaces of their own where a test cuts the network."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import tiny_run
import warm_programs

from headway.records.trace import Mark, Span
from headway.runtime.clock import RealClock
from headway.runtime.nodes.handshake import KEY_VARIABLE, make_key
from headway.runtime.nodes.nodes import Nodes
from headway.runtime.workers import LocalLauncher
from headway.telemetry.trace_file import read_trace

KEY = make_key()


def start_agent(
    address: str,
    name: str,
    *,
    log: Path,
    key: str = KEY,
    namespace: str = "",
    arguments: tuple[str, ...] = (),
    python: str = "",
    mounts: str = "",
    warm: bool = True,
) -> subprocess.Popen[Any]:
    """Start `headway node` for a run at ``address``; its output goes to ``log``. ``python``: statements that its
    process runs first. ``mounts``: a shell's commands in a mount namespace of its own, before it starts there.
    ``warm``: as of `tiny_run.headway`, where it has neither."""
    words = ["node", "--join", address, "--name", name, *arguments]
    environment = os.environ | {KEY_VARIABLE: key}
    with open(log, "ab") as file:
        outputs: dict[str, Any] = {"stdout": file, "stderr": file, "stdin": subprocess.DEVNULL}
        if warm and not python and not mounts:
            headway = warm_programs.HEADWAY
            return warm_programs.start(headway, *words, environment=environment, namespace=namespace, **outputs)
        program = f"{python}\nimport sys\nfrom headway.cli.main import main\nsys.exit(main())"
        command = [sys.executable, "-c", program, *words]
        if mounts:
            command = ["unshare", "--mount", "sh", "-ec", f'{mounts}\nexec "$@"', "sh", *command]
        if namespace:
            command = ["ip", "netns", "exec", namespace, *command]
        return subprocess.Popen(command, env=environment, **outputs)


class Events:
    """The events that a test's nodes and launcher reported."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def __call__(self, name: str, detail: str, /, **fields: Any) -> None:
        self.seen.append((name, detail))

    def of(self, name: str) -> list[str]:
        return [detail for event, detail in self.seen if event == name]


@asynccontextmanager
async def joined_nodes(
    folder: Path,
    *names: str,
    orphan_s: float = 10.0,
    address: str = "127.0.0.1:0",
    namespace: str = "",
    certificate: str = "",
) -> AsyncIterator[tuple[Nodes, Events, dict[str, subprocess.Popen[Any]]]]:
    """Nodes with one joined agent for each of ``names``."""
    clock, events = RealClock(), Events()
    local = LocalLauncher(clock, heartbeat_interval_s=0.5, heartbeat_timeout_s=5.0, on_event=events)
    agents: dict[str, subprocess.Popen[Any]] = {}
    try:
        async with Nodes(
            address, KEY, 1, clock, local, orphan_s=orphan_s, certificate=certificate, on_event=events
        ) as nodes:
            for name in names:
                agents[name] = start_agent(nodes.address, name, log=folder / f"{name}.log", namespace=namespace)
            await asyncio.gather(*(nodes.wait_for(name, 30.0) for name in names))
            yield nodes, events, agents
    finally:
        for agent in agents.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(10.0)
            agent.kill()
            agent.wait()


@functools.cache
def no_namespaces() -> str:
    """Why this machine makes no network namespaces; empty when it does."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and ip"
    try:
        with namespaces(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr!r}"


@contextmanager
def namespaces(count: int = 2, rate: str = "") -> Iterator[list[str]]:
    """Network namespaces hw0, hw1, ... on one bridge, with addresses 10.77.0.1, 10.77.0.2, ...; ``rate``: tc's limit
    of each one's uplink, like 100mbit."""
    names = [f"hw{os.getpid()}n{index}" for index in range(count)]
    bridge = f"hwb{os.getpid() % 100000}"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("link", "set", bridge, "up")
        for index, name in enumerate(names):
            ip("netns", "add", name)
            inside, outside = f"e{index}", f"v{os.getpid() % 100000}n{index}"
            ip("link", "add", outside, "type", "veth", "peer", "name", inside, "netns", name)
            ip("link", "set", outside, "master", bridge, "up")
            ip("-n", name, "addr", "add", f"10.77.0.{index + 1}/24", "dev", inside)
            ip("-n", name, "link", "set", inside, "up")
            ip("-n", name, "link", "set", "lo", "up")
            if rate:
                limit = ["rate", rate, "burst", "256kb", "latency", "50ms"]
                subprocess.run(
                    ["tc", "-n", name, "qdisc", "add", "dev", inside, "root", "tbf", *limit],
                    check=True,
                    capture_output=True,
                )
        yield names
    finally:
        for index, name in enumerate(names):
            listed = subprocess.run(["ip", "netns", "pids", name], check=False, capture_output=True, text=True)
            for pid in listed.stdout.split():  # of a test that failed: they would keep the namespace
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            # By itself: the kernel removes it some time after its namespace, and the next one has its name.
            subprocess.run(["ip", "link", "del", f"v{os.getpid() % 100000}n{index}"], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], check=False, capture_output=True)


@contextmanager
def disk_full(agent: subprocess.Popen[Any]) -> Iterator[None]:
    """Fill the /dev/shm that an agent was given by ``memory``."""
    filler = Path(f"/proc/{agent.pid}/root/dev/shm/filler")
    with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the agent is dead, and its /dev/shm gone
            filler.unlink()


def set_link(namespace: str, index: int, up: bool) -> None:
    """Cut or restore the connection of ``namespace``, the ``index``-th, with the others."""
    outside = f"v{os.getpid() % 100000}n{index}"
    subprocess.run(["ip", "link", "set", outside, "up" if up else "down"], check=True, capture_output=True)


def recoveries_s(run: Path) -> list[float]:
    """Seconds from the last sign of life of each generator that died and came back to its successor's first tokens, as
    the ledger and the trace have them."""
    lines, name = read_trace(run), "generator_restarted"
    back = [line for line in lines if isinstance(line, Mark) and line.event == name]
    busy = [line for line in lines if isinstance(line, Span) and line.name == "busy"]
    found = []
    for mark, event in zip(back, tiny_run.events_of(run, name), strict=True):
        begun = [span.start_s for span in busy if span.track == event.worker and span.end_s > mark.time_s]
        if begun:
            found.append(round(event.lost_s + max(0.0, min(begun) - mark.time_s), 3))
    return found


def is_generator(pid: int) -> bool:
    """Whether a process is a generator: a worker on core 0 that has loaded torch."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"headway.runtime.child" not in words or b"cpu:0" not in words:
            return False
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def computes_on(pid: int, core: int) -> bool:
    """Whether a process is pinned to one core and has loaded torch: a generator or a rank of a trainer."""
    try:
        return os.sched_getaffinity(pid) == {core} and "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False
