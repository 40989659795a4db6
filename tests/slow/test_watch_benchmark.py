"""The benchmark of `headway watch` still runs, and says what its docstring promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import watch_browser

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "watch.py"
pytestmark = [pytest.mark.real, pytest.mark.timeout(580)]


@pytest.mark.long
def test_watch_in_short(tmp_path: Path) -> None:
    """No timing is asserted: `--quick` is too short to measure anything."""
    command = [sys.executable, str(BENCHMARK), "--quick", "--directory", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for name in ("recording_cost", "rss_mb", "cost_of_20_viewers", "search_s", "index_mb_per_s"):
        assert found[name] > 0, name
    assert found["search_s"] == max(found["searches"].values())
    assert len(found["searches"]) == 4
    assert found["events_per_viewer_per_s"] <= 1.2, "at most one a second"
    assert found["rollouts_opened"] >= 5
    if not watch_browser.lacking():
        assert found["open_s"] == max(found["open_now_s"], found["open_rollouts_s"]) > 0
        assert found["zoom_frames_per_s"] > 0
