"""`headway train` and `headway sft` with an adapter, as processes: killed, resumed, scored, merged, continued."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from safetensors.torch import load_file

from headway.models.initialise import initialise_model
from headway.models.loading import load_model
from headway.records.ledger import EvaluationRecord
from headway.runtime.nodes.files import file_digests
from headway.trainer.checkpoints import find_checkpoints

pytestmark = pytest.mark.real
ADAPTER = {"rank": 4, "alpha": 8.0}
EXACT: dict[str, Any] = {"queue": {"budget": 0}, "checkpoint": {"every_steps": 2}}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``model``, ``tasks.jsonl``, held-out ``validation.jsonl`` and ``test.jsonl``, ``pairs.jsonl``."""
    folder = tmp_path_factory.mktemp("inputs")
    tiny_run.write_inputs(folder)
    for name, first in (("validation", 40), ("test", 60)):
        rows = [json.dumps({"prompt": f"{first + i}+{i}=", "answer": "1"}) for i in range(6)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    pairs = [json.dumps({"prompt": f"{10 + i}+1=", "solution": str(11 + i)}) for i in range(20)]
    (folder / "pairs.jsonl").write_text("\n".join(pairs) + "\n")
    return folder


def write(folder: Path, inputs: Path, **sections: Any) -> Path:
    """An experiment in the new folder ``folder`` that trains an adapter."""
    folder.mkdir()
    given = tiny_run.inputs_in(inputs)
    given |= {f"tasks.{name}": {"path": str(inputs / f"{name}.jsonl")} for name in ("validation", "test")}
    given["model"] |= {"adapter": ADAPTER} | sections.pop("model", {})
    return tiny_run.write_experiment(folder, **(given | sections))


def weights_of(folder: Path) -> dict[str, bytes]:
    """Every matrix's bits; the order of a file's metadata is a matter of chance."""
    tensors = load_file(folder / "adapter_model.safetensors")
    return {name: one.numpy().tobytes() for name, one in tensors.items()}


@pytest.mark.slow
def test_a_killed_and_resumed_run_ends_with_the_very_same_adapter(inputs: Path, tmp_path: Path) -> None:
    """Budget 0, run.deterministic: not one bit differs, wherever it is killed; and the model stays as it was."""
    before, finals = file_digests(inputs / "model"), list[dict[str, bytes]]()
    kills = ("batch-committed:2", "all-publishing:2", "all-checkpoint-files:2")
    for name, faults in (("undisturbed", ()), ("disturbed", kills)):
        config = write(tmp_path / name, inputs, run={"steps": 7, "deterministic": True}, **EXACT)
        resume: list[str] = []
        for fault in faults:
            assert tiny_run.train(config, *resume, fault=fault).process.returncode == -signal.SIGKILL
            resume = ["--resume"]
        command = tiny_run.train(config, *resume)
        assert command.process.returncode == 0, command.output
        tiny_run.require_nothing_left(command)
        run = tmp_path / name / "run"
        tiny_run.require_whole(run, 7)
        newest = find_checkpoints(run)[-1]
        assert not (newest / "model").exists()
        finals.append(weights_of(newest / "adapter"))
        told = [step.metrics["mismatch_max"] for step in tiny_run.steps_of(run) if "mismatch_max" in step.metrics]
        assert told
        assert max(told) <= 1e-4  # the engine samples with the very adapter that is trained
    assert finals[0] == finals[1]
    assert file_digests(inputs / "model") == before


@pytest.mark.slow
def test_the_best_adapter_is_scored_merged_and_continued(inputs: Path, tmp_path: Path) -> None:
    sections: dict[str, Any] = {"evaluation": {"test": "both", "every_steps": 2}, "queue": {"budget": 1}}
    config = write(
        tmp_path / "first", inputs, run={"steps": 4, "seed": 7}, generator={"update_mode": "finish"}, **sections
    )
    command = tiny_run.train(config)
    assert command.process.returncode == 0, command.output
    run, model, merged = tmp_path / "first" / "run", inputs / "model", tmp_path / "merged"
    best = run / "best"
    scores = [line for line in tiny_run.lines_of(run) if isinstance(line, EvaluationRecord)]
    (kept,) = [score for score in scores if (score.split, score.phase) == ("test", "after")]
    adapter = ("--adapter", best, "--json")
    scored = json.loads(tiny_run.output_of("eval", config, *adapter))
    assert (scored["solve_rate"], scored["length_mean"]) == (kept.solve_rate, kept.length_mean)
    assert "merged" in tiny_run.output_of("merge", model, best, merged)
    alike = json.loads(tiny_run.output_of("eval", config, "--model", merged, "--json"))
    assert (alike["solve_rate"], alike["length_mean"]) == (scored["solve_rate"], scored["length_mean"])
    assert "is an adapter; valid: --adapter" in plain(tiny_run.refused("eval", config, "--model", best))
    continued = write(tmp_path / "second", inputs, run={"steps": 1}, model={"adapter": {"path": str(best)}})
    command = tiny_run.train(continued)
    assert command.process.returncode == 0, command.output
    assert [step.version for step in tiny_run.steps_of(tmp_path / "second" / "run")] == [1]


def plain(text: str) -> str:
    """Without the frame that wraps an error of usage."""
    return " ".join(text.replace("│", " ").split())


@pytest.mark.slow
def test_bad_input_is_refused_and_nothing_is_changed(inputs: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    initialise_model(other, ["1+2=3"], layers=1, width=32, heads=2, kv_heads=1, intermediate=48, character_level=True)
    config = write(tmp_path / "run", inputs, run={"steps": 2}, evaluation={"test": "after"})
    command = tiny_run.train(config)
    assert command.process.returncode == 0, command.output
    run, best = tmp_path / "run" / "run", tmp_path / "run" / "run" / "best"
    before = file_digests(run)
    for arguments, words in (
        (("merge", inputs / "model", best, other), "exists"),
        (("merge", other, best, tmp_path / "merged"), "of another base than"),
        (("merge", inputs / "model", inputs / "model", tmp_path / "merged"), "no adapter_config.json"),
        (("merge", tmp_path / "nowhere", best, tmp_path / "merged"), "nowhere"),
        (("train", config, "--resume", "--run.steps=3", "--model.adapter.rank=2"), "model.adapter.rank: 4 -> 2"),
        (("eval", config, "--model", other, "--adapter", best), "of another base than"),
    ):
        assert words in plain(tiny_run.refused(*arguments)), arguments
    for name, adapter, words in (
        ("rank", {"rank": 0, "alpha": 8.0}, "rank"),
        ("alpha", {"rank": 4}, "alpha is missing"),
        ("target", {**ADAPTER, "targets": ["q_prj"]}, "no layer has 'q_prj'; nearest: q_proj"),
        ("dropout", {**ADAPTER, "dropout": 0.1}, "model.adapter.dropout: 0.1: valid: 0, but for headway sft"),
        ("folder", {"path": str(tmp_path)}, "no adapter_config.json"),
    ):
        refused = write(tmp_path / name, inputs, model={"adapter": adapter})
        assert words in tiny_run.refused("train", refused)
        assert not (tmp_path / name / "run" / "buffer.db").exists()
    elsewhere = write(tmp_path / "base", inputs, model={"path": str(other), "adapter": {"path": str(best)}})
    assert "of another base than" in tiny_run.refused("train", elsewhere)
    assert file_digests(run) == before
    assert not (tmp_path / "merged").exists()


@pytest.mark.slow
def test_supervised_training_that_is_killed_begins_again_and_gives_the_same_adapter(
    inputs: Path, tmp_path: Path
) -> None:
    finals = list[dict[str, bytes]]()
    for name, kill in (("whole", False), ("killed", True)):
        output = tmp_path / name / "adapter"
        sft = {"data": str(inputs / "pairs.jsonl"), "output": str(output), "steps": 60, "batch_sequences": 4}
        config = write(tmp_path / name, inputs, model={"adapter": {**ADAPTER, "dropout": 0.2}}, sft=sft)
        if kill:
            with tiny_run.headway("sft", config, run=tmp_path / name / "run") as command:
                command.until(command.workers, "a worker")
                command.process.kill()
                command.wait()
            assert not output.exists()
        assert json.loads(tiny_run.output_of("sft", config, "--json"))["skipped"] == 0
        finals.append(weights_of(output))
    assert finals[0] == finals[1]
    tiny_run.output_of("merge", inputs / "model", tmp_path / "whole" / "adapter", tmp_path / "merged")
    import transformers

    merged, ids = load_model(tmp_path / "merged"), torch.arange(3, 9)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids[None]).logits[0], merged(ids, [6]), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(merged(ids, [6]), load_model(inputs / "model")(ids, [6]), atol=1e-2)
    transformers.AutoTokenizer.from_pretrained(tmp_path / "merged")
