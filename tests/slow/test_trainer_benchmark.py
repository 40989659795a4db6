"""The trainer's benchmark runs, and its last line is what it promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "trainer.py"


@pytest.mark.long
def test_quick_run_of_adapters_prints_its_ratios() -> None:
    command = [sys.executable, str(BENCHMARK.with_name("lora.py")), "--quick"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    result = json.loads(printed.splitlines()[-1])
    for name in ("step_over_full", "step_over_full_cpu", "engine_over_merged"):
        least, most = result[f"{name}_range"]
        assert 0 < least <= result[name] <= most
    assert result["update_bytes_over_adapter"] <= 1.1
    assert 0 < result["memory_over_full"] < 1


@pytest.mark.long
def test_quick_run_prints_its_ratios_and_equal_gradients() -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCHMARK), "--quick"]
    printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    result = json.loads(printed.splitlines()[-1])
    assert result["mfu"].keys() == result["mfu_over_plain"].keys()
    assert result["shared_prefix_speedup"].keys() == result["shared_prefix_of_bound"].keys()
    assert "tiny float32 1" in result["mfu"]
    assert result["mfu_over_plain_min"] == min(result["mfu_over_plain"].values()) > 0
    assert result["shared_prefix_of_bound_min"] == min(result["shared_prefix_of_bound"].values()) > 0
    assert result["tree_over_apart"].keys() == result["tree_bound"].keys()
    assert result["tree_bound"]["agent float32 1"] > 1.5
    assert result["tree_speedup"] > 0
    assert result["gradient_difference_max"] < 1e-5
    assert len(result["transformers_over_headway"]) == 9
    assert min(result["transformers_over_headway"].values()) > 0
