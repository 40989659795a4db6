"""A run's alerts: its ledger and the time since its last step through the rules of ``control/alerts.py``, back into the
ledger, from where exporters deliver them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import shutil
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import msgspec

from headway.config.alerts import AlertRule
from headway.control.alerts import STEP_RULES, AlertChange, AlertLimits, AlertTracker, full_disk, no_step
from headway.orchestrator.context import RunContext
from headway.orchestrator.preflight.cluster import LEAST_DISK_BYTES
from headway.records.errors import HeadwayError
from headway.records.ledger import EventRecord, LedgerLine, StepRecord
from headway.runtime.run_directory import RunDirectory
from headway.telemetry.exporters.alerts import alert_fields
from headway.telemetry.ledger import (
    EVENT_ALERT,
    EVENT_ALERT_CLEARED,
    EVENT_STALL_ENDED,
    EVENT_STALLED,
    Ledger,
)


class AlertSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the watch over alerts."""

    tick_s: float = 15.0  # between two looks at the clock and the disk
    limits: AlertLimits = AlertLimits()
    no_step_times: float = 10.0  # of the longest of the last steps: checkpoints and evaluations come in between
    no_step_s: float = 600.0  # at least
    gaps: int = 64  # last steps that are looked at
    disk_bytes: int = LEAST_DISK_BYTES  # left at least, beside room for two checkpoints: a new one is whole
    # before the oldest goes
    disk_misses: int = 4  # looks in a row that find room before the alert is over


class AlertWatch:
    """Finds alerts and records them.

    Consumes: the ledger's lines (``take`` is a subscriber). Waits for: nothing but the clock. An alert that the ledger
    can't record, on a full disk, is lost: the run ends by the next line anyway.
    """

    def __init__(self, run: RunContext, folder: Path, settings: AlertSettings) -> None:
        alerts = run.experiment.alerts
        self._run = run
        self._folder = folder
        self._settings = settings
        self._tracker = AlertTracker(alerts.rules, alerts.min_interval_s, settings.limits)
        self._stalls: dict[str, str] = {}  # worker -> the line that names its stall
        self._gaps_s: deque[float] = deque(maxlen=settings.gaps)
        self._step_s = math.nan  # the run's time at its last step
        self._checkpoint_bytes = 0

    def restore(self, lines: Iterable[LedgerLine]) -> None:
        """Go on from what a former process of the run recorded: what was raised then isn't again."""
        tracker = self._tracker
        for line in lines:
            tracker.history.take(line)
            if isinstance(line, EventRecord) and line.data.get("rule") in STEP_RULES:
                rule = cast("AlertRule", line.data["rule"])
                if line.event == EVENT_ALERT:
                    tracker.raised[rule] = line.detail
                elif line.event == EVENT_ALERT_CLEARED:
                    tracker.raised.pop(rule, None)

    def take(self, line: LedgerLine) -> None:
        """Take in a line of the ledger, and record what changes by it."""
        if isinstance(line, EventRecord):
            if line.event == EVENT_STALLED:
                self._stalls[line.worker] = line.detail
            elif line.event == EVENT_STALL_ENDED or line.event.endswith(("_restarted", "_restored")):
                self._stalls.pop(line.worker, None)
            elif line.event == "checkpoint":
                self._checkpoint_bytes = _newest_checkpoint_bytes(self._folder)
            self._look_at_stalls()
            return
        for change in self._tracker.take(line):
            self._record(change)
        if isinstance(line, StepRecord):
            if line.time_s > self._step_s:
                self._gaps_s.append(line.time_s - self._step_s)
            self._step_s = line.time_s

    def look(self) -> None:
        """Look at the clock and the disks, and record what changes."""
        run, settings, now_s = self._run, self._settings, self._run.time_s()
        self._look_at_stalls()
        found = ""
        if not self._stalls and not run.state.draining:  # a stall says the same, and names the cause
            found = no_step(now_s - self._step_s, self._gaps_s, settings.no_step_times, settings.no_step_s)
        self._record(self._tracker.update("no_step", found, now_s))
        needed = settings.disk_bytes + 2 * self._checkpoint_bytes
        found = ""
        with contextlib.suppress(OSError):
            found = full_disk(shutil.disk_usage(self._folder).free, needed, f"the file system of {self._folder}")
        for node in run.nodes():
            place = f"node {node.name}" if node.name else "the temporary folder"
            found = found or full_disk(node.disk_free_bytes, settings.disk_bytes, place)
        self._record(self._tracker.update("disk", found, now_s, settings.disk_misses))

    def _look_at_stalls(self) -> None:
        found = next(iter(self._stalls.values()), "")
        self._record(self._tracker.update("stall", found, self._run.time_s()))

    async def loop(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await self._run.clock.sleep(self._settings.tick_s)
            self.look()

    def _record(self, change: AlertChange | None) -> None:
        if change is None:
            return
        with contextlib.suppress(HeadwayError):
            if change.kind == "raised":
                self._run.event(EVENT_ALERT, f"{change.rule}: {change.detail}", **alert_fields(change.rule))
            else:
                self._run.event(EVENT_ALERT_CLEARED, f"{change.rule}: not found any more", rule=change.rule)


def _newest_checkpoint_bytes(folder: Path) -> int:
    with contextlib.suppress(OSError):
        newest = max((folder / "checkpoints").glob("step_*"), default=None)
        return 0 if newest is None else sum(file.stat().st_size for file in newest.rglob("*"))
    return 0


@asynccontextmanager
async def watching_alerts(
    run: RunContext,
    directory: RunDirectory,
    ledger: Ledger,
    before: Iterable[LedgerLine],
    settings: AlertSettings = AlertSettings(),
) -> AsyncIterator[None]:
    """Raise the alerts that ``alerts.rules`` name within the block. ``before``: lines of the run's former processes."""
    if not run.experiment.alerts.rules:
        yield
        return
    watch = AlertWatch(run, directory.path, settings)
    watch.restore(before)
    ledger.subscribe(watch.take)
    task = asyncio.create_task(watch.loop(), name="alerts")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
