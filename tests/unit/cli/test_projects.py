"""`headway new` and `headway quickstart`: whole projects or nothing, and errors that say what to do."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from headway.cli import main as cli
from headway.cli import projects
from headway.cli.projects import PROJECTS, TEMPLATES
from headway.cli.recipe import Recipe

ROOT = Path(__file__).parents[3]
PARTS = {"Makefile", "README.md", "experiment.toml"}
WITH_TASKS = [name for name in PROJECTS if name != "simulator"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(folder: Path) -> list[str]:
    """Everything below ``folder``, hidden files too."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_makefile_runs_an_interpreter_whose_path_has_blanks(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = here / "my $HOME runs #1" / "python"
    own.parent.mkdir()
    own.write_text(f"#!/bin/sh\nexec '{sys.executable}' \"$@\"\n")
    own.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(own))
    monkeypatch.setenv("PATH", os.pathsep.join(("/usr/bin", "/bin")))
    assert cli.main(["new", "away"]) == 0
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(["make", "test"], cwd=here / "away", env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("template", PROJECTS)
def test_project_is_the_template_under_its_name(template: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["new", "demo", "--template", template]) == 0
    assert {file.name.replace("myproject", "demo") for file in (TEMPLATES / template).iterdir() if file.is_file()} == {
        *files(here / "demo")
    }
    tasks = {"make_tasks.py"} if template in WITH_TASKS else set()
    assert PARTS | {"test_demo.py"} | tasks <= {*files(here / "demo")}
    texts = {file.name: file.read_text(encoding="utf-8") for file in (here / "demo").iterdir()}
    assert [name for name, text in texts.items() if "myproject" in text] == []
    assert texts["README.md"].startswith("# demo\n")
    assert tomllib.loads(texts["experiment.toml"])["run"]["directory"] == "runs/rl"
    assert {name: text for name, text in texts.items() if name.endswith(".py")} == {
        name.replace("myproject", "demo"): text.replace("myproject", "demo")
        for name, text in ((file.name, file.read_text()) for file in (TEMPLATES / template).glob("*.py"))
    }
    assert "cd demo" in capsys.readouterr().out


def test_every_template_is_offered() -> None:
    assert {folder.name for folder in TEMPLATES.iterdir()} == {*PROJECTS, projects.GPU, projects.QUICKSTART}


@pytest.mark.slow
@pytest.mark.parametrize("template", ["math", "agent", "tools", "gym", "simulator"])
def test_project_s_own_tests_pass(template: str, here: Path) -> None:
    assert cli.main(["new", "demo", "--template", template]) == 0
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-m", "unittest"], cwd=here / "demo", env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert "Ran 0 tests" not in ended.stderr


def test_makefile_finds_this_interpreter(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.pathsep.join(("/usr/bin", "/bin")))
    assert cli.main(["new", "away"]) == 0
    assert f"PYTHON ?= {shlex.quote(sys.executable)}\n" in (here / "away/Makefile").read_text()
    (here / "bin").mkdir()
    monkeypatch.setattr(sys, "executable", str(here / "bin/python"))  # an environment that is activated
    (here / "bin/python").write_text("")
    (here / "bin/python").chmod(0o755)
    monkeypatch.setenv("PATH", f"{here}/bin")
    monkeypatch.setenv("CXX", "c++")
    assert cli.main(["new", "activated"]) == 0
    assert "PYTHON ?= python\n" in (here / "activated/Makefile").read_text()


@pytest.mark.parametrize("template", WITH_TASKS)
def test_what_the_tasks_changed_is_made_again(template: str, here: Path) -> None:
    assert cli.main(["new", "demo", "--template", template]) == 0
    made = ["demo/tasks", "demo/runs/init", "demo/runs/sft"]
    for age, folder in enumerate(made):
        (here / folder).mkdir(parents=True)
        os.utime(here / folder, (2e9 + age, 2e9 + age))

    def steps() -> list[str]:
        planned = subprocess.run(["make", "-n", "run"], cwd=here / "demo", capture_output=True, text=True, check=True)
        return re.findall(r"make_tasks\.py tasks|init-model|headway.cli.main sft", planned.stdout)

    assert steps() == []
    os.utime(here / "demo/make_tasks.py", (3e9, 3e9))
    assert steps() == ["make_tasks.py tasks", "init-model", "headway.cli.main sft"]
    os.utime(here / "demo/tasks", (4e9, 4e9))
    assert steps() == ["init-model", "headway.cli.main sft"]


@pytest.mark.parametrize("template", WITH_TASKS)
def test_a_run_that_began_on_other_tasks_is_refused_before_the_cold_start(template: str, here: Path) -> None:
    assert cli.main(["new", "demo", "--template", template]) == 0
    (here / "demo/tasks").mkdir()
    (here / "demo/runs/rl").mkdir(parents=True)
    (here / "demo/runs/rl/config.json").write_text("{}")
    (here / "python").write_text("#!/bin/sh\necho ran $*\n")
    (here / "python").chmod(0o755)

    def run(tasks_s: float, begun_s: float) -> subprocess.CompletedProcess[str]:
        os.utime(here / "demo/tasks", (tasks_s, tasks_s))
        os.utime(here / "demo/runs/rl/config.json", (begun_s, begun_s))
        make = ["make", "run", f"PYTHON={here}/python"]
        return subprocess.run(make, cwd=here / "demo", capture_output=True, text=True)

    ended = run(4e9, 3e9)
    assert ended.returncode == 2
    assert "error: tasks/ has been written since the run in runs/rl began: make clean run" in ended.stdout
    assert "init-model" not in ended.stdout
    assert "init-model" in run(3e9, 4e9).stdout


def test_another_python_is_told_so(here: Path) -> None:
    assert cli.main(["new", "demo"]) == 0
    (here / "python").write_text("#!/bin/sh\nexit 1\n")
    (here / "python").chmod(0o755)
    ended = subprocess.run(["make", "test", f"PYTHON={here}/python"], cwd=here / "demo", capture_output=True, text=True)
    assert ended.returncode == 2
    assert f"{here}/python has no headway: activate its environment" in ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--template", "tool"], "did you mean tools? valid: math, agent, tools, kernel, gym, simulator"),
        (["demo", "--template", "quickstart"], "valid: math, agent, tools, kernel, gym, simulator"),
        (["my-demo"], "'my-demo' is no Python identifier, and the project's module is called so; try my_demo"),
        (["2048"], "try my_2048"),
        (["class"], "try my_class"),
        (["random"], "there is a module 'random' already; try my_random"),
        (["make_tasks"], "there is a module 'make_tasks' already"),
    ],
)
def test_wrong_words_are_explained(
    arguments: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["new", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert files(here) == []


@pytest.mark.parametrize("command", [["new", "demo"], ["quickstart", "demo"]])
def test_folder_that_holds_something_is_left_alone(
    command: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "demo").mkdir()
    (here / "demo/mine.txt").write_text("mine")
    assert cli.main(command) == 2
    assert "demo isn't empty: it holds mine.txt; choose a folder that doesn't exist yet" in capsys.readouterr().err
    assert files(here) == ["demo", "demo/mine.txt"]
    (here / "file").write_text("")
    assert cli.main([command[0], "file"]) == 2
    assert "file is a file" in capsys.readouterr().err


def test_empty_folder_is_filled(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "demo").mkdir()
    assert cli.main(["new", "demo"]) == 0
    assert "test_demo.py" in files(here / "demo")
    assert not [name for name in files(here) if "partial" in name]
    monkeypatch.setattr(Recipe, "run", lambda *_, **__: None)
    (here / "empty").mkdir()
    monkeypatch.chdir(here / "empty")
    assert cli.main(["quickstart", ".", "--cold-start-only"]) == 0
    assert files(here / "empty") == ["experiment.toml", "make_tasks.py"]


@pytest.mark.parametrize("command", ["new", "quickstart"])
def test_disk_that_fails_half_way_leaves_nothing(
    command: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[Path] = []
    before = Path.write_text

    def fails(self: Path, *arguments: str, **keywords: str) -> int:
        written.append(self)
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        return before(self, *arguments, **keywords)

    monkeypatch.setattr(Path, "write_text", fails)
    assert cli.main([command, "demo"]) == 2
    assert "demo can't be written (No space left on device)" in capsys.readouterr().err
    assert files(here) == []


def test_folder_without_the_right_to_write(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["new", "/proc/demo"]) == 2
    assert "/proc/demo can't be written" in capsys.readouterr().err
    assert cli.main(["quickstart", "/proc/demo"]) == 2


def test_missing_compiler(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(here))
    monkeypatch.delenv("CXX", raising=False)
    assert cli.main(["new", "demo", "--template", "kernel"]) == 2
    assert "no C++ compiler" in capsys.readouterr().err
    assert files(here) == []
    assert cli.main(["new", "demo"]) == 0
    told = capsys.readouterr().out
    assert "plain torch replaces" in told
    assert "apt install make" in told


def test_quickstart_runs_what_is_left_to_do(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(recipe: Recipe, *words: object, unless: Path | None = None) -> None:
        if unless is None or not unless.exists():
            commands.append([*map(str, words)])

    monkeypatch.setattr(Recipe, "run", run)
    assert cli.main(["quickstart", "--run.steps=3"]) == 0
    folder = Path("runs/arithmetic-0")
    assert [words[:2] for words in commands] == [
        ["python", f"{folder}/make_tasks.py"],
        ["headway", "init-model"],
        ["headway", "sft"],
        ["headway", "train"],
        ["headway", "report"],
    ]
    assert commands[3][2] == f"{folder}/experiment.toml"
    assert commands[2][-1] == commands[3][-1] == "--run.steps=3"
    assert "--run.seed=0" in commands[3]

    (folder / "tasks").mkdir()
    (folder / "tasks/test.jsonl").write_text("")
    (folder / "init").mkdir()
    (folder / "experiment.toml").write_text("# mine")
    commands.clear()
    assert cli.main(["quickstart", "--seed", "0", "--cold-start-only"]) == 0
    assert [words[1] for words in commands] == ["sft"]
    assert (folder / "experiment.toml").read_text() == "# mine"

    (folder / "sft").mkdir()
    (folder / "rl").mkdir()
    (folder / "rl/config.json").write_text("{}")
    commands.clear()
    assert cli.main(["quickstart", str(folder)]) == 0
    assert [words[1] for words in commands] == ["train", "report"]
    assert "--resume" in commands[0]

    (folder / "rl/summary.json").write_text('{"finished": true}')
    commands.clear()
    assert cli.main(["quickstart", str(folder)]) == 0
    assert [words[1] for words in commands] == ["report"]


def test_quickstart_refuses_what_it_does_not_know(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["quickstart", "--engine", "sglang"]) == 2
    assert "valid: torch, vllm" in capsys.readouterr().err
    assert cli.main(["quickstart", "--sead", "3"]) == 2
    assert cli.main(["quickstart", "here", "there"]) == 2
    assert files(here) == []


def test_failed_step_ends_the_quickstart(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "mine").mkdir()
    (here / "mine/make_tasks.py").write_text("raise SystemExit(3)")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert cli.main(["quickstart", "mine"]) == 3
    assert files(here / "mine") == ["make_tasks.py"]
