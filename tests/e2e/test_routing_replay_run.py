"""`headway train` on a mixture of experts: its engine's experts reach the trainer, through a kill and a resume too."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import tiny_run

from headway.models.initialise import initialise_model

pytestmark = pytest.mark.real


@pytest.mark.slow
def test_experts_are_replayed_and_the_ledger_says_how_many_routers_would_disagree(tmp_path: Path) -> None:
    """Under a budget of 2, what is trained was routed by older weights: some routers would choose otherwise by now."""
    prompts = [f"{a}+{b}=" for a in range(10, 30) for b in range(10)]
    rows = [json.dumps({"prompt": prompt, "answer": "1"}) for prompt in prompts]
    (tmp_path / "tasks.jsonl").write_text("\n".join(rows) + "\n")
    sizes = {"layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "intermediate": 24}
    initialise_model(tmp_path / "model", prompts, family="qwen3_moe", character_level=True, **sizes)
    config = tiny_run.write_experiment(
        tmp_path, run={"steps": 6, "seed": 7}, trainer={"learning_rate": 2e-2}, generator={"update_mode": "abort"}
    )
    assert tiny_run.train(config, fault="batch-committed:3").process.returncode == -signal.SIGKILL
    command = tiny_run.train(config, "--resume")
    assert command.process.returncode == 0, command.output
    run = tmp_path / "run"
    tiny_run.require_whole(run, 6)
    steps = [step for step in tiny_run.steps_of(run) if step.metrics]
    assert len(steps) >= 5  # the report of one may have died with the first process
    assert all(step.metrics["experts_disagree_replayed"] == 0.0 for step in steps)
    assert all(0.5 < step.metrics["experts_replayed"] < 1.0 for step in steps)  # all but a prompt's in the last layer
    assert max(step.metrics["experts_disagree"] for step in steps) > 0.0
