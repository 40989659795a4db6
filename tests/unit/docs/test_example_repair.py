"""The repositories of examples/repair: bugs show, in the test that is there and in hidden ones, and are mended by the
edit that is demonstrated."""

from __future__ import annotations

import random
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headway.rollout.code.hidden_tests import DRIVER, HiddenTestResults, driver_input, grade, questions_of

EXAMPLE = Path(__file__).parents[3] / "examples" / "repair"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import make_tasks

    yield make_tasks
    for name in ("make_tasks", "modules"):
        sys.modules.pop(name)


def hidden(task: dict[str, Any], folder: Path) -> HiddenTestResults:
    ((name, source),) = task["metadata"]["hidden_tests"].items()
    questions = questions_of(source, name)
    given = driver_input(questions, [str(folder)])
    done = subprocess.run([sys.executable, "-I", "-B", "-c", DRIVER], input=given, capture_output=True, timeout=60)
    return grade(questions, done.stdout, 0.0)


def visible(task: dict[str, Any], folder: Path) -> int:
    command = task["metadata"]["test_command"].replace("python3", shlex.quote(sys.executable))
    return subprocess.run(["sh", "-c", command], cwd=folder, capture_output=True, timeout=60).returncode


def test_bugs_show_and_are_mended_as_demonstrated(example, tmp_path):
    rng = random.Random(1)
    for module in example.MODULES:
        bugs = example.bugs_of(module)
        assert len(bugs) >= 3, module.name
        bug, task = next((bug, task) for bug in bugs if (task := example.make_task(bug, rng)))
        folder = tmp_path / module.name
        folder.mkdir()
        for name, text in task["metadata"]["files"].items():
            (folder / name).write_text(text)
        assert visible(task, folder) == 1
        assert not hidden(task, folder).passed
        file = folder / f"{module.name}.py"
        assert file.read_text().count(bug.wrong) == 1
        file.write_text(file.read_text().replace(bug.wrong, bug.right))
        assert visible(task, folder) == 0
        assert hidden(task, folder) == HiddenTestResults(passed=(f"test_{module.function}",), wrong=(), unanswered=())


def test_demonstrations_read_edit_test_or_guess(example):
    rng = random.Random(2)
    bugs = example.bugs_of(example.MODULES[0])
    bug, task = next((bug, task) for bug in bugs if (task := example.make_task(bug, rng)))
    kinds = set()
    for _ in range(40):
        *_, end = messages = example.demonstrate(bug, task, bugs, rng)["messages"]
        called = [call["function"] for one in messages for call in one.get("tool_calls", ())]
        for call in called:
            if call["name"] == "edit_file":
                assert bug.source.count(call["arguments"]["old"]) == 1
        kinds.add(tuple(call["name"] for call in called))
        assert end == {"role": "assistant", "content": "done"}
    assert kinds == {("read_file", "edit_file", "run_tests"), ("read_file", "edit_file")}
