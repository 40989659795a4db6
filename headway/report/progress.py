"""Progress of long commands: bars with the time that is left, and the lines of `headway sft`."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from headway.report.formats import duration, quantity, shown_kernels

LINE_EVERY_S = 2.0
OnDone = Callable[[float, float], None]  # receives what is done, and of how much
# Activities of a calibration by their first words, and the share of its seconds at which each begins.
_BEGINS = {"computes": 0.0, "decodes a few": 0.06, "decodes at": 0.18, "trains": 0.54, "publishes": 0.9}


def unheard(done: float, total: float) -> None:
    """Progress that nobody wants to hear of."""


class ProgressBar:
    """A bar with the time left, on a terminal alone; it disappears at its end.

    Call it with what is done and the total. The time left is told by the caller (``left_s``), or follows from the pace
    since the first call; between two calls it counts down. ``limit_s``: from the first call on it takes no longer.
    """

    def __init__(
        self,
        label: str,
        *,
        quiet: bool = False,
        console: Console | None = None,
        now: Callable[[], float] = time.monotonic,
        limit_s: float | None = None,
    ) -> None:
        console = console or Console(stderr=True)
        self.shown = console.is_terminal and not quiet
        self._now, self._limit_s = now, limit_s
        self._first: tuple[float, float] | None = None  # when it was first called, and what was done then
        columns = (TextColumn("{task.description}"), BarColumn(), _TimeLeft(now))
        redirected = (
            sys.stdout.isatty()
        )  # else standard output goes to a file, and must not be sent to the bar's console
        self._bar = Progress(
            *columns, console=console, transient=True, disable=not self.shown, redirect_stdout=redirected
        )
        self._task = self._bar.add_task(label, total=None, left_s=None, told_s=0.0)

    def __call__(self, done: float, total: float, label: str = "", left_s: float | None = None) -> None:
        now_s = self._now()
        first_s, first_done = self._first = self._first or (now_s, done)
        if left_s is None and done > first_done:
            left_s = (now_s - first_s) / (done - first_done) * (total - done)
        if self._limit_s is not None:
            left_s = min(math.inf if left_s is None else left_s, first_s + self._limit_s - now_s)
        self._bar.update(
            self._task, completed=done, total=total, description=label or None, left_s=left_s, told_s=now_s
        )

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


class _TimeLeft(ProgressColumn):
    """The time left, as it was last told less what has passed since."""

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__()
        self._now = now

    def render(self, task: Task) -> Text:
        left_s = task.fields["left_s"]
        if left_s is None:
            return Text(f"{duration(task.elapsed or 0.0)} so far", style="dim")
        return Text(f"{duration(max(0.0, left_s - self._now() + task.fields['told_s']))} left")


class CalibrationProgress:
    """Progress of measurements: prints each activity on standard error, with the time it started; a bar while that is a
    terminal. ``seconds``: time of one calibration, whose activities take known shares of it."""

    def __init__(
        self, seconds: float = 10.0, *, quiet: bool = False, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = None if quiet else Console(stderr=True, highlight=False)
        self._now, self._seconds = now, seconds
        self._started_s = now()
        self._bar = ProgressBar("", quiet=quiet, console=self._console, now=now)

    def __enter__(self) -> CalibrationProgress:
        self._bar.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.__exit__()

    def __call__(self, doing: str, done: int = 0, total: int = 0) -> None:
        """``doing``: the activity. ``done``, ``total``: calibrations that have ended, of how many; 0: there is one."""
        if self._console is None:
            return
        self._console.print(Text(f"{self._now() - self._started_s:5.1f} s  {doing}", style="dim"), soft_wrap=True)
        begins = next((share for name, share in _BEGINS.items() if doing.startswith(name)), None)
        if total:
            self._bar(done, total, doing)
        elif begins is not None:
            self._bar(begins, 1.0, doing, left_s=(1.0 - begins) * self._seconds)


class SftProgress:
    """Prints the progress of supervised training. Call it with the measurements of a step: ``step`` and any others,
    numbers or text, and ``kernels`` (`EvaluationRecord.kernels`). Prints a line every two seconds, and the last one on
    exit; on a terminal a bar stands below them. ``time_limit_s``: training ends then, if not earlier."""

    def __init__(
        self,
        *,
        quiet: bool = False,
        console: Console | None = None,
        now: Callable[[], float] = time.monotonic,
        time_limit_s: float | None = None,
    ) -> None:
        self._console = None if quiet else console or Console(highlight=False)
        self._now = now
        self._bar = ProgressBar("steps", quiet=quiet, console=self._console, now=now, limit_s=time_limit_s)
        self._printed_s = -float("inf")
        self._pending: str | None = None

    def __enter__(self) -> SftProgress:
        self._bar.__enter__()
        return self

    def __call__(self, measured: Mapping[str, Any]) -> None:
        self._pending = self._line(measured)
        if "steps" in measured:
            self._bar(float(measured["step"]), float(measured["steps"]))
        # An evaluation is rare and of interest: it is printed at once.
        if self._now() - self._printed_s >= LINE_EVERY_S or not {"solve_rate", "failed"}.isdisjoint(measured):
            self._printed_s = self._now()
            self._print()

    def __exit__(self, *_: object) -> None:
        self._bar.__exit__()
        self._print()

    def _line(self, measured: Mapping[str, Any]) -> str:
        rest = dict(measured)
        step, steps = rest.pop("step", None), rest.pop("steps", None)
        kernels, failed = shown_kernels(rest.pop("kernels", {})), rest.pop("failed", "")
        parts = [f"step {step}" + (f"/{steps}" if steps else "")] if step is not None else []
        for name, value in rest.items():
            shown = quantity(value) if isinstance(value, float) else str(value)
            parts.append(f"{name.replace('_', ' ')} {shown}")
        parts += [f"{name} {shown}" for name, shown in kernels.items()] + ([failed] if failed else [])
        return " · ".join(parts)

    def _print(self) -> None:
        if self._console is not None and self._pending is not None:
            self._console.print(Text(self._pending), soft_wrap=True)
        self._pending = None
