"""benchmarks/paired.py: ratios above 1 are better, whatever the figure is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import paired


def test_costs_are_turned_and_rates_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    results = {paired.ROOT: {"s": 1.0, "by": {"a, b": [3.0, 5.0]}}, Path("/before"): {"s": 2.0, "by": {"a, b": 8.0}}}

    def measured(checkout: Path, pair: paired.Pair) -> dict[str, Any]:
        return results[checkout]

    monkeypatch.setattr(paired, "measured", measured)
    monkeypatch.setitem(paired.PAIRS, "router", paired.Pair(("x.py",), costs=("s",), rates=("by/a, b",)))
    found = paired.compare("router", Path("/before"), rounds=4)
    assert found["router.s"] == {"median": 2.0, "low": 2.0, "high": 2.0, "rounds": 4}
    assert found["router.by/a, b"]["median"] == 0.5


def test_a_wide_interval_is_measured_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = iter([1.0, 2.0] * 100)

    def measured(checkout: Path, pair: paired.Pair) -> dict[str, Any]:
        return {"s": next(costs) if checkout == paired.ROOT else 1.0}

    monkeypatch.setattr(paired, "measured", measured)
    monkeypatch.setitem(paired.PAIRS, "router", paired.Pair(("x.py",), costs=("s",)))
    assert paired.compare("router", Path("/before"), rounds=4)["router.s"]["rounds"] == 12
    median, low, high = paired.interval([0.9, 1.0, 1.1])
    assert low <= median <= high
