"""Watches a run's waits: records each stall in the ledger, and then acts by ``run.on_stall``."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec

from headway.control.stalls import Expectations, StallLimits, StallTracker, find_stalls, workers_to_inspect
from headway.orchestrator.context import RunContext
from headway.orchestrator.stalls.loop_watch import SUBJECT, stacks_text
from headway.records.errors import HeadwayError
from headway.records.stalls import Stall, WaitGraph, WorkerStatus
from headway.runtime.run_directory import RunDirectory
from headway.runtime.stalls.stacks import DUMP_SIGNAL
from headway.runtime.supervision import cancel_all
from headway.telemetry.ledger import EVENT_STALL_ENDED, EVENT_STALLED

_GRAPH_EVERY_S = 2.0
_PROBE_EVERY_S = 5.0
_MOST_WAITS = 300  # in the graph
_END_S = 5.0  # for the process that watches the loop


class WatchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the watch."""

    tick_s: float = 1.0  # between two judgements, and between two beats of the loop
    lag_s: float = 10.0  # without a beat, the event loop is blocked
    limits: StallLimits = StallLimits()


class StallWatch:
    """Judges the open waits of a run every second.

    Consumes: durations of ended waits. Waits for: the status of workers that something has waited for too long (2 s at
    most). Unblocked by: the clock. A blocked event loop blocks it as well: that is what the other process is for.
    """

    def __init__(self, run: RunContext, settings: WatchSettings, end: Callable[[str], None], file: Path) -> None:
        """``end(reason)`` ends the run, resumable. ``file``: that of the `WaitGraph`."""
        self._run = run
        self._settings = settings
        self._end = end
        self._file = file
        self._expectations = Expectations(settings.limits)
        self._tracker = StallTracker(settings.limits)
        self._statuses: dict[str, WorkerStatus] = {}
        self._written_s = 0.0

    async def loop(self, beat: Callable[[], None]) -> None:
        """Runs until it is cancelled; ``beat`` reports to the other process that the event loop is running."""
        clock, tick_s = self._run.clock, self._settings.tick_s
        while True:
            beat()
            before_s = clock.now()
            await clock.sleep(tick_s)
            lag_s = clock.now() - before_s - tick_s
            # A full disk, no descriptor left: without beats the loop would be called blocked.
            with contextlib.suppress(HeadwayError, OSError):
                if lag_s >= self._settings.lag_s:
                    self._ended(SUBJECT, "event loop", f"the event loop runs again, after {lag_s:.0f} s", lag_s)
                await self.judge()

    async def probe(self) -> None:
        """Request the replicas' statistics every few seconds, until cancelled. A replica that answers health checks and
        never ends a step leaves this call open, even where no other call is made to it."""
        while True:
            with contextlib.suppress(HeadwayError):
                await self._run.generator.statistics()
            await self._run.clock.sleep(_PROBE_EVERY_S)

    async def judge(self) -> None:
        """Judge the present waits."""
        waits, clock, limits = self._run.waits, self._run.clock, self._settings.limits
        self._expectations.learn(waits.take_durations())
        live_workers = {name: worker for name, worker in waits.workers.items() if worker.alive}
        silent_s = {name: worker.silent_s for name, worker in live_workers.items()}
        inspected = workers_to_inspect(waits.open(), silent_s, self._expectations, clock.now(), limits)
        statuses = await asyncio.gather(*(live_workers[name].inspect() for name in sorted(inspected)))
        self._statuses = {status.worker: status for status in statuses if status is not None}
        now_s = clock.now()
        silent_since_s = {name: now_s - worker.silent_s for name, worker in live_workers.items() if worker.silent_s > 0}
        stalls = find_stalls(waits.open(), self._statuses, silent_since_s, self._expectations, now_s, limits)
        begun_stalls, ended_stalls = self._tracker.update(stalls, now_s)
        for stall in begun_stalls:
            self._report(stall, now_s)
        for stall in ended_stalls:
            lost_s = now_s - stall.since_s
            self._ended(stall.owner, stall.kind, f"{stall.owner}: {stall.kind} after {lost_s:.0f} s", lost_s)
        if now_s - self._written_s >= _GRAPH_EVERY_S or begun_stalls:
            self._written_s = now_s
            self._write_graph(now_s)

    def _report(self, stall: Stall, now_s: float) -> None:
        """Write the line, then act."""
        self._run.event(
            EVENT_STALLED,
            stall.sentence(now_s),
            worker=stall.owner,
            cause=stall.cause,
            found_by="watch",
            lost_s=round(now_s - stall.since_s, 1),
            wait=stall.kind,
            expected_s=round(stall.expected_s, 1),
            stacks=stacks_text(stall.stacks),
        )
        policy, worker = self._run.experiment.run.on_stall, self._run.waits.workers.get(stall.owner)
        if policy == "restart" and worker is not None:
            worker.kill(stall.sentence(now_s))
        elif policy == "end":
            self._end(stall.sentence(now_s))

    def _ended(self, owner: str, kind: str, detail: str, lost_s: float) -> None:
        self._run.event(EVENT_STALL_ENDED, detail, worker=owner, found_by="watch", lost_s=round(lost_s, 1), wait=kind)

    def _write_graph(self, now_s: float) -> None:
        waits = tuple(self._run.waits.open()[:_MOST_WAITS])
        graph = WaitGraph(
            written_s=time.time(),
            pid=os.getpid(),
            now_s=now_s,
            waits=waits,
            expected_s={wait.kind: self._expectations.expected_s(wait.kind) for wait in waits},
            workers=tuple(self._statuses.values()),
            stalls=tuple(self._tracker.open.values()),
        )
        partial_path = self._file.with_suffix(".json.tmp")
        with contextlib.suppress(OSError):  # a full disk is others' to report
            partial_path.write_bytes(msgspec.json.encode(graph))
            partial_path.replace(self._file)


@contextmanager
def loop_watched(run: RunContext, directory: RunDirectory, lag_s: float) -> Iterator[Callable[[], None]]:
    """Watch this process's event loop from another process within the block. Yields the function that the loop calls
    every second while it runs."""
    directory.logs.mkdir(parents=True, exist_ok=True)
    stacks_path = directory.logs / "orchestrator.stacks"
    arguments = [os.getpid(), stacks_path, directory.ledger, lag_s, run.experiment.run.on_stall]
    command = [sys.executable, "-m", "headway.orchestrator.stalls.loop_watch", *map(str, arguments)]
    with stacks_path.open("ab") as file:
        faulthandler.register(DUMP_SIGNAL, file=file)
        process = subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0)  # Ctrl-C doesn't reach it
        assert process.stdin is not None
        pipe_fd = process.stdin.fileno()
        os.set_blocking(pipe_fd, False)

        def beat() -> None:
            with contextlib.suppress(OSError):  # it has ended, or is itself stopped: the run continues
                os.write(pipe_fd, f"{run.time_s():.3f} {run.state.version}\n".encode())

        try:
            yield beat
        finally:
            process.stdin.close()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:  # it is stopped, or writes to a disk or a terminal that hangs
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)
            faulthandler.unregister(DUMP_SIGNAL)


@asynccontextmanager
async def watching_stalls(
    run: RunContext, directory: RunDirectory, end: Callable[[str], None], settings: WatchSettings
) -> AsyncIterator[None]:
    """Watch the waits of the run and this process's event loop within the block. ``end(reason)`` ends the run."""
    watcher = StallWatch(run, settings, end, directory.waits)
    with loop_watched(run, directory, settings.lag_s) as beat:
        tasks = [asyncio.create_task(watcher.loop(beat), name="stall watch"), asyncio.create_task(watcher.probe())]
        try:
            yield
        finally:
            await cancel_all(*tasks)
            directory.waits.unlink(missing_ok=True)
