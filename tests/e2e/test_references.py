"""References prove themselves before a run: what its verifiers don't solve by its own answer is left out and named."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tiny_run
from packages import needs

from headway.cli import main as cli
from headway.config.load import load_experiment
from headway.config.schema import VerifierConfig
from headway.orchestrator.preflight import references
from headway.orchestrator.preflight.references import LeftOut, prove_references
from headway.records.task import Task
from headway.rollout.verification.client import VerifierPool
from headway.rollout.verification.reference_checks import response_of
from headway.runtime.clock import RealClock
from headway.runtime.workers import LocalLauncher

needs("math_verify")

HANGS = "\\binom{1000000000}{500000000}"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "headway" / "references"


def left_out(folder: Path, answers: list[str], verifier: dict[str, Any]) -> list[LeftOut]:
    """What a run with these reference answers would leave out."""
    experiment = load_experiment(str(tiny_run.write_experiment(folder)), [])
    experiment = experiment.model_copy(update={"verifier": VerifierConfig.model_validate(verifier)})
    tasks = [Task(task_id=f"{n:x}", prompt=f"p{n}", answer=answer, source="s") for n, answer in enumerate(answers)]

    async def prove() -> list[LeftOut]:
        clock = RealClock()
        pool = VerifierPool(LocalLauncher(clock), experiment.verifier, clock)
        try:
            await pool.start()
            return await prove_references(experiment, {"train": tasks}, pool)
        finally:
            await pool.stop()

    return asyncio.run(prove())


@pytest.mark.slow
def test_the_one_that_hangs_is_ended_and_named_and_does_not_stop_the_rest(tmp_path: Path) -> None:
    verifier = {"name": "math", "timeout_s": 1.0, "parameters": {"extract": "boxed"}}
    answers = [*map(str, range(150)), HANGS, *(f"\\frac{{1}}{{{n}}}" for n in range(2, 50))]
    began_s = time.monotonic()
    [one] = left_out(tmp_path, answers, verifier)
    first_s = time.monotonic() - began_s
    assert [task.answer for task in one.tasks] == [HANGS]
    assert one.reason == "timed out after 1 s; job killed"
    began_s = time.monotonic()
    assert left_out(tmp_path, answers, verifier) == [one]
    assert time.monotonic() - began_s < first_s  # out of the cache


def test_many_alike_are_one_line_with_their_count(tmp_path: Path) -> None:
    answers = [*map(str, range(20)), "sixteen", "seventeen", "", "1/2", "5 -3"]
    found = left_out(tmp_path, answers, {"name": "numeric"})
    assert sum(len(one.tasks) for one in found) == 5
    assert len(found) == 1
    line = found[0].line([])
    assert line.startswith("5 of 25 tasks of s are left out: task 14: answer 'sixteen': its answer 'sixteen' is not a")


def test_parts_of_a_weighted_sum_prove_themselves(tmp_path: Path) -> None:
    parts = [
        {"name": "numeric", "weight": 0.5, "parameters": {"extract": "answer_tag"}},
        {"name": "verifier_functions:score", "label": "own", "weight": 0.5},
    ]
    verifier = {"name": "weighted", "parameters": {"parts": parts}}
    assert [len(one.tasks) for one in left_out(tmp_path, ["1", "2", "three"], verifier)] == [1]


def test_proofs_are_kept_by_answer_verifier_and_code(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert left_out(tmp_path, ["1", "2"], {"name": "exact"}) == []
    [kept] = cache.iterdir()
    assert len(msgspec.msgpack.decode(kept.read_bytes())) == 2
    asked: list[int] = []
    monkeypatch.setattr(
        references,
        "_prove",
        lambda tasks, pool: asked.append(len(tasks)) or asyncio.sleep(0, [("", True)] * len(tasks)),
    )
    left_out(tmp_path, ["2", "1", "3"], {"name": "exact"})
    left_out(tmp_path, ["2"], {"name": "exact", "parameters": {"extract": "boxed"}})
    monkeypatch.setattr(references.importlib.metadata, "version", lambda package: "another")
    left_out(tmp_path, ["2"], {"name": "exact"})
    assert asked == [1, 1, 1]
    kept.write_bytes(b"damaged")
    assert left_out(tmp_path, ["2"], {"name": "exact"}) == []


@pytest.mark.parametrize(
    ("settings", "answer", "response"),
    [
        ({"name": "math", "parameters": {"extract": "boxed"}}, "so it is\n#### 7", "\\boxed{7}"),
        ({"name": "math"}, "\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ({"name": "exact", "parameters": {"extract": "answer_tag"}}, "east", "<answer>east</answer>"),
        ({"name": "numeric", "parameters": {"marker": "####"}}, "3+4\n#### 7", "#### 7"),
        ({"name": "reasoning-gym"}, "a\nb", "a\nb"),
    ],
)
def test_the_form_that_is_asked_for(settings: dict[str, Any], answer: str, response: str) -> None:
    assert response_of(VerifierConfig.model_validate(settings), answer) == response


def tasks_with_a_bad_one(folder: Path) -> None:
    tiny_run.write_inputs(folder)
    lines = (folder / "tasks.jsonl").read_text().splitlines()
    lines[40] = json.dumps(
        {
            "prompt": "one more=",
            "answer": "who knows",
        }
    )
    (folder / "tasks.jsonl").write_text("\n".join(lines) + "\n")


@pytest.mark.slow
@pytest.mark.long
def test_check_names_the_row_and_a_run_leaves_it_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks_with_a_bad_one(tmp_path)
    config = tiny_run.write_experiment(tmp_path, run={"steps": 2}, verifier={"name": "numeric"})
    assert cli.main(["check", str(config), "--no-calibrate"]) == 0
    said = capsys.readouterr().err
    assert "warning: tasks.train: 1 of 200 tasks of" in said
    assert "tasks.jsonl:41" in said.replace("\n", "")
    assert "tasks.jsonl:41" in tiny_run.refused("check", config, "--no-calibrate", "--strict")
    done = tiny_run.train(config)
    assert done.process.returncode == 0, done.output
    [event] = tiny_run.events_of(tmp_path / "run", "tasks_left_out")
    assert event.data["tasks"] == 1
    assert "tasks.jsonl:41" in event.detail
    assert len(json.loads((tmp_path / "run" / "left_out.json").read_text())) == 1
    [start] = tiny_run.events_of(tmp_path / "run", "start")
    assert start.data["tasks"] == 199
    again = tiny_run.train(config, "--resume", "--run.steps=3")
    assert again.process.returncode == 0, again.output
    [resumed] = tiny_run.events_of(tmp_path / "run", "resume")
    assert resumed.data["tasks_digest"] == start.data["tasks_digest"]
    assert not tiny_run.events_of(tmp_path / "run", "tasks_changed")


def test_more_than_one_in_a_hundred_is_refused(tmp_path: Path) -> None:
    tiny_run.write_inputs(tmp_path)
    lines = (tmp_path / "tasks.jsonl").read_text().splitlines()
    (tmp_path / "tasks.jsonl").write_text(
        "\n".join([*lines, *(json.dumps({"prompt": f"{n}?", "answer": "x+"}) for n in range(3))])
    )
    config = tiny_run.write_experiment(tmp_path, verifier={"name": "numeric"})
    assert "3 of 203 tasks" in tiny_run.refused("train", config)
    assert not (tmp_path / "run" / "config.json").exists()
