"""`headway train` on samples of a part of the vocabulary: kept sets reach the trainer, through a kill and a resume."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import tiny_run

from headway.models.initialise import initialise_model

pytestmark = pytest.mark.real


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_kept_sets_are_replayed_and_the_ledger_says_what_there_would_be_without(tmp_path: Path, family: str) -> None:
    """Requests are parked and resumed around updates; of a mixture experts are recorded beside the sets."""
    prompts = [f"{a}+{b}=" for a in range(10, 30) for b in range(10)]
    rows = [json.dumps({"prompt": prompt, "answer": "1"}) for prompt in prompts]
    (tmp_path / "tasks.jsonl").write_text("\n".join(rows) + "\n")
    sizes = {"layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "intermediate": 24}
    initialise_model(tmp_path / "model", prompts, family=family, character_level=True, **sizes)
    config = tiny_run.write_experiment(
        tmp_path,
        run={"steps": 6, "seed": 7},
        rollout={"group_size": 4, "max_prompt_tokens": 16, "max_response_tokens": 12, "top_p": 0.7},
        algorithm={"allow_truncated_sampling": True},
        generator={"update_mode": "abort"},
        trainer={"learning_rate": 2e-4},
    )
    assert tiny_run.train(config, fault="batch-committed:3").process.returncode == -signal.SIGKILL
    command = tiny_run.train(config, "--resume")
    assert command.process.returncode == 0, command.output
    run = tmp_path / "run"
    tiny_run.require_whole(run, 6)
    steps = [step for step in tiny_run.steps_of(run) if step.metrics]
    assert len(steps) >= 5  # the report of one may have died with the first process
    assert steps[0].metrics["mismatch_max"] < 1e-3  # nothing stale yet
    for step in steps:
        assert 1.0 < step.metrics["kept_ids"] < 100  # of 128
        assert step.metrics["mismatch_k3_unreplayed"] > 0.03 > 3 * step.metrics["mismatch_k3"]
        assert step.metrics.get("experts_disagree_replayed", 0.0) == 0.0
