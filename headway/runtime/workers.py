"""Workers: objects in processes of their own, whose methods are awaited.

``Launcher`` and ``WorkerHandle`` are the whole interface (another launcher can implement it);
``LocalLauncher`` starts processes on this machine. A dead worker is an event with a cause, never a
hang: every pending and later call raises WorkerDied, ``died`` is set, ``events`` is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from headway.records.errors import WorkerDied
from headway.runtime.bounded_queue import BoundedQueue
from headway.runtime.clock import Clock
from headway.runtime.devices import machine_cores, parse_device
from headway.runtime.fork_server import ForkServer, fork_server
from headway.runtime.process_worker import Death, ProcessWorker
from headway.runtime.stalls.waits import Waits
from headway.runtime.worker_process import ChildProcess, WorkerProcess


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """The specification of a worker: its factory and arguments, its device, its log."""

    name: str  # unique in the run; names the log and every error
    factory: str  # "module:Class", built in the worker as Class(context, **arguments)
    arguments: dict[str, Any] = field(default_factory=dict)  # anything that pickles
    device: str = "cpu:0"  # cuda:N, cpu:N, cpu:N-M
    log_path: str | Path | None = None  # its output is appended here; None: kept only for the cause of death
    environment: dict[str, str] = field(default_factory=dict)  # added to the parent's, and to the device's
    # Modules that workers of this machine's cores share: imported once, in a process from which the workers are forked.
    preload: tuple[str, ...] = ()
    longest_silence_s: float = 0.0  # its work may hold the interpreter's lock so long: health checks wait for it


class WorkerHandle(Protocol):
    """A handle of a worker."""

    @property
    def name(self) -> str: ...

    @property
    def pid(self) -> int: ...

    @property
    def clock_offset_s(self) -> float:
        """Seconds to be added to times of its monotonic clock to get this machine's; 0.0 for a worker here."""
        ...

    @property
    def alive(self) -> bool: ...

    @property
    def events(self) -> BoundedQueue[Any]:
        """The queue of the worker's events, in order. It must be read, or the worker blocks when it is full.
        Closed when the worker is dead (events sent before are still there)."""
        ...

    @property
    def waits(self) -> Waits:
        """Where waits for it are registered."""
        ...

    @property
    def died(self) -> Death:
        """Set once: exit code or signal with the last traceback or output, or "stopped"."""
        ...

    async def call(self, method: str, *args: Any, timeout_s: float | None = None, **named: Any) -> Any:
        """Run a public method in the worker and return its result.

        Calls run one at a time in the order they were made. Raises RemoteError when the method raises
        (``__cause__`` is the exception itself where it is a HeadwayError), WorkerDied when the worker is
        or becomes dead, TimeoutError after ``timeout_s``; the method then still runs to its end. Large
        arrays are sent from their own memory: leave them unchanged until the result arrives.
        """
        ...

    async def stop(self, grace_s: float = 5.0) -> None:
        """End the worker after its present call, running its ``close()`` if it has one; kill it after ``grace_s``.

        Later and queued calls are not run. Its events that no longer fit the queue are dropped.
        """
        ...

    def kill(self, reason: str = "") -> None:
        """Kill the worker and its child processes at once. ``died`` follows, with ``reason`` in its cause."""
        ...


class EventCallback(Protocol):
    """A callback for events of workers. ``fields``: those of `EventRecord` (worker, cause, found_by, lost_s,
    lost_samples); others are its ``data``."""

    def __call__(self, name: str, detail: str, /, **fields: Any) -> object: ...


def death_fields(death: WorkerDied, lost_samples: int = 0) -> dict[str, Any]:
    """The fields of an event that reports ``death``, for an EventCallback."""
    cause, found_by = death.cause, death.found_by
    return {"worker": death.worker, "cause": cause, "found_by": found_by, "lost_samples": lost_samples}


class Launcher(Protocol):
    """Starts workers."""

    async def start(self, spec: WorkerSpec) -> WorkerHandle:
        """Start a worker and wait until it is built. Raises ConfigurationError (device), RemoteError with the
        traceback when building it raises, WorkerDied when it can't be started, dies or isn't built in time."""
        ...


async def call_all(
    workers: Sequence[WorkerHandle], method: str, *args: Any, timeout_s: float | None = None, **named: Any
) -> list[Any]:
    """Call a method of all workers at once; results in their order. The first failure is raised at once."""
    return await call_each(workers, method, [args] * len(workers), timeout_s=timeout_s, **named)


async def call_each(
    workers: Sequence[WorkerHandle],
    method: str,
    arguments: Sequence[Sequence[Any]],
    *,
    timeout_s: float | None = None,
    **named: Any,
) -> list[Any]:
    """Call a method of each worker with its own ``arguments``, all at once, as `call_all` does."""
    call_tasks = [
        asyncio.ensure_future(worker.call(method, *own_arguments, timeout_s=timeout_s, **named))
        for worker, own_arguments in zip(workers, arguments, strict=True)
    ]
    try:
        return list(await asyncio.gather(*call_tasks))
    finally:
        for call_task in call_tasks:
            call_task.cancel()


class LocalLauncher:
    """Starts workers as processes of this machine, which die with this process."""

    def __init__(
        self,
        clock: Clock,
        heartbeat_interval_s: float = 2.0,
        heartbeat_timeout_s: float = 15.0,
        start_timeout_s: float = 600.0,
        events_capacity: int = 256,
        on_event: EventCallback = lambda name, detail, /, **fields: None,
        waits: Waits | None = None,
    ) -> None:
        """``waits``: where its workers and the calls to them are registered. ``start_timeout_s``: a worker that isn't
        built by then is killed. ``on_event`` is called when a worker gives no sign of life for half of
        ``heartbeat_timeout_s`` (``worker_stalled``), and when it gives one again (``worker_answers``)."""
        self._clock = clock
        self._heartbeat_interval_s = heartbeat_interval_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._start_timeout_s = start_timeout_s
        self._events_capacity = events_capacity
        self._on_event = on_event
        self._waits = waits or Waits(clock.now)

    async def start(self, spec: WorkerSpec) -> ProcessWorker:
        """See :meth:`Launcher.start`."""
        device = parse_device(spec.device)
        device.check()
        server = None
        if spec.preload and device.kind == "cpu":
            server = await fork_server(spec.preload, added_environment(spec.device, spec.environment))
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with theirs:
                try:
                    process = start_child(theirs, spec.device, spec.environment, spec.log_path, server)
                except OSError:
                    ours.close()
                    raise
        except OSError as error:  # no process, descriptor, memory or place for the log
            raise WorkerDied(spec.name, f"could not be started: {error}") from error
        return await self.attach(spec, process, ours)

    async def attach(self, spec: WorkerSpec, process: WorkerProcess, sock: socket.socket) -> ProcessWorker:
        """Build the worker in a process that was just started, with ``sock`` connected to it; its health checks start
        once it is built. Raises the errors of :meth:`Launcher.start`, when the process has ended."""
        events: BoundedQueue[Any] = BoundedQueue(self._events_capacity, f"{spec.name}.events", self._clock)
        worker = ProcessWorker(spec.name, events, process, sock, self._waits)
        try:
            interval_s = self._heartbeat_interval_s
            await worker.build(spec.factory, spec.arguments, self._start_timeout_s, self._clock, interval_s)
        except BaseException:
            worker.kill()
            with contextlib.suppress(asyncio.CancelledError):
                await worker.died
            raise
        silence_s = max(self._heartbeat_timeout_s, spec.longest_silence_s)
        worker.watch(self._clock, self._heartbeat_interval_s, silence_s, self._on_event)
        self._waits.workers[worker.name] = worker
        return worker


def start_child(
    theirs: socket.socket,
    device: str,
    environment: dict[str, str],
    log: str | Path | None,
    server: ForkServer | None = None,
) -> ChildProcess:
    """Start the process of a worker on this machine, which serves ``theirs``; forked from ``server`` where there is
    one. Raises OSError, with nothing left."""
    full_environment = os.environ | added_environment(device, environment)
    core_list = ",".join(str(core) for core in machine_cores())
    return ChildProcess([str(os.getpid()), device, core_list], full_environment, log, theirs.fileno(), server)


def added_environment(device: str, environment: dict[str, str]) -> dict[str, str]:
    """The variables that a worker on ``device`` has beside its parent's: the device's, and its own ``environment``."""
    return {"PYTHONUNBUFFERED": "1"} | parse_device(device).environment() | environment
