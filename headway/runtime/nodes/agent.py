"""The agent of a node: joins the run, starts and ends workers' processes there, reports their ends.

One runs on every machine but the orchestrator's; `headway node --join ADDRESS` and the launchers start it. It connects
out, to one port; each worker's connection is opened by the agent and handed to the worker's process.
"""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import time
from pathlib import Path
from typing import Any

from headway.records.errors import ConfigurationError, WorkerDied
from headway.records.node import NodeConditions, NodeFacts, ProcessEnded, ProcessOrder
from headway.runtime.bounded_queue import BoundedQueue
from headway.runtime.clock import Clock, RealClock
from headway.runtime.devices import cuda_device_count, machine_cores, parse_device
from headway.runtime.framing import Kind, encode
from headway.runtime.link import HealthChecks, Link
from headway.runtime.nodes.conditions import CONDITIONS_EVERY_S, ConditionsReader, machine_memory
from headway.runtime.nodes.dial import TIMEVAL, dial, outlast
from headway.runtime.nodes.handshake import ConnectionRefused, EncryptionRequired, Hello, NotAdmitted, software
from headway.runtime.retries import backoff_s
from headway.runtime.scratch import ScratchFolder
from headway.runtime.worker_process import ChildProcess, ProcessExit
from headway.runtime.workers import start_child

HEARTBEAT_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 5.0  # between attempts to join


class Agent:
    """A node's agent during one epoch of a run.

    Lifecycle: *joined* -> *ended*, when the orchestrator says so, closes the connection or sends no heartbeat for
    ``orphan_s``; the workers' processes of the node are then killed. Its coroutine methods without an underscore are
    what the orchestrator calls.
    """

    def __init__(
        self,
        name: str,
        address: str,
        key: str,
        epoch: int,
        orphan_s: float,
        scratch: Path,
        *,
        offers: tuple[str, ...] = (),
        encrypted: bool = False,
    ) -> None:
        self._offers = offers
        self._name, self._address, self._key, self._epoch = name, address, key, epoch
        self._orphan_s = orphan_s
        self._encrypted = encrypted
        self._scratch = scratch
        self._processes: dict[int, ChildProcess] = {}
        self._link: Link | None = None
        self._ended: asyncio.Future[tuple[str, bool]] = asyncio.get_running_loop().create_future()

    async def serve(self, sock: socket.socket, clock: Clock) -> tuple[str, bool]:
        """Serve the orchestrator at the other end of ``sock``. Returns why that ended, and whether the run is over."""
        events: BoundedQueue[Any] = BoundedQueue(1, "orchestrator.events", clock)
        self._link = link = Link("orchestrator", sock, events, self._lost, self._lost, serves=self)
        link.watch(
            HealthChecks(
                clock=clock,
                interval_s=HEARTBEAT_S,
                timeout_s=self._orphan_s,
                on_silence=lambda silent_s: self._lost(f"sent no heartbeat for {silent_s:.0f} s"),
            )
        )
        reporting_task = asyncio.create_task(self._report_conditions(clock))
        try:
            return await asyncio.shield(self._ended)
        finally:
            reporting_task.cancel()
            self._kill_all()
            link.close(WorkerDied("orchestrator", "left"))

    async def facts(self) -> NodeFacts:
        """Describe this node."""
        return NodeFacts(
            name=self._name,
            host=platform.node(),
            pid=os.getpid(),
            cores=len(machine_cores()),
            gpus=cuda_device_count() or 0,
            memory_bytes=(machine_memory() or (0, 0))[0],
            scratch=str(self._scratch),
            time_s=time.time(),
            offers=self._offers,
        )

    async def clock(self) -> float:
        """The monotonic clock of this node, in seconds."""
        return time.monotonic()

    async def start_process(self, order: ProcessOrder) -> int:
        """Connect to the orchestrator for a worker and start its process; returns its id. Its end is an event. Raises
        ConfigurationError for a device that isn't here, ConnectionRefused, OSError."""
        parse_device(order.device).check()
        hello = Hello(purpose="worker", subject=order.token, epoch=self._epoch)
        sock, _ = await dial(self._address, self._key, hello, self._orphan_s, encrypted=self._encrypted)
        with sock:
            sock.setblocking(True)
            # The worker ends itself when it receives nothing for so long, regardless of this agent's fate.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, TIMEVAL.pack(int(self._orphan_s), 0))
            log_is_shared = bool(order.log) and Path(order.log).parent.is_dir()
            log_path = order.log if log_is_shared else self._scratch / "logs" / f"{order.worker}.log"
            process = start_child(sock, order.device, order.environment, log_path)
        self._processes[process.pid] = process
        process.watch(lambda end: self._on_exit(process.pid, end))
        return process.pid

    async def kill(self, pid: int) -> None:
        """Kill a worker's process and its children; no-op when it has ended."""
        if pid in self._processes:
            self._processes[pid].kill()

    async def inspect(self, pid: int) -> tuple[bool, str]:
        """See :meth:`WorkerProcess.inspect`."""
        return await self._processes[pid].inspect() if pid in self._processes else (False, "")

    async def conditions(self) -> NodeConditions:
        """Read this node's conditions now. Its GPUs may take 5 s."""
        return await asyncio.to_thread(ConditionsReader(self._scratch, self._name).read, len(self._processes))

    async def end(self, over: bool = True) -> None:
        """End the service: the run is ``over``; False: only a check of it is, and the agent waits for the run."""
        if not self._ended.done():
            self._ended.set_result(("the run is over" if over else "the check is over; waiting for the run", over))

    def _on_exit(self, pid: int, end: ProcessExit) -> None:
        del self._processes[pid]
        assert end.code is not None  # it was a process of this machine
        self._emit(ProcessEnded(pid=pid, code=end.code, output=end.output))

    def _emit(self, event: Any) -> None:
        if self._link is not None and not self._link.at_end:
            self._link.send(encode(Kind.EVENT, 0, event))

    def _lost(self, reason: str) -> None:
        if not self._ended.done():
            self._ended.set_result((f"the orchestrator {reason}", False))

    def _kill_all(self) -> None:
        for process in self._processes.values():
            process.kill()

    async def _report_conditions(self, clock: Clock) -> None:
        reader = ConditionsReader(self._scratch, self._name)
        while True:
            await clock.sleep(CONDITIONS_EVERY_S)
            self._emit(await asyncio.to_thread(reader.read, len(self._processes)))


async def run_agent(
    address: str,
    name: str,
    key: str,
    *,
    offers: tuple[str, ...] = (),
    give_up_s: float = 600.0,
    report: Any = print,
    clock: Clock | None = None,
) -> None:
    """Join the run at ``address`` as node ``name`` and serve it to its end; join again when the orchestrator was lost.
    ``offers``: devices for replicas beside those that the run's file names.

    Raises ConnectionRefused when the run refuses this node, or when no run answers for ``give_up_s``."""
    clock = clock or RealClock()
    failures, since_s, encrypted = 0, clock.now(), False
    with ScratchFolder(f"headway-node-{name}-") as scratch:
        while True:
            try:
                hello = Hello(purpose="node", subject=name, software=software())
                sock, admission = await dial(address, key, hello, orphan_s=60.0, encrypted=encrypted)
            except EncryptionRequired:
                encrypted = True
                continue
            except ConnectionRefused as error:
                is_final = isinstance(error, NotAdmitted) and not error.later
                if is_final or clock.now() - since_s > give_up_s:
                    raise
                failures += 1
                encrypted = False
                if failures == 1:
                    report(f"{error}; retrying for {give_up_s:g} s")
                await clock.sleep(backoff_s(failures, _FIRST_PAUSE_S, _LONGEST_PAUSE_S))
                continue
            outlast(sock, admission.orphan_s)
            failures = 0
            report(f"joined the run at {address} as {name}, epoch {admission.epoch}")
            agent = Agent(
                name, address, key, admission.epoch, admission.orphan_s, scratch, offers=offers, encrypted=encrypted
            )
            reason, run_is_over = await agent.serve(sock, clock)
            report(reason)
            if run_is_over:
                return
            since_s = clock.now()


def require_name(name: str) -> str:
    """Return ``name`` if a node may be called so. Raises ConfigurationError."""
    if not name or "/" in name or ":" in name or len(name) > 100:
        raise ConfigurationError(f"node name {name!r}: must be 1 to 100 characters without '/' and ':'")
    return name
