"""benchmarks/gpu_measure.py on a CPU: all steps that need no GPU run, and each fails with what it measures broken."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_measure.py"
ON_A_CPU = ["facts", "kernels", "step", "engine", "trainer", "publish", "loop", "nccl"]
LIMIT_S = 540.0  # half a minute alone on two cores; others may be busy on them
CPU_IMPORTS = 25.0  # a minute of a core where importing torch and transformers takes 2.4 s of it, as here when quiet

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


def measured(folder: Path, *arguments: str, size: str = "--quick") -> tuple[int, list[dict[str, Any]]]:
    """Exit code and the lines of results.jsonl; the last line printed is the last of these."""
    out = folder / "out"
    command = [sys.executable, str(SCRIPT), "--out", str(out), "--folder", str(folder), *arguments, *size.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode in (0, 1), done.stderr
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [path.name for path in folder.iterdir()] == ["out"]
    assert lines[-1].items() >= json.loads(done.stdout.splitlines()[-1]).items()
    return done.returncode, lines


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.long
def test_steps_run_on_a_cpu_within_a_minute_of_a_core(tmp_path: Path) -> None:
    started_s = cpu_s()
    subprocess.run([sys.executable, "-c", "import torch, transformers"], check=True)
    before_s = cpu_s()
    import_s = before_s - started_s  # how fast this machine is now
    code, lines = measured(tmp_path, "--device", "cpu", "--skip", "vllm", "--called-at", "1e9")
    by_step = {line["step"]: line for line in lines}
    assert code == 0, lines
    assert by_step["summary"]["ran"] == ON_A_CPU
    assert by_step["summary"]["not_run"].keys() >= {"tests", "loop: idle share of the GPU", "publish: by CUDA IPC"}
    assert by_step["facts"]["measured"]["transfer_and_start_s"] > 1e6
    assert by_step["kernels"]["measured"]["rms_norm"].keys() >= {"float32", "bfloat16", "float16", "us", "floor_us"}
    assert by_step["engine"]["measured"]["tiny"].keys() == {"1", "4"}
    assert len(by_step["trainer"]["measured"]["tiny, a quarter step by the profiler"]["top"]) == 15
    assert by_step["publish"]["measured"]["keep, s/GB"]["pause"] > 0
    exported = by_step["publish"]["measured"]["in the device's memory, s/GB"]
    assert min(exported[name] for name in ("publish", "snapshot", "hash", "fetch", "copy", "check")) > 0
    assert by_step["loop"]["measured"]["budget 2"]["max_staleness"] <= 2
    assert by_step["loop"]["measured"]["budget 0"]["max_staleness"] == 0
    assert all(line["card"] == "CPU" and line["code"].keys() >= {"models", "engine"} for line in lines)
    assert cpu_s() - before_s < CPU_IMPORTS * import_s


@pytest.mark.long
def test_a_fault_in_each_step_fails_it_and_the_last_line(tmp_path: Path) -> None:
    code, lines = measured(tmp_path, "--device", "cpu", "--only", *ON_A_CPU, "--plant-fault", *ON_A_CPU)
    assert code == 1
    assert [line["status"] for line in lines] == ["failed"] * (len(ON_A_CPU) + 1)
    reasons = lines[-1]["failed"]
    for step, text in {
        "facts": "differs from its source",
        "kernels": "rms_norm",
        "step": "log-probabilities",
        "engine": "log-probability",
        "trainer": "gradient",
        "publish": "checksum",
        "loop": "not a readable safetensors file",
        "nccl": "isn't its own",
    }.items():
        assert text in reasons[step], reasons


def test_without_a_gpu_nothing_runs_which_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")  # no driver's program
    code, lines = measured(tmp_path, "--only", "facts", "nccl")
    assert code == 1
    assert [line["status"] for line in lines] == ["not run", "not run", "failed"]
    assert lines[-1]["not_run"]["facts"] == "this machine's drivers list no GPU"


def test_what_remains_of_the_time_limits_a_step(tmp_path: Path) -> None:
    """The first is stopped, its numbers so far are kept; for the second too little remains."""
    code, lines = measured(tmp_path, "--device", "cpu", "--only", "loop", "nccl", "--limit-s", "5.5", size="")
    assert code == 1
    assert (lines[0]["status"], lines[1]["status"]) == ("failed", "not run")
    assert lines[0]["why"].startswith("stopped at its limit of 5 s") or "5 s" in lines[0]["why"]
    assert "remain" in lines[1]["why"]
