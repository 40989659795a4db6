"""`headway train` on samples of a part of the vocabulary: kept sets reach the trainer, through a kill and a resume."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import tiny_run

from headway.models.initialise import initialise_model
from headway.tokens.grammar import GRAMMAR_VERSION
from headway.trainer.service import GRAMMAR_FILE

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


@pytest.mark.slow
def test_constrained_answers_of_an_agent_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls of a rollout, one by a JSON schema and one free: of the first's tokens the grammar's sets are computed
    again, and without the key the agent is refused them."""
    (tmp_path / "json_agents.py").write_text(
        "import json, os, urllib.request\n"
        "SCHEMA = {'type': 'array', 'items': {'enum': [1, 22, 321]}}\n"
        "FORMAT = {'type': 'json_schema', 'json_schema': {'name': 'numbers', 'schema': SCHEMA}}\n"
        "def solve(task):\n"
        "    for more in ({'response_format': FORMAT}, {}):\n"
        "        body = {'model': 'headway', 'prompt': task['prompt'], 'max_tokens': 8, **more}\n"
        "        headers = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "        headers['Content-Type'] = 'application/json'\n"
        "        url = os.environ['OPENAI_BASE_URL'] + '/completions'\n"
        "        request = urllib.request.Request(url, json.dumps(body).encode(), headers)\n"
        "        try:\n"
        "            urllib.request.urlopen(request).read()\n"
        "        except urllib.error.HTTPError as error:\n"
        "            raise ValueError(error.read().decode()) from None\n"
        "    return 1.0\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    tiny_run.write_inputs(tmp_path)
    sections: dict[str, dict[str, object]] = {
        "run": {"steps": 2, "seed": 7},
        "environment": {"name": "agent", "agent": "json_agents:solve"},
        "trainer": {"learning_rate": 0.0},
        "rollout": {"group_size": 2},
        "queue": {"groups_per_step": 2, "budget": 0, "filter_zero_variance": False},
        "checkpoint": {"every_steps": 1},
    }
    config = tiny_run.write_experiment(tmp_path, algorithm={"allow_truncated_sampling": True}, **sections)
    command = tiny_run.train(config)
    assert command.process.returncode == 0, command.output
    for step in tiny_run.steps_of(tmp_path / "run"):
        assert step.metrics["mismatch_max"] < 1e-3
        assert 0.2 < step.metrics["kept_constrained_share"] < 0.8
        assert 1.0 <= step.metrics["kept_ids"] < 20.0
        assert step.metrics["mismatch_k3_unreplayed"] > 0.5
    assert (tmp_path / "run" / "checkpoints" / "step_00000002" / GRAMMAR_FILE).read_text() == GRAMMAR_VERSION
    shutil.rmtree(tmp_path / "run")
    refused = tiny_run.train(tiny_run.write_experiment(tmp_path, **sections))
    assert refused.process.returncode != 0
    assert "allow_truncated_sampling" in refused.output
