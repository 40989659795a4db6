"""A watchdog that ends a process in which a piece of work hangs, even in compiled code that holds Python's lock."""

from __future__ import annotations

import faulthandler
import math
import re
import sys
import time

_DUMP = re.compile(r"Timeout \(\d+:\d\d:[\d.]+\)!\n(?=Thread 0x)")
_METHODS = " in serve_methods\n"  # the frame of the thread that runs user methods (`headway.flow.host`)


class Watchdog:
    """Ends the process (exit code 1, traceback on stderr) when one piece of work in its block takes too long.

    The first piece begins with the block, another one with ``restart``. Arming costs a thread, much more than scoring a
    short answer. Hence the watchdog is armed for 1.1 x ``timeout_s`` and rearmed only by a piece that begins more than
    0.1 x ``timeout_s`` later: every piece has between 1.0 and 1.1 x ``timeout_s``. A process has one timer, so blocks
    can't be nested or overlap.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._armed_s = -math.inf

    def __enter__(self) -> Watchdog:
        self.restart()
        return self

    def restart(self) -> None:
        """Begin a piece of work; cheap enough for one of a microsecond."""
        now = time.monotonic()
        if now - self._armed_s > 0.1 * self._timeout_s:
            faulthandler.dump_traceback_later(1.1 * self._timeout_s, exit=True, file=sys.__stderr__ or 2)
            self._armed_s = now

    def __exit__(self, *_: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._armed_s = -math.inf


def timeout_stack(log: str) -> str:
    """Return the traceback that a watchdog has written at the end of ``log``: of the thread that runs a flow worker's
    methods, else of the main thread, innermost frame first. Return "" where the log ends otherwise."""
    if (dump := _DUMP.search(log)) is None:
        return ""
    stacks = log[dump.end() :].split("Thread 0x")
    stack = next((stack for stack in stacks if _METHODS in stack), stacks[-1])
    return dump.group() + stack.partition("\n")[2].rstrip()
