"""A node of a run, as its orchestrator sees it: its agent's connection, its processes, its clock, its end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any

from headway.records.errors import HeadwayError, RemoteError, WorkerDied
from headway.records.node import NodeConditions, NodeFacts, ProcessEnded, ProcessOrder
from headway.runtime.bounded_queue import BoundedQueue
from headway.runtime.clock import Clock
from headway.runtime.link import HealthChecks, Link
from headway.runtime.supervision import spawn
from headway.runtime.worker_process import ProcessExit
from headway.runtime.workers import EventCallback

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

    @property
    def clock_offset_s(self) -> float:
        """See :meth:`WorkerProcess.clock_offset_s`."""
        return self._node.clock_offset_s

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
        """Return whether a signal stopped the process, and its threads' stacks; (False, "") if the node is lost."""
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

    Lifecycle: *joined* -> *lost* (no heartbeat for ``orphan_s``, or its connection broke) or *left* (the run, or a
    check of it, is over). Its processes have ended then, by their own clocks at the latest.
    """

    def __init__(self, sock: socket.socket, name: str, peer: str, clock: Clock, on_lost: Callable[[Node, str], None]):
        self.name = name
        self.peer = peer  # its address as seen from here
        self.facts: NodeFacts | None = None
        self.conditions: NodeConditions | None = None  # the last ones it reported
        self.clock_offset_s = 0.0  # to be added to its monotonic clock to get ours
        self.clock_uncertainty_s = 0.0
        self.time_offset_s = 0.0  # by which its system clock (Unix time) is ahead of ours
        self.lost = ""  # why
        self._clock = clock
        self._on_lost = on_lost
        self._events: BoundedQueue[Any] = BoundedQueue(256, f"{name}.events", clock)
        self._link = Link(name, sock, self._events, self.give_up, self.give_up)
        self._processes: dict[int, NodeProcess] = {}
        self._ends: dict[int, ProcessExit] = {}  # of processes whose start isn't known here yet
        self._starting = 0
        self._kills: set[asyncio.Task[None]] = set()
        self._absorbing = asyncio.create_task(self._absorb(), name=f"node {name}")

    @property
    def reachable(self) -> bool:
        """Whether its agent has given a sign of life lately."""
        return not self.lost and self._link.silent_s < _REACHABLE_S

    def watch(self, orphan_s: float, on_event: EventCallback) -> None:
        """Start its health checks."""
        self._link.watch(
            HealthChecks(
                clock=self._clock,
                interval_s=HEARTBEAT_S,
                timeout_s=orphan_s + 2 * HEARTBEAT_S,  # its agent and workers have given us up by then
                on_silence=lambda silent_s: self.give_up(f"sent no heartbeat for {silent_s:.0f} s"),
                on_event=on_event,
            )
        )

    async def inquire(self) -> NodeFacts:
        """Ask for the node's facts and measure the offsets of its two clocks."""
        asked_s = time.time()
        facts: NodeFacts = await self.call("facts")
        self.time_offset_s = facts.time_s - (asked_s + time.time()) / 2
        shortest_s = float("inf")
        for _ in range(_CLOCK_ROUNDS):
            sent_s = self._clock.now()
            remote_s = await self.call("clock")
            received_s = self._clock.now()
            if received_s - sent_s < shortest_s:
                shortest_s = received_s - sent_s
                self.clock_offset_s = (sent_s + received_s) / 2 - remote_s
                self.clock_uncertainty_s = shortest_s / 2
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
        self._starting += 1
        try:
            pid = await self.call("start_process", order)
            process = self._processes[pid] = NodeProcess(self, pid)
            if pid in self._ends:
                self._ended(pid, self._ends.pop(pid))
            return process
        finally:
            self._starting -= 1
            if not self._starting:
                self._ends.clear()  # of processes whose start was given up: a later one may get their id

    def kill(self, pid: int) -> None:
        """Kill a process, if the node can be reached; else its own clock ends it."""
        spawn(self._kills, self._kill(pid), f"kill {pid} on {self.name}")

    async def _kill(self, pid: int) -> None:
        with contextlib.suppress(NodeLost, RemoteError, TimeoutError):
            await self.call("kill", pid)

    async def leave(self, over: bool = True) -> None:
        """Notify the agent that the run is ``over``, or only a check of it. The processes of an agent that
        can't be reached end by their own clocks."""
        if self.reachable:
            with contextlib.suppress(NodeLost, RemoteError, TimeoutError):
                await self.call("end", over)
        self.give_up("the run is over")

    async def _absorb(self) -> None:
        async for event in self._events:
            if isinstance(event, ProcessEnded):
                self._ended(event.pid, ProcessExit(code=event.code, output=event.output))
            elif isinstance(event, NodeConditions):
                self.conditions = event

    def _ended(self, pid: int, end: ProcessExit) -> None:
        if (process := self._processes.pop(pid, None)) is not None:
            process.ended(end)
        elif self._starting:
            self._ends[pid] = end

    def give_up(self, reason: str) -> None:
        """Count it as lost for ``reason``: close its connection, and end its processes. No-op the second time."""
        if self.lost:
            return
        self.lost = reason
        self._link.close(WorkerDied(f"node {self.name}", reason))
        for process in list(self._processes.values()):
            process.ended(ProcessExit(code=None, reason=f"node {self.name} {reason}"))
        self._processes.clear()
        self._on_lost(self, reason)
