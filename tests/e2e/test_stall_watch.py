"""The watch over stalls in trouble itself: its own process stopped, a ledger that can't be written."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headway.control.stalls import StallLimits
from headway.orchestrator.context import RunContext
from headway.orchestrator.stalls.watch import StallWatch, WatchSettings, loop_watched
from headway.records.errors import HeadwayError
from headway.runtime.clock import VirtualClock, run_virtual
from headway.runtime.run_directory import RunDirectory
from headway.runtime.stalls.waits import Waits

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]


def watched_run(**parts: Any) -> RunContext:
    """What the watch reads of a run."""
    experiment = SimpleNamespace(run=SimpleNamespace(on_stall="report"))
    return cast("RunContext", SimpleNamespace(experiment=experiment, state=SimpleNamespace(version=0), **parts))


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def test_a_run_ends_though_the_process_that_watches_its_loop_is_stopped(tmp_path: Path):
    before = children()
    with loop_watched(watched_run(time_s=lambda: 0.0), RunDirectory(tmp_path), 100.0):
        (watcher,) = children() - before
        os.kill(watcher, signal.SIGSTOP)
        since_s = time.monotonic()
    assert time.monotonic() - since_s < 20.0
    assert not Path(f"/proc/{watcher}").exists()


@pytest.mark.parametrize("error", [HeadwayError("no space left"), OSError(24, "Too many open files")], ids=str)
def test_the_loop_beats_on_when_the_ledger_can_not_be_written(tmp_path: Path, error: Exception):
    reports, beats = [], []

    def full(name: str, detail: str, **fields: Any) -> None:
        reports.append(detail)
        raise error

    async def main(clock: VirtualClock) -> None:
        waits = Waits(clock.now)
        limits = StallLimits(floor_s=1.0, unknown_s=1.0)
        run = watched_run(clock=clock, waits=waits, event=full)
        watch = StallWatch(run, WatchSettings(limits=limits), lambda reason: None, tmp_path / "waits.json")
        with waits.on("a batch", "orchestrator"):
            looping = asyncio.create_task(watch.loop(lambda: beats.append(clock.now())))
            await clock.sleep(60.0)
        looping.cancel()

    run_virtual(main)
    assert reports
    assert len(beats) >= 59
