"""Published findings on placement and memory come out of the rate models without being told."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from headway.planner.stage_curves import ROOFLINE_ERROR

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def test_published_findings_come_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    rows = {row.name: row for row in importlib.import_module("parts.published_findings").findings()}
    for name, row in rows.items():
        if name.startswith(("32B", "trainer of run", "simulator")):
            assert row.holds, row
    # the error that plans by roofline are printed with is the worst of the published trainers'
    steps = [row for name, row in rows.items() if name.startswith("training step")]
    assert len(steps) == 2
    assert max(row.deviation for row in steps) == pytest.approx(ROOFLINE_ERROR, abs=0.05)
    reasoning = [row for name, row in rows.items() if name.startswith("long contexts")]
    # with thousands of responses a step the longest ones matter less, and taking turns wins at last
    assert [row.holds for row in reasoning] == [True] * 7 + [False]
    assert sum(row.deviation > 0.15 for row in reasoning) == 2
    assert all("56% generate" in row.computed for name, row in rows.items() if name.startswith("asynchronous"))
