"""`headway train` with ranks that divide tokens and experts: whole runs that end well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_run

from headway.models.initialise import initialise_model
from headway.models.loading import load_model

pytestmark = pytest.mark.real
SIZES = {"layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "intermediate": 24}


def train(folder: Path, family: str, *arguments: str, **trainer: Any) -> tiny_run.Command:
    prompts = [f"{a}+{b}=" for a in range(10, 30) for b in range(10)]
    rows = [json.dumps({"prompt": prompt, "answer": "1"}) for prompt in prompts]
    (folder / "tasks.jsonl").write_text("\n".join(rows) + "\n")
    initialise_model(folder / "model", prompts, family=family, character_level=True, **SIZES)
    settings = {"devices": ["cpu:0", "cpu:1"], "learning_rate": 2e-2, **trainer}
    config = tiny_run.write_experiment(folder, run={"steps": 4, "seed": 7}, trainer=settings)
    return tiny_run.train(config, *arguments)


def require_trained(folder: Path, steps: int) -> list[Any]:
    tiny_run.require_whole(folder / "run", steps)
    load_model(sorted((folder / "run" / "checkpoints").glob("step_*"))[-1] / "model")
    records = [step for step in tiny_run.steps_of(folder / "run") if step.metrics]
    assert len(records) == steps
    return records


def test_a_run_with_context_parallel_ends_well(tmp_path: Path) -> None:
    command = train(tmp_path, "qwen3", context_parallel=2)
    assert command.process.returncode == 0, command.output
    first, *_ = require_trained(tmp_path, 4)  # its samples are of the weights that it trains
    assert max(abs(first.metrics[name] - 1) for name in ("ratio_p01", "ratio_p99", "ratio_max")) < 1e-3


def test_a_mixtures_run_with_expert_parallel_ends_well(tmp_path: Path) -> None:
    command = train(tmp_path, "qwen3_moe", expert_parallel=2)
    assert command.process.returncode == 0, command.output
    for step in require_trained(tmp_path, 4):
        assert step.metrics["experts_disagree_replayed"] == 0.0
        assert step.metrics["experts_replayed"] > 0.5


def test_a_model_that_ranks_cannot_divide_is_refused_before_the_start(tmp_path: Path) -> None:
    command = train(tmp_path, "qwen3", expert_parallel=2)
    assert command.process.returncode == 2
    assert "trainer.expert_parallel = 2: the model has no experts; valid: 1" in command.output
    assert not (tmp_path / "run" / "checkpoints").exists()
