"""The activity of one replica: its states over time (busy, idle, lent, update), its engine's steps, added up."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headway.records.generation import EngineStatistics
from headway.records.trace import EngineStep

ActivitySpan = tuple[str, float, float]  # state, start and end, seconds of the machine's monotonic clock

STEPS_S = 0.1  # of a row of steps, at least
_KEPT = 512  # spans, or rows, between two calls of `take`; older ones are dropped


class Activity:
    """Records a replica's state changes as spans; repeating the current state changes nothing.

    Example: be("busy"); be("busy"); be("idle"); take() gives [("busy", 0.0, 2.0), ("idle", 2.0, 3.0)].
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._state = "idle"
        self._since_s = now()
        self._ended: deque[ActivitySpan] = deque(maxlen=_KEPT)

    def be(self, state: str) -> None:
        """Enter ``state`` now; a new span begins if it differs from the current one."""
        if state != self._state:
            self._end()
            self._state = state

    @contextmanager
    def during(self, state: str) -> Iterator[None]:
        """Be in ``state`` inside the block, and in the previous state after it."""
        before = self._state
        self.be(state)
        try:
            yield
        finally:
            self.be(before)

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
    """Adds an engine's steps up to rows, of STEPS_S or, where a step takes longer, of one step each. Reading the
    engine's counters takes at most a hundredth of the time, however slow they are."""

    def __init__(self, statistics: Callable[[], EngineStatistics], now: Callable[[], float] = time.monotonic) -> None:
        self._statistics = statistics
        self._now = now
        self._before = EngineStatistics()
        self._rows: deque[EngineStep] = deque(maxlen=_KEPT)
        self._worked_s: float | None = None  # end of the last step that is in no row; None: there is none
        self._due_s = now()

    def note(self, worked: bool, now_s: float) -> None:
        """Note that a step has ended now, or (not ``worked``) that there was none to do."""
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
        asked_s, before = self._now(), self._before
        self._before = seen = self._statistics()
        self._rows.append(EngineStep(
            end_s=round(worked_s, 4), busy_s=round(seen.busy_s - before.busy_s, 4),
            steps=seen.decode_steps - before.decode_steps, tokens=seen.generated_tokens - before.generated_tokens,
            running=seen.running, kv_used_tokens=seen.kv_used_tokens, version=seen.version,
        ))  # fmt: skip
        self._worked_s, now_s = None, self._now()
        self._due_s = now_s + max(STEPS_S, 100 * (now_s - asked_s))
