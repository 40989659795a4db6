"""Shows the progress of long commands: bars with the remaining time, and the lines of `headway sft`."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from headway.report.formats import duration, format_kernel_shares, quantity

LINE_EVERY_S = 2.0
ProgressFn = Callable[[float, float], None]  # receives the finished amount and the total
# First words of a calibration's activities, and the share of its seconds at which each activity begins.
_ACTIVITY_STARTS = {"computes": 0.0, "decodes a few": 0.06, "decodes at": 0.18, "trains": 0.54, "publishes": 0.9}


def no_progress(done: float, total: float) -> None:
    """Discard the progress; a default for `ProgressFn`."""


class ProgressBar:
    """A progress bar with the remaining time. It appears on terminals only, and disappears at its end.

    Call it with the finished amount and the total. The caller passes the remaining time (``left_s``), or else it
    follows from the rate since the first call; between two calls it counts down. ``limit_s``: upper limit of the time
    from the first call to the end.
    """

    def __init__(
        self,
        label: str,
        *,
        silent: bool = False,
        console: Console | None = None,
        now: Callable[[], float] = time.monotonic,
        limit_s: float | None = None,
    ) -> None:
        console = console or Console(stderr=True)
        self.displayed = console.is_terminal and not silent
        self._now, self._limit_s = now, limit_s
        self._first: tuple[float, float] | None = None  # time and finished amount of the first call
        columns = (TextColumn("{task.description}"), BarColumn(), _RemainingTimeColumn(now))
        redirected = (
            sys.stdout.isatty()
        )  # else standard output goes to a file, and must not be sent to the bar's console
        self._bar = Progress(
            *columns, console=console, transient=True, disable=not self.displayed, redirect_stdout=redirected
        )
        self._task = self._bar.add_task(label, total=None, left_s=None, reported_s=0.0)

    def __call__(self, done: float, total: float, label: str = "", left_s: float | None = None) -> None:
        now_s = self._now()
        first_s, first_done = self._first = self._first or (now_s, done)
        if left_s is None and done > first_done:
            left_s = (now_s - first_s) / (done - first_done) * (total - done)
        if self._limit_s is not None:
            left_s = min(math.inf if left_s is None else left_s, first_s + self._limit_s - now_s)
        self._bar.update(
            self._task, completed=done, total=total, description=label or None, left_s=left_s, reported_s=now_s
        )

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


class _RemainingTimeColumn(ProgressColumn):
    """A column with the remaining time: the last reported value minus the time since that report."""

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__()
        self._now = now

    def render(self, task: Task) -> Text:
        left_s = task.fields["left_s"]
        if left_s is None:
            return Text(f"{duration(task.elapsed or 0.0)} so far", style="dim")
        return Text(f"{duration(max(0.0, left_s - self._now() + task.fields['reported_s']))} left")


class CalibrationProgress:
    """Prints each activity of a measurement on standard error with its start time, and on a terminal a bar below.
    ``seconds``: duration of one calibration, whose activities take known shares of it."""

    def __init__(
        self, seconds: float = 10.0, *, silent: bool = False, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = None if silent else Console(stderr=True, highlight=False)
        self._now, self._seconds = now, seconds
        self._started_s = now()
        self._bar = ProgressBar("", silent=silent, console=self._console, now=now)

    def __enter__(self) -> CalibrationProgress:
        self._bar.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.__exit__()

    def __call__(self, doing: str, done: int = 0, total: int = 0) -> None:
        """Print the activity ``doing``. ``done``, ``total``: finished and all calibrations; 0: a single one."""
        if self._console is None:
            return
        self._console.print(Text(f"{self._now() - self._started_s:5.1f} s  {doing}", style="dim"), soft_wrap=True)
        start_share = next((share for name, share in _ACTIVITY_STARTS.items() if doing.startswith(name)), None)
        if total:
            self._bar(done, total, doing)
        elif start_share is not None:
            self._bar(start_share, 1.0, doing, left_s=(1.0 - start_share) * self._seconds)


class SftProgress:
    """Prints the progress of supervised training, a line every two seconds and the last one on exit; on a terminal a
    bar follows the lines. Call it with the measurements of a step: ``step`` and any others, numbers or text, and
    ``kernels`` (`EvaluationRecord.kernels`). ``time_limit_s``: upper limit of the training's duration."""

    def __init__(
        self,
        *,
        silent: bool = False,
        console: Console | None = None,
        now: Callable[[], float] = time.monotonic,
        time_limit_s: float | None = None,
    ) -> None:
        self._console = None if silent else console or Console(highlight=False)
        self._now = now
        self._bar = ProgressBar("steps", silent=silent, console=self._console, now=now, limit_s=time_limit_s)
        self._printed_s = -float("inf")
        self._pending: str | None = None

    def __enter__(self) -> SftProgress:
        self._bar.__enter__()
        return self

    def __call__(self, measured: Mapping[str, Any]) -> None:
        self._pending = self._line(measured)
        if "steps" in measured:
            self._bar(float(measured["step"]), float(measured["steps"]))
        # Evaluations are rare and important, so they are printed at once.
        if self._now() - self._printed_s >= LINE_EVERY_S or not {"solve_rate", "failed"}.isdisjoint(measured):
            self._printed_s = self._now()
            self._print()

    def __exit__(self, *_: object) -> None:
        self._bar.__exit__()
        self._print()

    def _line(self, measured: Mapping[str, Any]) -> str:
        other_figures = dict(measured)
        step, steps = other_figures.pop("step", None), other_figures.pop("steps", None)
        kernels, failed_text = format_kernel_shares(other_figures.pop("kernels", {})), other_figures.pop("failed", "")
        part_texts = [f"step {step}" + (f"/{steps}" if steps else "")] if step is not None else []
        for name, value in other_figures.items():
            figure_text = quantity(value) if isinstance(value, float) else str(value)
            part_texts.append(f"{name.replace('_', ' ')} {figure_text}")
        part_texts += [f"{name} {share_text}" for name, share_text in kernels.items()] + (
            [failed_text] if failed_text else []
        )
        return " · ".join(part_texts)

    def _print(self) -> None:
        if self._console is not None and self._pending is not None:
            self._console.print(Text(self._pending), soft_wrap=True)
        self._pending = None
