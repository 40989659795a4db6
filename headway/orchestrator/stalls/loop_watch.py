"""Watches an orchestrator's event loop from another process, which needs neither that loop nor that interpreter.

Started as ``python -m headway.orchestrator.stalls.loop_watch PID STACKS LEDGER LIMIT_S POLICY``. The loop writes a beat
to its standard input every second; when none comes, this process asks the other for its stacks, which a signal handler
writes without the interpreter's lock, and writes the line into the ledger itself.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headway.control.stalls import current_frame
from headway.records.ledger import EventRecord
from headway.records.stalls import Stack, WorkerStatus
from headway.runtime.stalls.stacks import dump_of, parse_dump
from headway.telemetry.ledger import EVENT_ALERT, EVENT_STALLED
from headway.telemetry.pages import stall_page

SUBJECT = "orchestrator"
_GRACE_S = 1.0  # a beat may be under way when a machine wakes up
_MOST_TEXT = 6000  # characters of stacks in an event
_DISK_FRAMES = {"headway/buffer/": "a commit to buffer.db", "headway/runtime/line_file": "a write to a file of the run"}


class LoopWatch:
    """Watches the beats of one event loop.

    Lifecycle: *beating* -> *silent* for ``limit_s``, reported once -> *beating* again, or the end of the input.
    """

    def __init__(self, pid: int, stacks: Path, ledger: Path, limit_s: float, policy: str) -> None:
        self._pid = pid
        self._stacks = stacks
        self._ledger = ledger
        self._limit_s = limit_s
        self._policy = policy
        self._last = b"0 0"  # the last beat: seconds since the run's start, and its version
        self._alerted_s = -math.inf

    def run(self, beats: int) -> None:
        """Read beats from a descriptor until it is closed."""
        received_s, is_reported = time.monotonic(), False
        while True:
            if self._wait(beats, self._limit_s) or self._wait(beats, _GRACE_S):
                received_bytes = os.read(beats, 1 << 16)
                if not received_bytes:
                    return
                self._last = received_bytes.split(b"\n")[-2] if received_bytes.count(b"\n") else self._last
                received_s, is_reported = time.monotonic(), False
            elif not is_reported:
                is_reported = True
                self._report(time.monotonic() - received_s)

    def _wait(self, beats: int, seconds: float) -> bool:
        return bool(select.select([beats], [], [], seconds)[0])

    def _report(self, silent_s: float) -> None:
        """Name where the loop is: on standard error first, since the ledger's disk may be the cause."""
        is_stopped, dump = dump_of(self._pid, self._stacks)
        stacks = parse_dump(dump)
        stall_text = f"stalled {silent_s:.0f} s: the orchestrator{_cause(is_stopped, stacks)}"
        with contextlib.suppress(OSError):
            sys.stderr.write(f"headway: {stall_text} ({stall_page('event loop')})\n")
        time_s, step = self._last.split()
        event = EventRecord(
            event=EVENT_STALLED,
            detail=stall_text,
            step=int(step),
            time_s=float(time_s) + silent_s,
            worker=SUBJECT,
            cause=stall_text.partition(": ")[2],
            found_by="watch",
            lost_s=round(silent_s, 1),
            data={"stacks": stacks_text([(SUBJECT, stack) for stack in stacks])},
        )
        self._write(event)
        if self._policy == "end":  # it can't end itself; a run that is killed can be resumed
            os.kill(self._pid, signal.SIGKILL)
        self._alert(event)

    def _write(self, event: EventRecord) -> None:
        with contextlib.suppress(OSError):
            descriptor = os.open(self._ledger, os.O_WRONLY | os.O_APPEND)
            os.write(descriptor, msgspec.json.encode(event) + b"\n")
            os.close(descriptor)

    def _alert(self, stalled: EventRecord) -> None:
        """Raise the alert that the orchestrator can't raise now."""
        # Slow to import, and seldom needed.
        from headway.control.alerts import MIN_INTERVAL_S
        from headway.records.errors import HeadwayError
        from headway.runtime.run_directory import RunDirectory
        from headway.telemetry.exporters.alerts import alert_fields, deliver

        with contextlib.suppress(HeadwayError, OSError):  # its configuration can't be read
            alerts = RunDirectory(self._ledger.parent).read_experiment().alerts
            is_rested = time.monotonic() - self._alerted_s >= MIN_INTERVAL_S
            if is_rested and {"stall", "all"} & set(alerts.rules):
                self._alerted_s = time.monotonic()
                alert_data, stamp = alert_fields("stall"), {"step": stalled.step, "time_s": stalled.time_s}
                alert = EventRecord(event=EVENT_ALERT, detail=f"stall: {stalled.detail}", data=alert_data, **stamp)
                self._write(alert)
                deliver(alert, alerts, self._ledger.parent.resolve())


def stacks_text(stacks: Sequence[tuple[str, Stack]]) -> str:
    """Stacks as text for an event's data: innermost frame first, bounded."""
    stack_texts = ["\n  ".join([f"{worker}, {stack.of}:", *stack.frames[::-1]]) for worker, stack in stacks]
    return "\n".join(stack_texts)[:_MOST_TEXT]


def _cause(stopped: bool, stacks: list[Stack]) -> str:
    if stopped:
        return " is stopped by a signal or a debugger"
    frame, _ = current_frame(WorkerStatus(call="loop", stacks=tuple(stacks)))
    if not frame:
        return "'s event loop doesn't run, and its stacks can't be read"
    disk_text = next((f"{activity}, at " for path, activity in _DISK_FRAMES.items() if frame.startswith(path)), "")
    thread_stacks = (Stack(of="main", frames=stack.frames) for stack in stacks[1:])
    thread_frames = [current_frame(WorkerStatus(call="loop", stacks=(thread,)))[0] for thread in thread_stacks]
    user_frames = [other for other in thread_frames if other and not other.startswith(("headway/", "<"))]
    other_thread = f"; another thread is in {user_frames[0]}" if user_frames else ""
    return f"'s event loop is blocked in {disk_text}{frame}{other_thread}"


def main(arguments: list[str]) -> None:
    """Run the process until its standard input is closed."""
    pid, stacks, ledger, limit_s, policy = arguments
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends with the process that it watches
    LoopWatch(int(pid), Path(stacks), Path(ledger), float(limit_s), policy).run(sys.stdin.fileno())


if __name__ == "__main__":
    main(sys.argv[1:])
