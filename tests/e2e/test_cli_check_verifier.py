"""`check` scores one response in a real verifier process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway.config.load import validate_experiment
from headway.orchestrator.preflight.check import check
from headway.records.check_report import Finding

pytestmark = pytest.mark.real


ROW = {"prompt": "1+1=", "answer": "2"}


def find(
    folder: Path, monkeypatch: pytest.MonkeyPatch, row: Any = ROW, more: Any = None, **verifier: Any
) -> list[Finding]:
    return [one for one in check_of(folder, monkeypatch, row, more, **verifier) if one.key.startswith("verifier")]


def check_of(folder: Path, monkeypatch: pytest.MonkeyPatch, row: Any, more: Any, **verifier: Any) -> list[Finding]:
    monkeypatch.chdir(folder)
    (folder / "tasks.jsonl").write_text(json.dumps(row) + "\n")
    raw = {
        "run": {"directory": str(folder / "run")},
        "model": {"path": str(folder / "none")},
        "tasks": {"train": {"path": str(folder / "tasks.jsonl")}},
        "verifier": verifier,
        **(more or {}),
    }
    return check(validate_experiment(raw, "test"))


def test_a_verifier_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find(tmp_path, monkeypatch, name="exact") == []


@pytest.mark.parametrize(
    ("more", "level"), [({}, "error"), ({"environment": {"name": "gym", "parameters": {"env": "x:y"}}}, "info")]
)
def test_tasks_without_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: Any, level: str) -> None:
    [finding] = find(tmp_path, monkeypatch, row={"prompt": "Play."}, more=more, name="exact")
    assert finding.level == level
    assert "has no answer to compare with" in finding.message


def test_an_unknown_verifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = find(tmp_path, monkeypatch, name="exakt")
    assert finding.level == "error"
    assert finding.message.startswith("verifier.name = 'exakt' is unknown; did you mean 'exact'?")


def test_a_verifier_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = find(tmp_path, monkeypatch, name="nosuch:score")
    assert "No module named 'nosuch'" in finding.message


@pytest.mark.parametrize(
    ("body", "words"),
    [("raise ValueError('broken')", "broken"), ("return float('nan')", "nan"), ("\n    while True: pass", "timed out")],
)
def test_a_verifier_that_raises_returns_nan_or_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, words: str
) -> None:
    (tmp_path / "mine.py").write_text(f"def score(task, response):\n    {body}\n")
    (finding,) = find(tmp_path, monkeypatch, name="mine:score", timeout_s=0.5)
    assert finding.level == "error"
    assert words in finding.message


def test_a_verifier_that_wants_more_than_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("def score(task, response):\n    return float(response == 'answer: 2')\n")
    (finding,) = find(tmp_path, monkeypatch, name="mine:score")
    assert finding.level == "info"


ENVIRONMENT = """
from headway.api import Environment

class Pay(Environment):
    async def reply(self, episode, answer):
        BODY
        if episode.turns == 3:
            episode.end()
        else:
            episode.say("more")

    async def score(self, episode):
        return {"reward": 0.0, "solved": False}
"""


@pytest.mark.parametrize(
    ("body", "level", "message"),
    [
        ("pass", "info", "played 1 episode of tasks.train: reply x3, score 0.0"),
        ("{}['boom']", "error", "one episode of tasks.train failed: KeyError: 'boom' (PLACE:6 in reply)"),
        ("import os; os._exit(3)", "error", "one episode of tasks.train: environment-0 died: exited with code 3"),
    ],
)
def test_an_episode_is_played_and_nothing_said_of_a_verifier_that_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, level: str, message: str
) -> None:
    module = f"coins_{level}_{len(body)}"
    (tmp_path / f"{module}.py").write_text(ENVIRONMENT.replace("BODY", body))
    found = check_of(
        tmp_path, monkeypatch, {"prompt": "Play."}, {"environment": {"name": f"{module}:Pay"}}, name="exact"
    )
    assert not [finding for finding in found if finding.key.startswith("verifier")]
    (finding,) = [finding for finding in found if finding.key == "environment"]
    assert finding.level == level
    assert finding.message.startswith(message.replace("PLACE", f"{module}.py"))
