"""Every fenced block of README.md and the pages is what it says: a language, valid keys, code that runs, commands that
exist; or a comment above it says why not (docs/blocks.py)."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from docs.blocks import PAGES, ROOT, Block, blocks_of, commands_in
from headway.cli.experiment_options import given_overrides
from headway.cli.main import app
from headway.config.load import apply_overrides, validate
from headway.config.schema import Experiment
from headway.config.simulation import SimulatorExperiment
from headway.planner.catalogue.read import Catalogue
from headway.planner.scenario import Scenario
from headway.records.errors import ConfigurationError

LANGUAGES = {"text", "toml", "python", "sh", "bash", "console", "json", "diff"}
SHELLS = ("sh", "bash", "console", "text")
REQUIRED = {
    "run": {"directory": "runs/x"},
    "model": {"path": "models/x"},
    "tasks": {"train": {"path": "tasks.jsonl"}},
}
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
SHELL_END = re.compile(r"[;&|<>()]+")


def named(*languages: str) -> list[Any]:
    return [pytest.param(block, id=block.place) for block in BLOCKS if block.language in languages]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_has_a_language(page: Path) -> None:
    fences = re.findall(r"^ *```", page.read_text(encoding="utf-8"), re.MULTILINE)
    blocks = list(blocks_of(page))
    assert len(fences) == 2 * len(blocks), "a fence is indented, or open"
    assert [block.place for block in blocks if block.language not in LANGUAGES] == []


def test_every_comment_above_a_block_is_known() -> None:
    known = re.compile(r"not run: \w.+|regenerated(?:; first: .+)?|figure [\w-]+|(?:file|change) [\w./-]+")
    assert {block.place: block.mark for block in BLOCKS if block.mark and not known.fullmatch(block.mark)} == {}


def require_valid(raw: dict[str, Any], origin: str, *, scenario: bool) -> None:
    """Validate keys of an experiment, or a scenario, with what every such file must have."""
    schema = Scenario if scenario else SimulatorExperiment if "simulator" in raw else Experiment
    ours = REQUIRED if schema is Experiment else {"run": REQUIRED["run"]}
    whole = {**ours, **{key: {**ours.get(key, {}), **value} for key, value in raw.items()}}
    validate(whole, origin, schema)


@pytest.mark.parametrize("block", named("toml"))
def test_toml_is_part_of_a_configuration(block: Block, tmp_path: Path) -> None:
    raw = tomllib.loads(block.text)
    if not block.run:
        return
    if "rented" in raw or "owned" in raw:
        (tmp_path / "mine.toml").write_text(block.text)
        Catalogue.read([tmp_path / "mine.toml"])
        return
    require_valid(raw, block.place, scenario="hardware" in raw)


def compiled(block: Block) -> Any:
    code = "\n" * block.line + block.text
    return compile(code, block.page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)


@pytest.mark.parametrize("block", named("python"))
def test_python_compiles(block: Block) -> None:
    compiled(block)


@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS if block.language == "python"}), ids=str)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page's blocks in their order, in one module."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks_of(page, "python"):
        if block.run:
            exec(compiled(block), names)


def invocations(command: str, program: str) -> list[list[str]]:
    """The arguments of each call of ``program`` in a line of a shell, up to where the shell's own syntax begins."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = "#"
    words = list(lexer)
    calls = [words[at + 1 :] for at, word in enumerate(words) if Path(word).name == program]
    ends = [next((n for n, word in enumerate(call) if SHELL_END.fullmatch(word)), len(call)) for call in calls]
    return [call[:end] for call, end in zip(calls, ends, strict=True)]


def parsed(words: list[str]) -> None:
    """Parse a call of headway as the command does, without running it; keys of the experiment must exist."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands") and words and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    if words and words[0] in ("-h", "--help", "--version"):
        return
    assert not hasattr(command, "commands"), f"no such command: {' '.join(words)}"
    context = command.make_context(command.name, [word for word in words if word != "..."])
    if context.args:
        scenario = command.name == "simulate"
        raw = apply_overrides({}, given_overrides(context), Scenario if scenario else Experiment)
        try:
            require_valid(raw, "the page", scenario=scenario)
        except ConfigurationError as error:  # what else it says is of keys that the page's file has, and this hasn't
            if re.search("unknown key|Input should", str(error)):
                raise


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    wrong = []
    for block in blocks_of(page, *SHELLS):
        for command, output in commands_in(block):
            if re.match(r"(?:usage|error)\b", output, re.IGNORECASE):
                continue  # refused, and told so
            for words in invocations(command, "headway"):
                try:
                    parsed(words)
                except Exception as error:
                    wrong.append(f"{block.place}: {command}: {error}")
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_programs_and_targets_of_commands_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    missing = []
    for block in blocks_of(page, *SHELLS):
        for command, _ in commands_in(block):
            for words in invocations(command, "python"):
                module = words[1].replace(".", "/") if words[:1] == ["-m"] else ""
                file = f"{module}.py" if module else next((word for word in words if word.endswith(".py")), "")
                if module.startswith(("headway/", "docs/")) or file.startswith(("examples/", "benchmarks/")):
                    missing += [f"{block.place}: {file}"] if not (ROOT / file).is_file() else []
            for words in invocations(command, "make"):
                goals = [word for word in words if "=" not in word and not word.startswith("-")]
                missing += [f"{block.place}: make {goal}" for goal in goals if f"\n{goal}:" not in makefile]
    assert missing == []
