"""The benchmarks run: a tiny load of each, and the keys of the JSON object in its last line."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]  # seconds alone on two cores; others may be busy on them


def last_line(script: str, *arguments: str, limit_s: float = 280.0) -> dict[str, Any]:
    """The JSON object a benchmark ends with."""
    root = str(BENCHMARKS.parent)
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    environment = os.environ | {"PYTHONPATH": root}
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_headways_side_of_the_trl_comparison() -> None:
    result = last_line("vs_trl.py", "--quick")
    [rates] = result["headway"].values()
    assert rates[0] > 0
    assert "trl" not in result


def test_gpu_benchmark_on_a_cpu(tmp_path: Path) -> None:
    written = tmp_path / "gpu.txt"
    parts = ("model", "engine", "trainer", "update", "loop")
    result = last_line(
        "gpu.py", "--device", "cpu", "--quick", "--parts", *parts, "--output", str(written), "--folder", str(tmp_path)
    )
    tiny = result["tiny"]
    assert set(tiny) == set(parts)
    assert not [part for part in parts if "failed" in tiny[part]], tiny
    assert tiny["engine"]["share_of_limit"].keys() == tiny["engine"]["tokens_per_s"].keys() == {"1", "4"}
    assert tiny["trainer"]["mfu"].keys() == {"16", "64"}
    assert min(tiny["trainer"]["mfu"].values()) > 0
    assert tiny["update"]["keep"]["pause_s_per_gb"] > 0
    assert tiny["update"]["in_flight"] == 4
    assert tiny["loop"]["budget_2"]["max_staleness"] <= 2
    assert json.loads(written.read_text().splitlines()[-1]) == result
    assert list(tmp_path.iterdir()) == [written]


def test_without_the_device_the_cause_is_reported(tmp_path: Path) -> None:
    """No device of this name: the model can't be made, no other part is tried, and the command still ends well."""
    if __import__("torch").cuda.is_available():
        pytest.skip("this machine has the device")
    tiny = last_line("gpu.py", "--quick", "--parts", "engine", "--folder", str(tmp_path))["tiny"]
    assert "no CUDA device" in tiny["model"]["failed"]
    assert "engine" not in tiny


def test_parts_that_fail_are_reported_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that raises and one that doesn't end in its time, then one that is well."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    gpu = importlib.import_module("gpu")
    monkeypatch.setitem(gpu.PARTS, "unheard of", 90)  # gpu_parts.py has none of this name
    monkeypatch.setitem(gpu.PARTS, "trainer", 0.2)
    command = ["gpu.py", "--device", "cpu", "--quick", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*command, "--parts", "unheard of", "trainer", "engine"])
    gpu.main()
    tiny = json.loads(capsys.readouterr().out.splitlines()[-1])["tiny"]
    assert list(tiny) == ["model", "unheard of", "trainer", "engine"]
    assert tiny["unheard of"]["failed"] == "KeyError: 'unheard of'"
    assert tiny["trainer"]["failed"].startswith("stopped after its")
    assert tiny["engine"]["tokens_per_s"]["1"] > 0
    assert not [part for part in ("model", "engine") if "failed" in tiny[part]]
    assert list(tmp_path.iterdir()) == []
