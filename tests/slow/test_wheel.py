"""The package as strangers get it: built, checked, installed into a new environment, used in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from tiers import first

from headway.cli.projects import PROJECTS

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
MOST_BYTES = 5 * 1024 * 1024
pytestmark = pytest.mark.real


def new_shell() -> dict[str, str]:
    """Variables without this repository, its environment and the options of a make that runs the tests."""
    ours = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHON", "MAKEFLAGS")
    return {name: value for name, value in os.environ.items() if name not in ours}


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """The output of a command that must succeed, in a new shell."""
    ended = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=new_shell() | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ended.returncode == 0, f"{command}: {ended.stdout[-3000:]}"
    return ended.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of wheel and source archive, built by `python -m build` without a download."""
    pytest.importorskip("build", reason="python -m build isn't installed: pip install -e '.[dev]'")
    folder = tmp_path_factory.mktemp("dist")
    said = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    assert "Deprecat" not in said
    return folder


@pytest.fixture(scope="module")
def headway(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of a new environment with the wheel, and by a path file the other packages of this one."""
    folder = tmp_path_factory.mktemp("new")
    run(sys.executable, "-m", "venv", folder / "env", cwd=folder)
    python = folder / "env/bin/python"
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel_of(built), cwd=folder)
    [packages] = (folder / "env/lib").glob("python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join(others) + "\n", encoding="utf-8")
    where = run(python, "-c", "import headway.api; print(headway.api.__file__)", cwd=folder)
    assert Path(where.strip()).is_relative_to(folder)
    return folder / "env/bin/headway"


def wheel_of(folder: Path) -> Path:
    [wheel] = folder.glob("*.whl")
    return wheel


def test_wheel_and_archive_are_whole(built: Path) -> None:
    wheel, archive = wheel_of(built), built / f"headway-{VERSION}.tar.gz"
    assert wheel.stat().st_size <= MOST_BYTES
    inside = set(zipfile.ZipFile(wheel).namelist())
    there = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "headway").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    there |= {f"headway/templates/quickstart/{name}" for name in ("experiment.toml", "make_tasks.py")}
    assert there - inside == set()
    with tarfile.open(archive) as opened:
        packed = {name.partition("/")[2] for name in opened.getnames()}
    assert {"examples/arithmetic/experiment.toml", "Makefile", "constraints.txt", "tests/conftest.py"} <= packed
    assert there - packed == set()


def test_metadata_is_what_an_index_takes(built: Path) -> None:
    pytest.importorskip("twine", reason="twine isn't installed: pip install -e '.[dev]'")
    said = run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir(), cwd=built, NO_COLOR="1")
    assert said.count("PASSED") == 2


def test_command_without_the_repository(headway: Path, tmp_path: Path) -> None:
    assert run(headway, "--version", cwd=tmp_path) == f"headway {VERSION}\n"
    assert "[FOLDER]" in run(headway, "quickstart", "--help", cwd=tmp_path, NO_COLOR="1", COLUMNS="100")


@pytest.mark.parametrize("template", first(1, PROJECTS, pytest.mark.long))
def test_project_works_outside_the_repository(template: str, headway: Path, tmp_path: Path) -> None:
    run(headway, "new", "demo", "--template", template, cwd=tmp_path)
    project = tmp_path / "demo"
    assert "OK" in run("make", "test", cwd=project)
    run("make", "runs/init", cwd=project)
    if template != "kernel":  # which asks its service
        planned = ("train", "experiment.toml", "--dry-run", "--model.path=runs/init")
        assert "headway check experiment.toml" in run(headway, *planned, cwd=project)
    raw = ["--model.template=raw"] if template == "agent" else []  # as its Makefile says
    learned = ("sft", "experiment.toml", "--model.path=runs/init", "--sft.steps=1", "--quiet", *raw)
    assert "version" in run(headway, *learned, cwd=project)


@pytest.mark.long  # test_tutorial.py begins with it
def test_quickstart_in_short_outside_the_repository(headway: Path, tmp_path: Path) -> None:
    short = ("--sft.steps=5", "--run.steps=2", "--evaluation.test=never")
    said = run(headway, "quickstart", *short, cwd=tmp_path)
    assert "\n$ headway train runs/arithmetic-0/experiment.toml" in said
    assert "Is every rollout accounted for?  Yes: every" in said
    assert (tmp_path / "runs/arithmetic-0/rl/report.html").exists()


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_real_install_learns(built: Path, tmp_path: Path) -> None:
    """All packages from the registry, the quickstart, and the first run of every template."""
    run(sys.executable, "-m", "venv", "env", cwd=tmp_path)
    run(tmp_path / "env/bin/pip", "install", "-c", ROOT / "constraints.txt", wheel_of(built), cwd=tmp_path)
    headway = tmp_path / "env/bin/headway"
    (tmp_path / "empty").mkdir()
    assert "Is it learning? Yes" in " ".join(run(headway, "quickstart", cwd=tmp_path / "empty").split())
    for template in PROJECTS:
        run(headway, "new", f"demo_{template}", "--template", template, cwd=tmp_path)
        run("make", "test", cwd=tmp_path / f"demo_{template}")
        said = " ".join(run("make", "run", cwd=tmp_path / f"demo_{template}").split())
        if template == "kernel":  # it has no other tasks to be evaluated on
            before, after = re.findall(r"(\d\.\d+) \((?:first|last) fifth", said)
            assert float(after) > float(before) + 0.1
        else:
            assert "Is it learning? Yes" in said
