"""`check` scores one response in a real verifier process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway.config.load import validate_experiment
from headway.orchestrator.preflight.check import check
from headway.orchestrator.preflight.demonstrations import make_attempts
from headway.records.check_report import Finding
from headway.records.task import Task

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
    found = check_of(tmp_path, monkeypatch, {"prompt": "Play."}, more, name="exact")
    assert {one.level for one in found if "has no answer to compare with" in one.message} == {level}


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
    assert finding.level == "warning"
    assert finding.message.startswith("mine:score doesn't accept the bare reference answer of the first task of tasks")
    assert "gives it what no answer gets, 0; fine if it needs more around it, else no answer earns a reward" in str(
        finding
    )
    (tmp_path / "mine.py").write_text("def score(task, response):\n    return 0.5 * float(bool(response))\n")
    (finding,) = find(tmp_path, monkeypatch, name="mine:score")
    assert finding.level == "info"


def demonstrations(folder: Path, count: int, *answers: str) -> dict[str, Any]:
    """Demonstrations of the tasks of ``check_of``, the answers in turn."""
    rows = [{"prompt": ROW["prompt"], "solution": answers[n % len(answers)]} for n in range(count)]
    (folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"sft": {"data": str(folder / "sft.jsonl")}}


@pytest.mark.parametrize(
    ("answers", "count", "level"),
    [(["2"], 64, "error"), (["2"], 8, "warning"), (["2", "answer: 2"], 64, "info"), (["2"], 6, "warning")],
)
def test_a_verifier_that_gives_every_demonstration_one_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: list[str], count: int, level: str
) -> None:
    (tmp_path / "mine.py").write_text("def score(task, response):\n    return float(response == 'answer: 2')\n")
    more = demonstrations(tmp_path, count, *answers)
    found = find(tmp_path, monkeypatch, more=more, name="mine:score")
    assert found[0].level == level
    constant = (
        f"mine:score gives {count + 1} attempts, by the answers in sft.data, the reward 0, and one without content"
    )
    assert found[0].message.startswith(constant) == (len(answers) == 1 and count >= 8)


ENVIRONMENT = """
from headway.api import Environment

class Pay(Environment):
    async def reply(self, episode, answer):
        BODY
        if episode.turns == 3:
            episode.end()
        else:
            episode.add_message("more")

    async def score(self, episode):
        return {"reward": SCORE, "solved": False}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "level", "message"),
    [
        ("pass", "info", "played 1 episode of tasks.train: reply x3, score 0"),
        (
            'episode.add({"role": "tool", "content": "error: KeyError: 1", "tool_call_id": "1", "name": "price"})',
            "warning",
            "played 1 episode of tasks.train: reply x3 (a tool replied 'error: KeyError: 1'), score 0",
        ),
        ("{}['boom']", "error", "one episode of tasks.train failed: KeyError: 'boom' (PLACE:6 in reply)"),
        ("import os; os._exit(3)", "error", "one episode of tasks.train: environment-0 died: exited with code 3"),
    ],
)
def test_an_episode_is_played_and_nothing_said_of_a_verifier_that_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, level: str, message: str
) -> None:
    module = f"coins_{level}_{len(body)}"
    (tmp_path / f"{module}.py").write_text(ENVIRONMENT.replace("BODY", body).replace("SCORE", "0.0"))
    found = check_of(
        tmp_path, monkeypatch, {"prompt": "Play."}, {"environment": {"name": f"{module}:Pay"}}, name="exact"
    )
    assert not [finding for finding in found if finding.key.startswith("verifier")]
    (finding,) = [finding for finding in found if finding.key == "environment"]
    assert finding.level == level
    assert finding.message.startswith(message.replace("PLACE", f"{module}.py"))


@pytest.mark.parametrize(
    ("name", "score", "level", "message"),
    [
        ("none", "0.0", "error", "none:Pay.score gives 64 attempts, by the answers in sft.data, the reward 0, and one"),
        ("some", "float('77' in episode.messages[''][-1]['content'])", "info", ""),
    ],
)
def test_the_answers_of_demonstrations_are_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, score: str, level: str, message: str
) -> None:
    """Where a task is its prompt, each demonstration is played at its own; one in 64 is worth something."""
    (tmp_path / f"{name}.py").write_text(ENVIRONMENT.replace("BODY", "pass").replace("SCORE", score))
    talk = [{"role": "user", "content": "Play."}, {"role": "assistant", "content": "3"}]
    rows = [
        {"messages": [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": f"{n}"}]} for n in range(78)
    ]
    text = "".join(json.dumps(row) + "\n" for row in [{"messages": talk}, *rows[15:]])
    (tmp_path / "sft.jsonl").write_text(text)
    more = {"environment": {"name": f"{name}:Pay"}, "sft": {"data": str(tmp_path / "sft.jsonl")}}
    found = check_of(tmp_path, monkeypatch, {"prompt": "Play."}, more, name="exact")
    told = [finding for finding in found if finding.key.startswith("environment")]
    played = "played 1 episode by a demonstration of sft.data: reply x3, score 0"
    assert [finding.message for finding in told if finding.key == "environment"] == [played]
    assert [(one.level, one.message.startswith(message)) for one in told if one.key == "environment.name"] == (
        [(level, True)] if message else []
    )


def test_answers_to_tasks_that_are_not_known_whole_are_no_proof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("def score(task, response):\n    return 0.0\n")
    more = demonstrations(tmp_path, 64, "2")
    (found,) = find(tmp_path, monkeypatch, row={"prompt": "1+2=", "answer": "3"}, more=more, name="mine:score")[:1]
    assert (found.level, "to tasks that may lack what it needs" in found.message) == ("warning", True)
    (tmp_path / "mine.py").write_text("def score(task, response):\n    return float(response == task.answer)\n")
    assert find(tmp_path, monkeypatch, row={"prompt": "1+2=", "answer": "3"}, more=more, name="mine:score") == []


def test_demonstrations_are_attempts_at_tasks_that_are_known(tmp_path: Path) -> None:
    """Tasks with further columns are known by their prompts alone, others can be made of a prompt."""
    experiment = validate_experiment(
        {
            "run": {"directory": "r"},
            "model": {"path": "m"},
            "tasks": {"train": {"path": "t.jsonl"}},
            **demonstrations(tmp_path, 3, "2"),
        },
        "test",
    )

    def tried(*tasks: Task) -> tuple[list[tuple[str, str]], bool]:
        attempts, sure = make_attempts(experiment, {"train": tasks}, "?")
        return [(one.task.prompt, one.answers[0]["content"]) for one in attempts], sure

    own, other = [("1+1=", "2")] * 3, Task(task_id="b", prompt="3+3=")
    assert tried(other) == ([*own, ("1+1=", "?")], True)
    assert tried(msgspec.structs.replace(other, answer="6")) == ([*own, ("3+3=", "6"), ("1+1=", "?")], False)
    assert tried(msgspec.structs.replace(other, answer="6", metadata={"n": 1})) == (
        [("3+3=", "2"), ("3+3=", "?")],
        False,
    )
    known = Task(task_id="a", prompt="1+1=", metadata={"n": 1})
    assert tried(known, other) == ([*own, ("1+1=", "?")], True)
    assert not tried(known, msgspec.structs.replace(known, task_id="c", metadata={"n": 2}))[1]  # of which?
