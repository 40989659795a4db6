"""examples/kernels in short: every step runs, and the scores of both models are printed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "kernels"
pytestmark = pytest.mark.long


@pytest.mark.real
@pytest.mark.timeout(600)
def test_example_runs_from_tasks_to_scores(tmp_path: Path):
    short = ("--sft-steps", "250", "--answers", "2", "--run.steps=2", "--queue.groups_per_step=2")
    command = [sys.executable, str(EXAMPLE / "run.py"), "--directory", str(tmp_path / "run"), *short]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert "after the cold start" in ended.stdout
    assert "after RL" in ended.stdout
    summary = json.loads((tmp_path / "run/rl/summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["accounting_balanced"]
    for name in ("cold-start", "reinforced"):
        assert json.loads((tmp_path / f"run/{name}.json").read_text())["row"]["candidates"] == 8
