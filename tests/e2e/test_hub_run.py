"""Runs of models that only transformers has: trainer and generator both run its module."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import warm_programs
from safetensors.numpy import load_file
from tiny_hub import ONE_A_ROW, PACKED, write_hub_inputs

from headway.runtime.nodes.files import file_digests
from headway.trainer.checkpoints import checkpoint_path

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]
STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def _imported() -> Iterator[None]:
    model = "transformers.models.olmo2.modeling_olmo2"
    with warm_programs.importing("headway.models.hf.adapter", "headway.generator.engines.hf.engine", model):
        yield


def written(folder: Path, kind: str, sizes: Mapping[str, int] = {}, /, **sections: dict[str, Any]) -> Path:
    """An experiment on a random model of this kind with the tokenizer of the tiny runs."""
    write_hub_inputs(folder, kind, **sizes)
    given = {
        "run": {"steps": STEPS},
        "model": {"implementation": "transformers"},
        "checkpoint": {"every_steps": STEPS},
        "trainer": {"learning_rate": 1e-2},
    }
    return tiny_run.write_experiment(folder, **{**given, **sections})


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "queue"), [
    ("FalconH1", {"budget": 2}), pytest.param("Olmo2", {"budget": 0}, marks=pytest.mark.long)
])  # fmt: skip
def test_run_of_an_architecture_that_headway_does_not_have(tmp_path: Path, kind: str, queue: Any) -> None:
    config = written(tmp_path, kind, queue={"groups_per_step": 4, "filter_zero_variance": False} | queue)
    run = tmp_path / "run"
    command = tiny_run.train(config)
    assert command.process.returncode == 0, command.output
    tiny_run.require_whole(run, STEPS)
    tiny_run.require_nothing_left(command)
    steps = tiny_run.steps_of(run)
    fresh = [step for step in steps if step.tokens.staleness.max == 0]
    assert fresh
    assert all(step.metrics["mismatch_max"] < 1e-4 for step in fresh)  # trainer and engine agree, update after update
    before = load_file(tmp_path / "model" / "model.safetensors")
    after = load_file(checkpoint_path(run, STEPS) / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    assert any((before[name] != after[name]).any() for name in before)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow if kind == "Olmo2" else pytest.mark.long)
        for kind in (*PACKED, *ONE_A_ROW)
    ],
)
@pytest.mark.long
def test_rewards_rise(tmp_path: Path, kind: str) -> None:
    config = written(
        tmp_path,
        kind,
        run={"steps": 60},
        verifier={"name": "tiny_verifiers:digits"},
        rollout={"group_size": 8, "max_prompt_tokens": 16, "max_response_tokens": 12},
        trainer={"learning_rate": 1e-2, "warmup_steps": 5},
        checkpoint={"every_steps": 60},
    )
    command = tiny_run.train(config, limit_s=220)
    assert command.process.returncode == 0, command.output
    rewards = [step.rewards.mean for step in tiny_run.steps_of(tmp_path / "run") if step.rewards]
    before, after = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    print(f"{kind}: {before:.3f} -> {after:.3f}")
    assert after > before + 0.3, rewards


ADAPTER = {"rank": 4, "alpha": 8.0}


@pytest.mark.slow
def test_an_adapter_is_trained_killed_resumed_scored_and_merged(tmp_path: Path) -> None:
    config = written(
        tmp_path,
        "Olmo2",
        model={"implementation": "transformers", "adapter": ADAPTER},
        queue={"groups_per_step": 4, "budget": 1, "filter_zero_variance": False},
        generator={"update_mode": "finish"},
        algorithm={"kl_coefficient": 0.05},
        checkpoint={"every_steps": 2},
        **{"tasks.test": {"path": str(tmp_path / "test.jsonl")}},
    )
    rows = [json.dumps({"prompt": f"{60 + i}+{i}=", "answer": "1"}) for i in range(6)]
    (tmp_path / "test.jsonl").write_text("\n".join(rows) + "\n")
    run, model = tmp_path / "run", tmp_path / "model"
    before = file_digests(model)
    assert tiny_run.train(config, fault="all-publishing:2").process.returncode == -signal.SIGKILL
    command = tiny_run.train(config, "--resume")
    assert command.process.returncode == 0, command.output
    tiny_run.require_whole(run, STEPS)
    tiny_run.require_nothing_left(command)
    steps = [step for step in tiny_run.steps_of(run) if step.metrics]  # the report of one may have died in the kill
    fresh = [step for step in steps if step.tokens.staleness.max == 0]
    assert fresh
    assert all(step.metrics["mismatch_max"] < 1e-4 for step in fresh)
    assert any(step.metrics["kl_reference"] > 0 for step in steps)  # to the model without the adapter
    assert file_digests(model) == before
    adapter = checkpoint_path(run, STEPS) / "adapter"
    assert any(one.any() for name, one in load_file(adapter / "adapter_model.safetensors").items() if "lora_B" in name)
    scored = json.loads(tiny_run.output_of("eval", config, "--adapter", adapter, "--json"))
    tiny_run.output_of("merge", model, adapter, tmp_path / "merged")
    alike = json.loads(tiny_run.output_of("eval", config, "--model", tmp_path / "merged", "--json"))
    assert (alike["solve_rate"], alike["length_mean"]) == (scored["solve_rate"], scored["length_mean"])


def test_what_an_adapter_beside_transformers_can_not_is_refused(tmp_path: Path) -> None:
    keys = {"implementation": "transformers", "adapter": ADAPTER}
    config = written(tmp_path, "Olmo2", model=keys, generator={"engine": "vllm", "update_mode": "finish"})
    assert "takes no adapter of PEFT's beside a model that runs in transformers" in tiny_run.refused("train", config)
    other = ("--generator.engine=torch", '--model.adapter.targets=["quux"]')
    assert "no matrix in" in tiny_run.refused("train", config, *other)
