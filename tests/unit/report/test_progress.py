"""Progress bars: a believable time left on a terminal, nothing elsewhere."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from headway.report.progress_bars import CalibrationProgress, ProgressBar, SftProgress


def terminal() -> tuple[io.StringIO, Console]:
    out = io.StringIO()
    return out, Console(file=out, force_terminal=True, width=100, color_system=None)


def left(out: io.StringIO) -> str:
    return re.findall(r"([\d.]+ (?:min \d+ )?m?s) (?:left|so far)", out.getvalue())[-1]


def test_time_left_follows_from_the_pace_and_counts_down() -> None:
    (out, console), now = terminal(), [100.0]
    with ProgressBar("things", console=console, now=lambda: now[0]) as bar:
        bar(10, 30)  # what went before the first call isn't in the pace
        now[0] += 4.0
        bar(12, 30)
        bar._bar.refresh()
        assert left(out) == "36.0 s"
        now[0] += 6.0
        bar._bar.refresh()
        assert left(out) == "30.0 s"
        now[0] += 60.0
        bar._bar.refresh()
        assert left(out) == "0 ms"


def test_sft_takes_no_longer_than_its_limit_and_prints_its_lines_above() -> None:
    (out, console), now = terminal(), [0.0]
    with SftProgress(console=console, now=lambda: now[0], time_limit_s=50.0) as progress:
        progress({"step": 1, "steps": 1000, "loss": 0.5})
        now[0] = 10.0
        progress({"step": 2, "steps": 1000, "loss": 0.25})
        progress._bar._bar.refresh()
        assert left(out) == "40.0 s"
    assert "step 2/1000 · loss 0.25" in out.getvalue()


def test_calibration_knows_how_long_each_activity_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    out, console = terminal()
    monkeypatch.setattr("headway.report.progress_bars.Console", lambda **_: console)
    with CalibrationProgress(20.0, now=lambda: 5.0) as progress:
        progress("starts the workers")
        progress("trains beside it")
        progress._bar._bar.refresh()
        assert left(out) == "9.2 s"
    assert "0.0 s  trains beside it" in out.getvalue()


def test_no_bar_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar("things") as bar:
        bar(1, 2)
        bar(2, 2)
    out, console = terminal()
    with ProgressBar("things", silent=True, console=console) as bar:
        bar(1, 2)
    captured = capsys.readouterr()
    assert (captured.out, captured.err, out.getvalue()) == ("", "", "")
