"""The benchmarks still run, and say what their docstrings promise."""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from worker_processes import running, spec

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of benchmarks/."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_pipeline_in_short(tmp_path: Path, benchmark_module: Any) -> None:
    """No timing is asserted: `--quick` is too short to measure anything."""
    command = [sys.executable, str(BENCHMARKS / "pipeline.py"), "--quick", "--keep", str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=360)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    spreads = ["async_over_sync", "balance", "together_ceiling", "orchestrator_cpu_ms_per_sample"]
    if "efficiency" in result:  # claimed only when both sides are about equally fast
        spreads.append("efficiency")
    for name in spreads:
        assert 0 < result[f"{name}_min"] <= result[name] <= result[f"{name}_max"], name
    assert result["rounds"] == 1
    assert 0 <= result["max_trajectory_staleness"] <= 2
    assert result["length_p99_over_median"] > 1
    assert result["foreign_cores_max"] >= 0
    role_of = benchmark_module("pipeline_machine").role_of
    measured = [{role_of(log) for log in run.glob("logs/*")} for run in (tmp_path / "runs").glob("run-*")]
    for roles in ({"generator"}, {"trainer"}, {"generator", "trainer"}, {"generator", "trainer", "verifier"}):
        assert roles in measured  # production, consumption, together, a system: whose CPU it was is known


def test_cpu_is_booked_by_what_a_worker_is_wherever_it_computes(tmp_path: Path, benchmark_module: Any) -> None:
    machine = benchmark_module("pipeline_machine")

    def named(name: str) -> Any:
        return running(spec(name=name, device="cpu:0-1", log_path=tmp_path / "logs" / f"{name}.log"))

    async def main() -> None:
        before = machine.snapshot()
        unknown = running(spec(name="generator-1", device="cpu:0-1"))  # no log, no name to be known by
        async with named("generator-0"), named("trainer-0"), unknown:
            usage = machine.between(before, machine.snapshot())
            assert usage.roles_s.keys() == {"orchestrator", "generator", "trainer", machine.OTHER}
            assert min(usage.roles_s[role] for role in ("generator", "trainer")) > 0

    asyncio.run(main())


def test_a_placement_names_the_cores_of_both_sides(benchmark_module: Any) -> None:
    placement = benchmark_module("pipeline_load").Placement
    assert str(placement(("cpu:0",), ("cpu:1",), 32)) == "1 x 32 slots on 0|1"
    assert str(placement(("cpu:0", "cpu:1"), ("cpu:0", "cpu:1"), 16)) == "2 x 16 slots on 0,1|0,1"
    assert str(placement(("cpu:0-1",), ("cpu:0-1",), 64)) == "1 x 64 slots on 0-1|0-1"


def test_the_cpu_accounts_need_nothing_of_headway() -> None:
    """TRL's interpreter imports them."""
    code = "import sys; sys.modules['headway'] = None; import pipeline_machine; print(pipeline_machine.snapshot())"
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "orchestrator" in done.stdout
