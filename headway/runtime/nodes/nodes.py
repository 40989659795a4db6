"""The nodes of a run, as its orchestrator sees them: who has joined, their processes, who is lost."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Callable
from typing import Any

from headway.records.errors import HeadwayError, RemoteError, WorkerDied
from headway.records.node import NodeConditions, NodeFacts, ProcessEnded, ProcessOrder
from headway.runtime.addresses import split_address
from headway.runtime.channel import Channel
from headway.runtime.clock import Clock
from headway.runtime.link import Link
from headway.runtime.nodes.dial import outlast
from headway.runtime.nodes.door import Door
from headway.runtime.nodes.handshake import Admission, Hello, software, welcome
from headway.runtime.worker_process import ProcessExit, WorkerProcess
from headway.runtime.workers import EventCallback, LocalLauncher, Worker, WorkerSpec

HEARTBEAT_S = 2.0
_REACHABLE_S = 2.5 * HEARTBEAT_S  # since a sign of life
_CALL_S = 30.0  # for what an agent does at once
_CLOCK_ROUNDS = 8


class NodeLost(HeadwayError):
    """A node has gone: its machine, its network or its agent."""

    exit_code = 3


class NodeProcess:
    """A worker's process on a node."""

    def __init__(self, node: Node, pid: int) -> None:
        self._node = node
        self.pid = pid
        self._on_exit: Callable[[ProcessExit], None] | None = None
        self._end: ProcessExit | None = None

    @property
    def reachable(self) -> bool:
        """See :meth:`WorkerProcess.reachable`."""
        return self._node.reachable

    def watch(self, on_exit: Callable[[ProcessExit], None]) -> None:
        """See :meth:`WorkerProcess.watch`."""
        self._on_exit = on_exit
        if self._end is not None:
            on_exit(self._end)

    def kill(self) -> bool:
        """See :meth:`WorkerProcess.kill`."""
        if self._end is not None:
            return False
        self._node.kill(self.pid)
        return True

    async def inspect(self) -> tuple[bool, str]:
        """See :meth:`WorkerProcess.inspect`."""
        try:
            return await self._node.call("inspect", self.pid)
        except (NodeLost, RemoteError, TimeoutError):
            return False, ""

    def ended(self, end: ProcessExit) -> None:
        if self._end is None:
            self._end = end
            if self._on_exit is not None:
                self._on_exit(end)


class Node:
    """A node that has joined.

    Lifecycle: *joined* -> *lost* (no sign of life for ``orphan_s``, its connection broke) or *left* (it was told to
    end). Its processes have ended then, by their own clocks at the latest.
    """

    def __init__(self, sock: socket.socket, name: str, peer: str, clock: Clock, on_lost: Callable[[Node, str], None]):
        self.name = name
        self.peer = peer  # its address as seen from here
        self.facts: NodeFacts | None = None
        self.conditions: NodeConditions | None = None  # the last ones it told
        self.clock_offset_s = 0.0  # to be added to its monotonic clock to get ours
        self.clock_uncertainty_s = 0.0
        self.lost = ""  # why
        self._clock = clock
        self._on_lost = on_lost
        self._events: Channel[Any] = Channel(256, f"{name}.events", clock)
        self._link = Link(name, sock, self._events, self._give_up, self._give_up)
        self._processes: dict[int, NodeProcess] = {}
        self._ends: dict[int, ProcessExit] = {}  # of processes whose start isn't known here yet
        self._absorbing = asyncio.create_task(self._absorb(), name=f"node {name}")

    @property
    def reachable(self) -> bool:
        """Whether its agent has given a sign of life lately."""
        return not self.lost and self._link.silent_s < _REACHABLE_S

    def watch(self, orphan_s: float, on_event: EventCallback) -> None:
        """Start its health checks."""
        self._link.watch(
            self._clock,
            HEARTBEAT_S,
            orphan_s + 2 * HEARTBEAT_S,  # its agent and workers have given us up by then
            on_event,
            on_silence=lambda silent_s: self._give_up(f"gave no sign of life for {silent_s:.0f} s"),
            reachable=lambda: True,
        )

    async def inquire(self) -> NodeFacts:
        """Ask for its facts and measure its clock."""
        facts: NodeFacts = await self.call("facts")
        best = float("inf")
        for _ in range(_CLOCK_ROUNDS):
            sent = self._clock.now()
            there = await self.call("clock")
            received = self._clock.now()
            if received - sent < best:
                best = received - sent
                self.clock_offset_s = (sent + received) / 2 - there
                self.clock_uncertainty_s = best / 2
        self.facts = facts
        return facts

    async def call(self, method: str, *args: Any) -> Any:
        """Call the agent. Raises NodeLost, RemoteError, TimeoutError."""
        try:
            return await self._link.call(method, *args, timeout_s=_CALL_S)
        except WorkerDied as died:
            raise NodeLost(f"node {self.name}: {died.cause}") from None

    async def start_process(self, order: ProcessOrder) -> NodeProcess:
        """Start a worker's process. Raises the errors of `call`."""
        pid = await self.call("start_process", order)
        process = self._processes[pid] = NodeProcess(self, pid)
        if pid in self._ends:
            self._ended(pid, self._ends.pop(pid))
        return process

    def kill(self, pid: int) -> None:
        """Kill a process, if the node can be reached; else its own clock ends it."""
        killing = asyncio.create_task(self.call("kill", pid), name=f"kill {pid} on {self.name}")
        killing.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def leave(self) -> None:
        """Tell the agent that the run is over, and wait until it has closed the connection."""
        with contextlib.suppress(NodeLost, RemoteError, TimeoutError):
            await self.call("end")
        self._give_up("the run is over")

    async def _absorb(self) -> None:
        async for event in self._events:
            if isinstance(event, ProcessEnded):
                self._ended(event.pid, ProcessExit(code=event.code, output=event.output))
            elif isinstance(event, NodeConditions):
                self.conditions = event

    def _ended(self, pid: int, end: ProcessExit) -> None:
        if (process := self._processes.pop(pid, None)) is not None:
            process.ended(end)
        else:
            self._ends[pid] = end

    def _give_up(self, reason: str) -> None:
        if self.lost:
            return
        self.lost = reason
        self._link.close(WorkerDied(f"node {self.name}", reason))
        for process in list(self._processes.values()):
            process.ended(ProcessExit(code=None, reason=f"node {self.name} {reason}"))
        self._processes.clear()
        self._on_lost(self, reason)


class Nodes:
    """The nodes of a run: its door, those who have joined, and the launcher of workers on them.

    Example::

        async with Nodes(experiment.cluster, key, epoch, clock, local) as nodes:
            await nodes.wait_for("b", timeout_s=60)
            worker = await nodes.start(WorkerSpec(name="generator-0", device="b/cuda:0", ...))
    """

    def __init__(
        self,
        address: str,
        key: str,
        epoch: int,
        clock: Clock,
        local: LocalLauncher,
        *,
        orphan_s: float = 60.0,
        environment: dict[str, str] | None = None,
        on_event: EventCallback = lambda name, detail, /, **fields: None,
    ) -> None:
        """``environment``: of all workers on other nodes. ``local`` starts the workers of this machine."""
        self.joined: dict[str, Node] = {}
        self._epoch = epoch
        self._clock = clock
        self._local = local
        self._orphan_s = orphan_s
        self._environment = dict(environment or {})
        self._on_event = on_event
        self._door = Door(address, key, epoch, self._take, lambda cause: on_event("connection_refused", cause))
        self._awaited: dict[str, asyncio.Future[socket.socket]] = {}  # workers' connections, by token
        self._changed = asyncio.Condition()
        self._closing = False

    @property
    def address(self) -> str:
        """Where nodes connect to."""
        return self._door.address

    async def __aenter__(self) -> Nodes:
        await self._door.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing = True
        await asyncio.gather(*(node.leave() for node in list(self.joined.values())))
        await self._door.close()

    def host_of(self, name: str) -> str:
        """The address of a node that has joined (of this machine: "") by which the others reach it. Raises NodeLost."""
        if not name:
            return split_address(self.address)[0]
        if name not in self.joined:
            raise NodeLost(f"node {name} is not there")
        return self.joined[name].peer

    async def wait_for(self, name: str, timeout_s: float) -> Node:
        """Wait until node ``name`` has joined. Raises NodeLost."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: name in self.joined)
        except TimeoutError:
            here = ", ".join(sorted(self.joined)) or "none"
            raise NodeLost(f"node {name} has not joined within {timeout_s:g} s (joined: {here})") from None
        return self.joined[name]

    async def start(self, spec: WorkerSpec) -> Worker:
        """Start a worker on the node that its device names, or here: see :meth:`Launcher.start`."""
        name, _, device = spec.device.rpartition("/") if "://" not in spec.device else ("", "", spec.device)
        if not name:
            return await self._local.start(spec)
        process, sock = await self._start_on(name, device, spec)
        return await self._local.attach(spec, process, sock)

    async def _start_on(self, name: str, device: str, spec: WorkerSpec) -> tuple[WorkerProcess, socket.socket]:
        node = self.joined.get(name)
        if node is None:
            raise WorkerDied(spec.name, f"node {name} is not there")
        token = secrets.token_hex(16)
        awaited = self._awaited[token] = asyncio.get_running_loop().create_future()
        order = ProcessOrder(
            worker=spec.name, token=token, device=device, environment=self._environment | spec.environment
        )
        try:
            process = await node.start_process(order)
            async with asyncio.timeout(_CALL_S):
                return process, await awaited
        except NodeLost as lost:
            raise WorkerDied(spec.name, str(lost)) from None
        except RemoteError as error:
            raise WorkerDied(spec.name, f"could not be started on node {name}: {error.error}") from error
        except TimeoutError:
            raise WorkerDied(spec.name, f"could not be started on node {name}: no answer in {_CALL_S:g} s") from None
        finally:
            del self._awaited[token]

    async def _take(self, sock: socket.socket, hello: Hello, peer: str) -> str:
        """Take a guest that has proved the key: see `OnGuest`."""
        outlast(sock, self._orphan_s)
        verdict = Admission(epoch=self._epoch, orphan_s=self._orphan_s)
        if hello.purpose == "worker":
            awaited = self._awaited.get(hello.subject)
            if awaited is None or awaited.done():
                return "nobody waits for this worker"
            await welcome(sock, verdict)
            awaited.set_result(sock)
            return ""
        if hello.purpose != "node":
            return f"{hello.purpose} isn't served here"
        if hello.subject in self.joined:
            return f"there is a node {hello.subject} already, at {self.joined[hello.subject].peer}"
        if self._closing:
            return "the run is over"
        if others := _differences(hello.software):
            return others
        await welcome(sock, verdict)
        await self._join(sock, hello.subject, peer)
        return ""

    async def _join(self, sock: socket.socket, name: str, peer: str) -> None:
        node = Node(sock, name, peer, self._clock, self._lose)
        facts = await node.inquire()
        self.joined[name] = node
        node.watch(self._orphan_s, self._on_event)
        self._on_event(
            "node_joined",
            f"{name} at {peer}: {facts.cores} cores, {facts.gpus} GPUs, {facts.memory_bytes / 2**30:.0f} GiB, clock "
            f"{node.clock_offset_s:+.3f} s (± {1000 * node.clock_uncertainty_s:.1f} ms)",
            worker=name,
        )
        async with self._changed:
            self._changed.notify_all()

    def _lose(self, node: Node, reason: str) -> None:
        if self.joined.get(node.name) is node:
            del self.joined[node.name]
            if not self._closing:
                self._on_event("node_lost", f"{node.name} {reason}", worker=node.name, cause=reason)


def _differences(theirs: dict[str, str]) -> str:
    """How a node's software differs from this machine's; empty: not at all."""
    return "; ".join(
        f"{name} {theirs.get(name, 'missing')} where the orchestrator has {version}"
        for name, version in software().items()
        if theirs.get(name) != version
    )
