"""Recipes: the commands of `headway quickstart` and of the examples, which are left out, what ends them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headway.api import Recipe


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that are run, as a user would type them; none is."""
    found: list[list[str]] = []

    def note(command: list[str]) -> subprocess.CompletedProcess[str]:
        found.append(["headway", *command[3:]] if command[1] == "-m" else ["python", *command[1:]])
        if "init-model" in command:
            Path(command[4]).mkdir(parents=True)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", note)
    return found


def test_recipe_makes_tasks_model_cold_start_and_run(tmp_path: Path, commands: list[list[str]]):
    recipe = Recipe(tmp_path, 3, ["--run.steps=2"])
    model, keys = recipe.cold_start("e.toml", "make.py", splits=("train",), initial=("--layers", 4), template="T")
    recipe.train("e.toml", model, *keys)
    seed, files = "--run.seed=3", f"--model.path={tmp_path}/init --sft.data={tmp_path}/tasks/sft.jsonl"
    tasks = f"--tasks.train.path={tmp_path}/tasks/train.jsonl"
    assert [" ".join(words) for words in commands] == [
        f"python make.py {tmp_path}/tasks --seed 3",
        f"headway init-model {tmp_path}/init --texts {tmp_path}/tasks/sft.jsonl --layers 4 --seed 3",
        f"headway sft e.toml {files} --sft.output={tmp_path}/sft {tasks} {seed}",
        f"headway train e.toml --model.path={tmp_path}/sft --run.directory={tmp_path}/rl {tasks} {seed} --run.steps=2",
        f"headway report {tmp_path}/rl",
    ]
    assert (tmp_path / "init/chat_template.jinja").read_text() == "T"


def test_what_is_done_is_left_out_and_a_run_goes_on(tmp_path: Path, commands: list[list[str]]):
    for folder in ("tasks", "init", "sft", "rl"):
        (tmp_path / folder).mkdir()
    (tmp_path / "tasks/test.jsonl").touch()
    (tmp_path / "rl/config.json").touch()
    recipe = Recipe(tmp_path)
    model, keys = recipe.cold_start("e.toml", "make.py")
    recipe.train("e.toml", model, *keys)
    assert [words[:4] for words in commands] == [
        ["headway", "train", "e.toml", "--resume"],
        ["headway", "report", f"{tmp_path}/rl"],
    ]
    (tmp_path / "rl/summary.json").write_text(json.dumps({"finished": True}))
    recipe.train("e.toml", model, *keys)
    assert [words[1] for words in commands[2:]] == ["report"]


def test_a_command_that_fails_ends_the_process_with_its_exit_code(tmp_path: Path):
    with pytest.raises(SystemExit) as ended:
        Recipe(tmp_path).run("python", "-c", "raise SystemExit(3)")
    assert ended.value.code == 3


def test_arguments_are_options_flags_and_overrides(monkeypatch: pytest.MonkeyPatch):
    given = "--seed 2 --workers 3 --cold-start-only --run.steps=2 --run.seed 4"
    monkeypatch.setattr(sys, "argv", ["run.py", *given.split()])
    recipe = Recipe.from_arguments("mine", "A recipe.", workers=(8, "how many"), model_only=(False, "stop before RL"))
    assert (recipe.folder, recipe.seed) == (Path("runs/mine-2"), 2)
    assert recipe.options == {"cold_start_only": True, "workers": 3, "model_only": False}
    assert recipe.overrides == ["--run.steps=2", "--run.seed", "4"]
