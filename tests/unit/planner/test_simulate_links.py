"""Simulated runs whose versions go over a link: deltas hide where whole versions hold up the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.config.load import validate
from headway.planner.scenario import Scenario
from headway.planner.simulate import simulate

VERSION_BYTES = 97e6  # 48 M parameters in bfloat16
SLOW_LINK = 20e6 / 8  # a whole version takes 39 s


def samples_per_s(folder: Path, **link: Any) -> float:
    raw = {
        "run": {"directory": str(folder), "steps": 30},
        "rollout": {"group_size": 4, "max_response_tokens": 400},
        "queue": {"groups_per_step": 4, "budget": 4, "filter_zero_variance": False},
        "generator": {"slots": 32},
        "hardware": {"generator": {"decode_fixed_s": 0.02}, "trainer": {"step_fixed_s": 3.0, **link}},
        "workload": {"response_tokens": {"kind": "lognormal", "median": 60, "p99": 300}},
    }
    return simulate(validate(raw, "scenario", Scenario)).samples_per_s


def test_deltas_hide_a_link_that_whole_versions_do_not(tmp_path: Path):
    without = samples_per_s(tmp_path / "without")
    by_link = {"version_bytes": VERSION_BYTES, "link_bytes_per_s": SLOW_LINK}
    whole = samples_per_s(tmp_path / "whole", **by_link)
    by_deltas = samples_per_s(tmp_path / "deltas", **by_link, changed_share=0.018)
    assert by_deltas >= 0.95 * without
    assert whole < 0.5 * without, "39 s in place of steps of 3 s"
    fast = {"version_bytes": VERSION_BYTES, "link_bytes_per_s": 1e9}
    assert samples_per_s(tmp_path / "fast", **fast) == pytest.approx(without, rel=0.05)
