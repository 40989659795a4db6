"""Runs on pictures: trainer and engine are shown the same, also after a kill; what can't be shown is refused."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import warm_programs
from tiny_pictures import dots, make_model_that_sees, write_tasks

from headway.records.ledger import EvaluationRecord
from headway.trainer.checkpoints import checkpoint_path

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]
STEPS = 4


@pytest.fixture(scope="module", autouse=True)
def _imported() -> Iterator[None]:
    seeing = ("transformers.models.gemma3.modeling_gemma3", "transformers.models.gemma3.processing_gemma3")
    hub = ("headway.models.hf.model", "headway.models.hf.pictures", "headway.generator.engines.hf.engine")
    with warm_programs.importing(*hub, *seeing):
        yield


def written(folder: Path, kind: str = "Gemma3", tasks: int = 12, **sections: dict[str, Any]) -> Path:
    make_model_that_sees(folder / "model", kind)
    write_tasks(folder / "tasks.jsonl", tasks)
    write_tasks(folder / "held_out.jsonl", 4, first=1000)
    given: dict[str, dict[str, Any]] = {
        "run": {"steps": STEPS},
        "model": {"implementation": "transformers", "template": "chat"},
        "tasks.validation": {"path": str(folder / "held_out.jsonl")},
        "verifier": {"name": "exact"},
        "rollout": {"group_size": 4, "max_prompt_tokens": 32, "max_response_tokens": 3},
        "queue": {"groups_per_step": 2, "budget": 1, "filter_zero_variance": False},
        "checkpoint": {"every_steps": 1, "keep_last": 1},
        "trainer": {"learning_rate": 1e-2},
    }
    return tiny_run.write_experiment(folder, **{**given, **sections})


@pytest.mark.parametrize("kind", ["Gemma3", pytest.param("Qwen2_5_VL", marks=pytest.mark.long)])
def test_trainer_and_engine_are_shown_the_same(tmp_path: Path, kind: str) -> None:
    run = tmp_path / "run"
    command = tiny_run.train(written(tmp_path, kind, evaluation={"every_steps": 2, "test": "never"}))
    assert command.process.returncode == 0, command.output
    tiny_run.require_whole(run, STEPS)
    tiny_run.require_nothing_left(command)
    agreed = [event.data for event in tiny_run.events_of(run, "agreement")]
    assert [(one["version"], one["agrees"], one["replicas"]) for one in agreed] == [(0, 1, 1), (1, 1, 1)]
    steps = tiny_run.steps_of(run)
    fresh = [step for step in steps if step.tokens.staleness.max == 0]
    assert fresh
    assert all(step.metrics["mismatch_max"] < 1e-4 for step in fresh)
    assert (checkpoint_path(run, STEPS) / "model" / "preprocessor_config.json").is_file()
    stored = len(list((run / "pixels").iterdir()))
    assert 4 <= stored < 4 + 2 * STEPS  # the validation's, and of the groups' those that were needed last


def test_an_engine_that_loses_pictures_is_refused_before_the_first_rollout(tmp_path: Path) -> None:
    command = tiny_run.train(written(tmp_path), fault="lost-pictures")
    assert command.process.returncode == 2, command.output
    refused = (
        "trainer and engine disagree at version 0: the engine's prefill and the trainer disagree behind a prompt with"
    )
    assert f"error: {refused} pictures: " in command.output
    assert "Their hidden states diverge at the embedding" in command.output
    assert not tiny_run.steps_of(tmp_path / "run")


@pytest.mark.slow
def test_a_killed_run_trains_its_last_steps_again_with_their_pictures(tmp_path: Path) -> None:
    config, run = written(tmp_path, run={"steps": 6}, checkpoint={"every_steps": 3, "keep_last": 1}), tmp_path / "run"
    command = tiny_run.train(config, fault="step-computed:5")
    assert command.process.returncode == -signal.SIGKILL, command.output
    tiny_run.wait_for_exits(command)
    assert tiny_run.audited(run).completed_steps == 4
    again = tiny_run.train(config, "--resume", limit_s=200.0)
    assert again.process.returncode == 0, again.output
    tiny_run.require_whole(run, 6)
    (restored,) = tiny_run.events_of(run, "restored")
    assert restored.data["replayed"] >= 1, restored


@pytest.mark.slow
def test_pictures_that_cannot_be_decoded_fail_their_groups_alone(tmp_path: Path) -> None:
    sections = {"evaluation": {"every_steps": 2, "test": "never"}, "run": {"steps": 3}}
    config, run = written(tmp_path, tasks=4, **sections), tmp_path / "run"
    for number, name in ((1, "tasks.jsonl"), (1002, "held_out.jsonl")):  # of four each
        picture = tmp_path / "dots" / f"{number}.jpg"
        dots(2, number, 64).save(picture, "JPEG")
        picture.write_bytes(picture.read_bytes()[:-40])
        tasks = tmp_path / name
        tasks.write_text(tasks.read_text().replace(f"dots/{number}.png", f"dots/{number}.jpg"))
    command = tiny_run.train(config)
    assert command.process.returncode == 0, command.output
    tiny_run.require_whole(run, 3)
    assert tiny_run.audited(run).groups["failed"] >= 1
    judged = [line for line in tiny_run.lines_of(run) if isinstance(line, EvaluationRecord)]
    assert judged
    for record in judged:
        assert (record.samples, record.failed) == (3, 1)
        assert "1002.jpg can't be read as a picture: image file is truncated" in record.failure_cause
    said = tiny_run.output_of("show", run, "--ending", "failed", "--json")
    assert "1.jpg can't be read as a picture: image file is truncated" in said
    config.write_text(config.read_text().replace("steps = 3", "steps = 5"))
    again = tiny_run.train(config, "--resume")
    assert again.process.returncode == 0, again.output
    tiny_run.require_whole(run, 5)


def test_what_cannot_be_shown_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = written(tmp_path)
    model = tmp_path / "model"

    def refused(**sections: dict[str, Any]) -> str:
        given = {"model": {"implementation": "transformers", "template": "chat"}, "verifier": {"name": "exact"}}
        return tiny_run.refused("train", tiny_run.write_experiment(tmp_path, **{**given, **sections}))

    assert "have pictures" in refused(model={"implementation": "headway", "template": "chat"})
    assert "set model.template = 'chat'" in refused(model={"implementation": "transformers"})
    assert "python_tool doesn't support them" in refused(environment={"name": "python_tool"})
    (model / "preprocessor_config.json").rename(tmp_path / "away.json")
    (model / "processor_config.json").rename(tmp_path / "away too.json")
    assert "images without a processor" in refused()
    raw = json.loads((model / "config.json").read_text())
    del raw["vision_config"]
    (model / "config.json").write_text(json.dumps(raw))
    assert "reads text alone" in refused()
    (tmp_path / "dots" / "3.png").write_bytes(b"broken")
    assert "tasks.jsonl:4" in refused()
    (tmp_path / "dots" / "3.png").unlink()
    assert "no such picture: " in refused()
    assert config.is_file()


def test_check_says_what_pixel_arrays_take_and_eval_shows_pictures(tmp_path: Path) -> None:
    config = written(tmp_path)
    said = tiny_run.output_of("check", config, "--no-calibrate")
    assert "pixel arrays take 3,072 bytes a prompt (8 tried, of at most 13 tokens)" in " ".join(said.split()), said
    assert "validation held: solve rate" in tiny_run.output_of("eval", config, "--split", "validation")
    assert not (tmp_path / "run" / "pixels").exists()


@pytest.mark.slow
@pytest.mark.long
def test_dots_are_learned_to_be_counted(tmp_path: Path) -> None:
    config = written(
        tmp_path,
        tasks=400,
        run={"steps": 60},
        rollout={"group_size": 16, "max_prompt_tokens": 32, "max_response_tokens": 1},
        queue={"groups_per_step": 8, "budget": 1},
        checkpoint={"every_steps": 60},
        trainer={"learning_rate": 3e-3},
    )
    command = tiny_run.train(config, limit_s=230)
    assert command.process.returncode == 0, command.output
    rewards = [step.rewards.mean for step in tiny_run.steps_of(tmp_path / "run") if step.rewards]
    assert sum(rewards[-10:]) / 10 > 0.6, rewards
