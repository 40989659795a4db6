"""The nodes of a run, joined and lost ones, and the launcher of workers on them."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path

from headway.records.errors import HeadwayError, RemoteError, WorkerDied
from headway.records.node import NodeConditions, ProcessOrder
from headway.runtime.addresses import split_address
from headway.runtime.clock import Clock
from headway.runtime.devices import split_node
from headway.runtime.nodes.conditions import CONDITIONS_EVERY_S, ConditionsReader
from headway.runtime.nodes.dial import outlast
from headway.runtime.nodes.handshake import Admission, Hello, NotAdmitted, admit, software
from headway.runtime.nodes.listener import Listener
from headway.runtime.nodes.node import Node, NodeLost
from headway.runtime.supervision import spawn
from headway.runtime.worker_process import WorkerProcess
from headway.runtime.workers import EventCallback, LocalLauncher, WorkerHandle, WorkerSpec

_CALL_S = 30.0  # for what an agent does at once


class Nodes:
    """The nodes of a run: the port they connect to, those that have joined, and the launcher of workers on them.

    Example::

        async with Nodes("10.0.0.1:7400", key, epoch, clock, local) as nodes:
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
        return_s: float = 300.0,
        environment: dict[str, str] | None = None,
        certificate: str = "",
        keep_agents: bool = False,
        on_event: EventCallback = lambda name, detail, /, **fields: None,
    ) -> None:
        """``environment``: of all workers on other nodes. ``local`` starts the workers of this machine. ``return_s``: a
        worker's start waits so long for a node that isn't there. ``certificate``: with its key, as PEM, of encrypted
        connections; empty: they aren't. ``keep_agents``: at the end agents are kept waiting for the run instead of
        ended."""
        self.joined: dict[str, Node] = {}
        self._epoch = epoch
        self._clock = clock
        self._local = local
        self._orphan_s = orphan_s
        self._return_s = return_s
        self._on_offer: Callable[[str], Awaitable[object]] | None = None
        self._local_conditions: NodeConditions | None = None
        self._offers: set[asyncio.Task[None]] = set()
        self._environment = dict(environment or {})
        self._on_event = on_event
        self._keep_agents = keep_agents
        self._refused: deque[str] = deque(maxlen=3)
        self._listener = Listener(address, key, epoch, self._take_client, self._on_refusal, certificate)
        self._awaited: dict[str, asyncio.Future[socket.socket]] = {}  # workers' connections, by token
        self._joining: set[str] = set()  # nodes that are welcome and have not described themselves
        self._changed = asyncio.Condition()
        self._closing = False

    @property
    def address(self) -> str:
        """The address to which nodes connect."""
        return self._listener.address

    async def __aenter__(self) -> Nodes:
        await self._listener.open()
        self._reading = asyncio.create_task(self._read_conditions(), name="conditions")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing = True
        for task in (self._reading, *self._offers):
            task.cancel()
        await asyncio.gather(*(node.leave(not self._keep_agents) for node in list(self.joined.values())))
        await self._listener.close()

    def host_of(self, name: str) -> str:
        """The address of a node that has joined (of this machine: "") by which the others reach it. Raises NodeLost."""
        if not name:
            return split_address(self.address)[0]
        if name not in self.joined:
            raise NodeLost(f"node {name} is not connected")
        return self.joined[name].peer

    async def await_host(self, name: str) -> str:
        """As `host_of`, but wait for a node that isn't there as the start of a worker does."""
        if name:
            await self.wait_for(name, self._return_s)
        return self.host_of(name)

    def conditions(self) -> list[NodeConditions]:
        """The last known conditions of this machine and of every node."""
        reported = [self._local_conditions, *(node.conditions for node in self.joined.values())]
        return [conditions for conditions in reported if conditions is not None]

    def take_offers(self, take: Callable[[str], Awaitable[object]]) -> None:
        """Call ``take(device)`` for every device that a node offers, now and later."""
        self._on_offer = take
        for node in self.joined.values():
            self._take_devices(node)

    async def wait_for(self, name: str, timeout_s: float) -> Node:
        """Wait until node ``name`` has joined. Raises NodeLost, with the last connections that were refused."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: name in self.joined)
        except TimeoutError:
            joined = ", ".join(sorted(self.joined)) or "none"
            refusals = "".join(f"; refused: {cause}" for cause in self._refused)
            raise NodeLost(f"node {name} has not joined within {timeout_s:g} s (joined: {joined}){refusals}") from None
        return self.joined[name]

    async def start(self, spec: WorkerSpec) -> WorkerHandle:
        """Start a worker on the node that its device names, or here: see :meth:`Launcher.start`."""
        name, device = split_node(spec.device)
        if not name:
            return await self._local.start(spec)
        process, sock = await self._start_on(name, device, spec)
        return await self._local.attach(spec, process, sock)

    async def _start_on(self, name: str, device: str, spec: WorkerSpec) -> tuple[WorkerProcess, socket.socket]:
        try:
            node = await self.wait_for(name, self._return_s)
        except NodeLost as lost:
            raise WorkerDied(spec.name, str(lost), "node") from None
        token = secrets.token_hex(16)
        socket_future = self._awaited[token] = asyncio.get_running_loop().create_future()
        order = ProcessOrder(
            worker=spec.name,
            token=token,
            device=device,
            environment=self._environment | spec.environment,
            log="" if spec.log_path is None else os.path.abspath(spec.log_path),  # noqa: ASYNC240  (asks no disk)
        )
        try:
            process = await node.start_process(order)
            async with asyncio.timeout(_CALL_S):
                return process, await socket_future
        except NodeLost as lost:
            raise WorkerDied(spec.name, str(lost), "node") from None
        except RemoteError as error:
            raise WorkerDied(spec.name, f"could not be started on node {name}: {error.error}") from error
        except TimeoutError:
            raise WorkerDied(spec.name, f"could not be started on node {name}: no answer in {_CALL_S:g} s") from None
        finally:
            del self._awaited[token]

    def _on_refusal(self, cause: str) -> None:
        self._refused.append(cause)
        self._on_event("connection_refused", cause)

    async def _take_client(self, sock: socket.socket, hello: Hello, peer: str) -> None:
        """Take a client that has proved the key: see `OnClient`."""
        outlast(sock, self._orphan_s)
        admission = Admission(epoch=self._epoch, orphan_s=self._orphan_s)
        if hello.purpose == "worker":
            socket_future = self._awaited.get(hello.subject)
            if socket_future is None or socket_future.done():
                raise NotAdmitted("no worker with this token is expected")
            await admit(sock, admission)
            socket_future.set_result(sock)
            return
        if hello.purpose != "node":
            raise NotAdmitted(f"connections of a {hello.purpose} aren't accepted here")
        if (other_node := self.joined.get(hello.subject)) is not None:
            raise NotAdmitted(f"node {other_node.name} has joined already, from {other_node.peer}", later=True)
        if hello.subject in self._joining:
            raise NotAdmitted(f"another node {hello.subject} is just joining", later=True)
        if self._closing:
            raise NotAdmitted("the run is over", later=self._keep_agents)
        if differences_text := _differences(hello.software):
            raise NotAdmitted(f"node {hello.subject} has {differences_text}: install the same versions there")
        self._joining.add(hello.subject)
        try:
            await admit(sock, admission)
            await self._join(sock, hello.subject, peer)
        finally:
            self._joining.discard(hello.subject)

    async def _join(self, sock: socket.socket, name: str, peer: str) -> None:
        node = Node(sock, name, peer, self._clock, self._lose)
        try:
            facts = await node.inquire()
        finally:  # of a time-out too: a socket closed under its link would still be watched
            if self._closing:  # the others have been notified already
                await node.leave(not self._keep_agents)
            elif node.facts is None:
                node.give_up("did not describe itself")
        if self._closing:
            return
        self.joined[name] = node
        node.watch(self._orphan_s, self._on_event)
        self._on_event(
            "node_joined",
            f"{name} at {peer}: {facts.cores} cores, {facts.gpus} GPUs, {facts.memory_bytes / 2**30:.0f} GiB, "
            f"monotonic clock offset {node.clock_offset_s:+.3f} s (± {1000 * node.clock_uncertainty_s:.1f} ms)",
            worker=name,
        )
        async with self._changed:
            self._changed.notify_all()
        self._take_devices(node)

    def _take_devices(self, node: Node) -> None:
        """Begin to take the devices that a node offers, if offers are taken."""
        if self._on_offer is None or node.facts is None:
            return
        for device in node.facts.offers:
            spawn(self._offers, self._join_device(self._on_offer(f"{node.name}/{device}")), f"take {device}")

    async def _join_device(self, taking: Awaitable[object]) -> None:
        try:
            await taking
        except (HeadwayError, OSError) as error:  # a model's file that can't be read here, say
            self._on_event("offer_failed", str(error))

    async def _read_conditions(self) -> None:
        """Read this machine's own conditions every few seconds."""
        reader = ConditionsReader(Path(tempfile.gettempdir()))
        while True:
            self._local_conditions = await asyncio.to_thread(reader.read)
            await self._clock.sleep(CONDITIONS_EVERY_S)

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
