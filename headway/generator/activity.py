"""Records the activity of one replica: its states over time (busy, idle, yielded, update) and its engine's steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headway.records.generation import EngineStatistics
from headway.records.trace import EngineStep

ActivitySpan = tuple[str, float, float]  # state, start and end, seconds of the machine's monotonic clock

STEPS_S = 0.1  # shortest duration of a row of steps
_KEPT = 512  # spans, or rows, between two calls of `take`; older ones are dropped


class Activity:
    """Records a replica's state changes as spans; repeating the current state changes nothing.

    Example: enter("busy"); enter("busy"); enter("idle"); take() gives [("busy", 0.0, 2.0), ("idle", 2.0, 3.0)].
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._state = "idle"
        self._since_s = now()
        self._ended: deque[ActivitySpan] = deque(maxlen=_KEPT)

    def enter(self, state: str) -> None:
        """Enter ``state`` now; a new span begins if it differs from the current one."""
        if state != self._state:
            self._end()
            self._state = state

    @contextmanager
    def during(self, state: str) -> Iterator[None]:
        """Hold ``state`` inside the block, and return to the previous state after it."""
        previous_state = self._state
        self.enter(state)
        try:
            yield
        finally:
            self.enter(previous_state)

    def take(self) -> list[ActivitySpan]:
        """Return the spans since the last call, oldest first; the current state's span is cut at this moment."""
        self._end()
        spans = list(self._ended)
        self._ended.clear()
        return spans

    def _end(self) -> None:
        now = self._now()
        self._ended.append((self._state, self._since_s, now))
        self._since_s = now


class StepLog:
    """Sums an engine's steps into rows that cover at least STEPS_S seconds; a longer step has a row of its own.
    Reading the engine's counters takes at most 1% of the time, however slow it is."""

    def __init__(self, statistics: Callable[[], EngineStatistics], now: Callable[[], float] = time.monotonic) -> None:
        self._statistics = statistics
        self._now = now
        self._previous = EngineStatistics()
        self._rows: deque[EngineStep] = deque(maxlen=_KEPT)
        self._worked_s: float | None = None  # end of the last step outside all rows; None: every step is in a row
        self._due_s = now()

    def note(self, worked: bool, now_s: float) -> None:
        """Note that a step has ended at ``now_s``, or (``worked`` False) that there was no step to do."""
        if worked:
            self._worked_s = now_s
        if self._worked_s is not None and now_s >= self._due_s:
            self._add(self._worked_s)

    def take(self) -> list[EngineStep]:
        """Return the rows since the last call, oldest first, with all steps so far."""
        if self._worked_s is not None:
            self._add(self._worked_s)
        rows = list(self._rows)
        self._rows.clear()
        return rows

    def _add(self, worked_s: float) -> None:
        read_start_s, old_stats = self._now(), self._previous
        self._previous = new_stats = self._statistics()
        self._rows.append(EngineStep(
            end_s=round(worked_s, 4), busy_s=round(new_stats.busy_s - old_stats.busy_s, 4),
            steps=new_stats.decode_steps - old_stats.decode_steps, running=new_stats.running, version=new_stats.version,
            tokens=new_stats.generated_tokens - old_stats.generated_tokens, kv_used_tokens=new_stats.kv_used_tokens,
        ))  # fmt: skip
        self._worked_s, now_s = None, self._now()
        self._due_s = now_s + max(STEPS_S, 100 * (now_s - read_start_s))
