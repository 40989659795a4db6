"""benchmarks/engine.py in short: ours alone."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.real


def test_quick_run_prints_every_key():
    command = [sys.executable, "benchmarks/engine.py", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    ratios = {"vs_vllm", "vs_hf_continuous_batching", "vs_vllm_dtypes", "vs_hf_continuous_batching_dtypes"}
    assert result.keys() == {*ratios, "models", "peak_gflops"}
    assert all(result[name] is None for name in ratios)
    assert "without --peer-python" in done.stdout
    small = result["models"]["small_float32"]
    assert small["tokens_per_s"].keys() == small["of_limit"].keys() == {"1", "8"}
    assert small["tokens_per_s"]["8"] > small["tokens_per_s"]["1"] > 0
    assert 0 < small["pause_keep_s"] < small["pause_recompute_s"]
    assert 0 < small["of_limit"]["8"] < 1.5  # a limit that is passed by far was measured wrongly


@pytest.mark.long
def test_grammars_and_kept_sets_in_short():
    command = [sys.executable, "benchmarks/engine.py", "--quick", "--structured", "--rounds", "1", "--schemas", "20"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result.keys() == {
        "with_grammar", "with_kept_sets", "models", "p99_beside_grammars", "memory_mb", "peak_mb",
    }  # fmt: skip
    assert 0.2 < result["with_grammar"] < 1.5
    assert 0.2 < result["with_kept_sets"] < 1.5
    assert result["models"]["small"]["kept_ids"] > 1


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("engine")


def found(ours: float, vllm: float, ratio: float) -> dict[str, Any]:
    return {"ours_tokens_per_s": ours, "vllm_tokens_per_s": vllm, "vs_vllm": [ratio, ratio, ratio]}


def test_each_side_counts_at_the_dtype_it_is_faster_at(engine: Any) -> None:
    """bfloat16 emulated: theirs is a third of its float32, ours computes in float32 in any case."""
    result = engine.headline({"bfloat16": found(5400.0, 800.0, 6.6), "float32": found(5300.0, 2400.0, 2.2)})
    assert result["vs_vllm"] == 2.25
    assert result["vs_vllm_dtypes"] == {"ours": "bfloat16", "theirs": "float32"}
    assert result["vs_hf_continuous_batching"] is None


def test_at_one_dtype_the_paired_rounds_count(engine: Any) -> None:
    result = engine.headline({"bfloat16": found(9000.0, 3000.0, 3.05), "float32": found(5300.0, 2400.0, 2.2)})
    assert result["vs_vllm"] == 3.05
    assert result["vs_vllm_dtypes"] == {"ours": "bfloat16", "theirs": "bfloat16"}


def test_what_a_comparison_finds_is_what_the_headline_reads(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Side:
        title = "a side"

        def __init__(self, seconds: float) -> None:
            self._seconds = seconds

        def run(self, prompts: list[list[int]], new_tokens: int, seed: int) -> Any:
            return engine.Round(len(prompts) * new_tokens, self._seconds, self._seconds, -7.0)

        def close(self) -> None:
            pass

    seconds = {("vllm", "bfloat16"): 8.0, ("vllm", "float32"): 2.0, ("hf", "bfloat16"): 4.0, ("hf", "float32"): 16.0}
    monkeypatch.setattr(engine, "Peer", lambda python, name, folder, dtype, *rest: Side(seconds[name, dtype]))
    arguments = argparse.Namespace(peers="vllm,hf", peer_python="python", core=0, compared=2, rounds=2)
    ours = {"bfloat16": Side(1.0), "float32": Side(1.25)}
    by_dtype = {dtype: engine.compare(side, dtype, arguments, Path("x/y"), 8) for dtype, side in ours.items()}
    result = engine.headline(by_dtype)
    assert (result["vs_vllm"], result["vs_hf_continuous_batching"]) == (2.0, 4.0)
    assert result["vs_vllm_dtypes"] == {"ours": "bfloat16", "theirs": "float32"}
    assert result["vs_hf_continuous_batching_dtypes"] == {"ours": "bfloat16", "theirs": "bfloat16"}
    assert by_dtype["float32"]["vs_vllm"] == [1.6, 1.6, 1.6]
