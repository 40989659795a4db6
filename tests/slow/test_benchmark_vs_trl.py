"""benchmarks/vs_trl.py in short: Headway's side alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]  # seconds alone on two cores; others may be busy on them


def test_headways_side_of_the_trl_comparison() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "vs_trl.py"), "--quick"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    [rates] = result["headway"].values()
    assert rates[0] > 0
    assert "trl" not in result
