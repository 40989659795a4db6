"""The step `vllm` of benchmarks/gpu_measure.py, on a CPU: it runs, and fails when the published weights are damaged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_engines import needs_vllm

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_measure.py"
LIMIT_S = 500.0

pytestmark = [*needs_vllm, pytest.mark.long]


@pytest.mark.parametrize("fault", [pytest.param(False, id="ran"), pytest.param(True, id="fault")])
def test_the_step_of_vllm(tmp_path: Path, fault: bool) -> None:
    options = ["--device", "cpu", "--quick", "--only", "vllm", "--out", str(tmp_path / "out")]
    planted = ["--plant-fault", "vllm"] if fault else []
    command = [sys.executable, str(SCRIPT), *options, *planted]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    step, last = (json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines())
    assert (done.returncode, last["status"]) == ((1, "failed") if fault else (0, "ran")), step
    if fault:
        assert "checksum" in step["why"]
    else:
        assert step["measured"]["tiny"].keys() == {"1", "4"}
        assert step["measured"]["update_under_load"]["in_flight"] == 1
