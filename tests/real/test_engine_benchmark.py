"""benchmarks/engine.py in short: ours alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.real


def test_quick_run_prints_every_key():
    command = [sys.executable, "benchmarks/engine.py", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result.keys() == {"vs_vllm", "vs_hf_continuous_batching", "models", "peak_gflops"}
    assert result["vs_vllm"] is None
    assert "without --peer-python" in done.stdout
    small = result["models"]["small_float32"]
    assert small["tokens_per_s"].keys() == small["of_limit"].keys() == {"1", "8"}
    assert small["tokens_per_s"]["8"] > small["tokens_per_s"]["1"] > 0
    assert 0 < small["pause_keep_s"] < small["pause_recompute_s"]
    assert 0 < small["of_limit"]["8"] < 1.5  # a limit that is passed by far was measured wrongly
