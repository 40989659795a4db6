"""Three sources with three rules and demonstrations, killed again and again: books, scores and draws stay whole."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny_run

from headway.buffer.readers import read_history, read_member
from headway.buffer.row_encoding import BatchEntry
from headway.config.load import load_experiment
from headway.models.initialise import initialise_model
from headway.orchestrator.task_sets import load_task_sets
from headway.records.tokens import TEACHER
from headway.tasks.drawn_demonstrations import Demonstrations
from headway.tokens.tokenizer import Tokenizer

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
POINTS = (
    *("group-admitted", "group-finished", "batch-committed", "step-computed", "step-completed", "published", "applied"),
    *("log-durable", "checkpoint-written", "all-training", "all-publishing", "all-checkpoint-files"),
)
WORKERS = ("teacher-big-0", "generator-0", "trainer-0", "verifier-0")
STEPS_A_LIFE = 2


def write_inputs(folder: Path) -> Path:
    """An experiment with the sources ``reward``, ``taught`` and ``both``."""
    tiny_run.write_inputs(folder)
    rows = (folder / "tasks.jsonl").read_text().splitlines(keepends=True)
    prompts = [json.loads(row)["prompt"] for row in rows]
    sizes: dict[str, Any] = {"layers": 2, "width": 48, "heads": 2, "kv_heads": 1, "intermediate": 48}
    initialise_model(folder / "teacher", prompts, seed=5, character_level=True, **sizes)
    taught = {"reward": "", "taught": 'algorithm = { teacher = "big", policy_coefficient = 0.0 }'}
    taught["both"] = 'algorithm = { teacher = "big" }'
    sources = ""
    for number, (label, keys) in enumerate(taught.items()):
        (folder / f"{label}.jsonl").write_text("".join(rows[number::3]))
        sources += f'[[tasks.train]]\npath = "{folder}/{label}.jsonl"\nlabel = "{label}"\n{keys}\n'
    demonstrations = [{"prompt": prompt, "solution": "7"} for prompt in prompts[:30]]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in demonstrations))
    config = tiny_run.write_experiment(
        folder,
        queue={"filter_zero_variance": True},
        demonstrations={"data": str(folder / "rows.jsonl"), "per_step": 4, "coefficient": 0.5},
        **{"teachers.big": {"path": str(folder / "teacher"), "devices": ["cpu:0"], "top_k": 6}},
    )
    text = config.read_text()
    start = text.index("[tasks.train]")
    config.write_text(text[:start] + sources + text[text.index("[", start + 1) :])
    return config


def completed_steps(run: Path) -> int:
    return tiny_run.audited(run).completed_steps if (run / "buffer.db").exists() else 0


@pytest.mark.parametrize(
    ("seed", "kills"), [pytest.param(0, 5, marks=pytest.mark.slow), pytest.param(1, 20, marks=pytest.mark.long)]
)
def test_kills_lose_no_score_and_no_draw(tmp_path: Path, seed: int, kills: int) -> None:
    chance, config, run = random.Random(seed), write_inputs(tmp_path), tmp_path / "run"
    points, resume = chance.choices(POINTS, k=kills), list[str]()
    for number, point in enumerate(points):
        fault = f"{point}:{chance.randint(1, 3)}" if number % 4 else "none"
        arguments = ("train", config, "--quiet", *resume, f"--run.steps={STEPS_A_LIFE * kills}")
        with tiny_run.headway(*arguments, run=run, fault=fault) as command:
            if fault == "none":
                goal = len(tiny_run.steps_of(run)) + chance.randint(1, STEPS_A_LIFE)
                command.until(lambda goal=goal: len(tiny_run.steps_of(run)) >= goal, f"step {goal}")
                os.kill(command.pid_of(chance.choice(WORKERS)), signal.SIGKILL)
                goal += 1
                command.until(lambda goal=goal: len(tiny_run.steps_of(run)) >= goal, f"step {goal} after the kill")
                command.process.kill()
            assert command.wait() in (-signal.SIGKILL, 0), command.output
            tiny_run.wait_for_exits(command)
        tiny_run.audited(run)
        resume = ["--resume"]
    steps = completed_steps(run) + 3
    command = tiny_run.train(config, "--resume", f"--run.steps={steps}")
    assert command.process.returncode == 0, command.output
    require_streams(config, run, steps)
    tiny_run.require_nothing_left(command)


def require_streams(config: Path, run: Path, steps: int) -> None:
    report = tiny_run.audited(run)
    assert report.completed_steps == steps
    assert tiny_run.events_of(run, "accounting")[-1].data["balanced"] == 1
    assert not tiny_run.events_of(run, "alert")
    endings, buffer = Counter[tuple[str, str | None]](), run / "buffer.db"
    sources = {task.task_id: task.source for task in load_task_sets(load_experiment(str(config), []))["train"]}
    for group in read_history(buffer):
        source, members = sources[group.task_id], [read_member(buffer, group.index, n)[1] for n in range(group.size)]
        for rollout in [rollout for rollout in members if rollout is not None and rollout.valid]:
            assert (TEACHER in rollout.token_rows) == (source != "reward")
        if group.evidence is not None and group.evidence.solved in (0, group.evidence.valid):
            endings[source, group.ending] += 1
            assert group.evidence.zero_variance == (source == "reward"), "others are useful"
    assert endings["reward", "trained"] == 0, "equal rewards teach nothing"
    assert endings["taught", "filtered"] == endings["both", "filtered"] == 0
    assert endings["taught", "trained"] + endings["both", "trained"] > 0
    require_draws(config, buffer, steps)
    records = [step for step in tiny_run.steps_of(run) if step.metrics]
    for step in records:
        assert step.demonstrations == 4
        assert step.metrics["stream_imitate_tokens"] > 0
        assert step.metrics["stream_teacher_tokens"] > 0


def require_draws(config: Path, buffer: Path, steps: int) -> None:
    """The batch log names the rows that the seed draws for each step."""
    experiment = load_experiment(str(config), [])
    demonstrations = Demonstrations.read(experiment, Tokenizer.of(experiment))
    assert demonstrations is not None
    with sqlite3.connect(f"file:{buffer}?mode=ro", uri=True) as connection:
        rows = connection.execute("SELECT step, groups FROM batches WHERE outcome = 'trained'").fetchall()
    assert sorted(step for step, _ in rows) == list(range(steps))
    for step, logged in rows:
        assert BatchEntry.decode(logged).demonstrations == demonstrations.draw(step)
