"""What policies in simulators learn: `benchmarks/embodied_learning.py`, whose finished seeds aren't trained again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "embodied_learning.py"
CONDITIONS = {
    "HalfCheetah-v5": ["eta2_as_good_as_eta0", "uncorrected_is_worse"],
    "Hopper-v5": ["eta2_as_good_as_eta0"],
    "reach": ["reached"],
}


@pytest.mark.real
@pytest.mark.long
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("part", CONDITIONS)
def test_policies_learn_with_stale_fragments_too(part: str):
    pytest.importorskip("envpool" if part == "reach" else "mujoco")
    peer = os.environ.get("HEADWAY_SB3_PYTHON", "")  # of an environment with stable-baselines3
    command = [sys.executable, str(SCRIPT), "--parts", part, *(["--peer", peer] if peer else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])[part]
    conditions = [*CONDITIONS[part], *(["eta0_as_good_as_sb3"] if peer and part != "reach" else [])]
    assert {name: report[name] for name in conditions} == dict.fromkeys(conditions, True), report
