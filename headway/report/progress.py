"""Live progress of `headway sft`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from headway.report.formats import quantity, shown_kernels

LINE_EVERY_S = 2.0


class SftProgress:
    """Prints the progress of supervised training. Call it with the measurements of a step: ``step`` and any others,
    numbers or text, and ``kernels`` (`EvaluationRecord.kernels`). Prints a line every two seconds, and the last one on
    exit."""

    def __init__(
        self,
        *,
        quiet: bool = False,
        console: Console | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = None if quiet else console or Console(highlight=False)
        self._now = now
        self._printed_s = -float("inf")
        self._pending: str | None = None

    def __enter__(self) -> SftProgress:
        return self

    def __call__(self, measured: Mapping[str, Any]) -> None:
        self._pending = self._line(measured)
        # An evaluation is rare and of interest: it is printed at once.
        if self._now() - self._printed_s >= LINE_EVERY_S or "solve_rate" in measured:
            self._printed_s = self._now()
            self._print()

    def __exit__(self, *_: object) -> None:
        self._print()

    def _line(self, measured: Mapping[str, Any]) -> str:
        rest = dict(measured)
        step, steps = rest.pop("step", None), rest.pop("steps", None)
        kernels = shown_kernels(rest.pop("kernels", {}))
        parts = [f"step {step}" + (f"/{steps}" if steps else "")] if step is not None else []
        for name, value in rest.items():
            shown = quantity(value) if isinstance(value, float) else str(value)
            parts.append(f"{name.replace('_', ' ')} {shown}")
        parts += [f"{name} {shown}" for name, shown in kernels.items()]
        return " · ".join(parts)

    def _print(self) -> None:
        if self._console is not None and self._pending is not None:
            self._console.print(Text(self._pending), soft_wrap=True)
        self._pending = None
