"""Evaluates the rules of ``control/alerts.py`` on a run's ledger and clock.

Alerts are recorded in the ledger, from where exporters deliver them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import shutil
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from headway.config.alerts import AlertRule
from headway.control.alerts import MIN_INTERVAL_S, STEP_RULES, AlertTracker, Change, full_disk, no_step
from headway.orchestrator.context import RunContext
from headway.orchestrator.preflight.cluster import LEAST_DISK_BYTES
from headway.records.errors import HeadwayError
from headway.records.ledger import EventRecord, LedgerLine, StepRecord
from headway.runtime.supervision import cancel_all
from headway.telemetry.exporters.alerts import alert_fields
from headway.telemetry.ledger import EVENT_ALERT, EVENT_ALERT_CLEARED, EVENT_STALL_ENDED, EVENT_STALLED, Ledger


class AlertSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the watch over alerts."""

    tick_s: float = 15.0  # between two checks of the clock and the disk
    no_step_times: float = 10.0  # of the longest of the last steps: checkpoints and evaluations come in between
    no_step_s: float = 600.0  # at least
    disk_bytes: int = LEAST_DISK_BYTES  # free beside two checkpoints: a new one is written before the oldest goes


class AlertWatch:
    """Finds alerts and records them.

    Consumes: the ledger's lines (``take`` is a subscriber). Waits for: nothing but the clock. An alert that the ledger
    can't record, on a full disk, is lost: the run ends by the next line anyway.
    """

    def __init__(
        self, run: RunContext, folder: Path, settings: AlertSettings, min_interval_s: float = MIN_INTERVAL_S
    ) -> None:
        self._run = run
        self._folder = folder
        self._settings = settings
        self._tracker = AlertTracker(run.experiment.alerts.rules, min_interval_s)
        self._stalls: dict[str, str] = {}  # worker -> the line that names its stall
        self._gaps_s: deque[float] = deque(maxlen=64)
        self._step_s = math.nan  # the run's time at its last step
        self._checkpoint_bytes = 0

    def restore(self, lines: Iterable[LedgerLine]) -> None:
        """Take in the lines of the run's former processes: an alert that was raised then isn't raised again."""
        for line in lines:
            self._tracker.history.take(line)
            rule = line.data.get("rule") if isinstance(line, EventRecord) else None
            if rule in STEP_RULES and isinstance(line, EventRecord):  # the other rules concern that process alone
                self._tracker.raised.pop(rule, None)
                if line.event == EVENT_ALERT:
                    self._tracker.raised[rule] = line.detail

    def take(self, line: LedgerLine) -> None:
        """Take in a line of the ledger, and record the alerts that it raises or clears."""
        if isinstance(line, EventRecord):
            if line.event == EVENT_STALLED:
                self._stalls[line.worker] = line.detail
            elif line.event == EVENT_STALL_ENDED or line.event.endswith(("_restarted", "_restored")):
                self._stalls.pop(line.worker, None)
            elif line.event == "checkpoint":
                self._checkpoint_bytes = _newest_checkpoint_bytes(self._folder)
            self._update("stall", next(iter(self._stalls.values()), ""))
            return
        for rule, change in self._tracker.take(line):
            self._record(rule, change)
        if isinstance(line, StepRecord):
            if line.time_s > self._step_s:
                self._gaps_s.append(line.time_s - self._step_s)
            self._step_s = line.time_s

    def check(self) -> None:
        """Check the clock and the disks, and record the alerts that they raise or clear."""
        run, settings = self._run, self._settings
        self._update("stall", next(iter(self._stalls.values()), ""))
        alert = ""
        if not self._stalls and not run.state.draining:  # a stall's alert names the cause
            alert = no_step(run.time_s() - self._step_s, self._gaps_s, settings.no_step_times, settings.no_step_s)
        self._update("no_step", alert)
        alert = ""
        with contextlib.suppress(OSError):
            needed_bytes = settings.disk_bytes + 2 * self._checkpoint_bytes
            alert = full_disk(shutil.disk_usage(self._folder).free, needed_bytes, f"the file system of {self._folder}")
        for node in run.nodes():
            alert = alert or full_disk(node.disk_free_bytes, settings.disk_bytes, f"TMPDIR of the node {node.name!r}")
        self._update("disk", alert, misses=4)

    async def loop(self) -> None:
        """Check the clock and the disks every ``tick_s`` seconds until cancelled."""
        while True:
            await self._run.clock.sleep(self._settings.tick_s)
            self.check()

    def _update(self, rule: AlertRule, problem: str, misses: int = 1) -> None:
        self._record(rule, self._tracker.update(rule, problem, self._run.time_s(), misses))

    def _record(self, rule: AlertRule, change: Change) -> None:
        with contextlib.suppress(HeadwayError):
            if change == "raised":
                self._run.event(EVENT_ALERT, f"{rule}: {self._tracker.raised[rule]}", **alert_fields(rule))
            elif change == "cleared":
                self._run.event(EVENT_ALERT_CLEARED, f"{rule}: no longer found", rule=rule)


def _newest_checkpoint_bytes(folder: Path) -> int:
    with contextlib.suppress(OSError):
        newest_folder = max((folder / "checkpoints").glob("step_*"), default=None)
        return 0 if newest_folder is None else sum(file.stat().st_size for file in newest_folder.rglob("*"))
    return 0


@asynccontextmanager
async def watching_alerts(
    run: RunContext, folder: Path, ledger: Ledger, recorded: Iterable[LedgerLine], settings: AlertSettings
) -> AsyncIterator[None]:
    """Raise the alerts named by ``alerts.rules`` within the block. ``recorded``: lines of former processes."""
    alert_watch = AlertWatch(run, folder, settings)
    alert_watch.restore(recorded)
    ledger.subscribe(alert_watch.take)
    watch_task = asyncio.create_task(alert_watch.loop(), name="alerts")
    try:
        yield
    finally:
        await cancel_all(watch_task)
