"""The commands of .agents/skills/headway/SKILL.md, as written, with the installed command in an empty folder.

A command of that name before it on the path gives the three long ones fewer steps; nothing else is changed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SKILL = Path(__file__).parents[2] / ".agents" / "skills" / "headway" / "SKILL.md"
SHORTENED = """#!/bin/bash
short=()
case "$1" in
  sft) short=(--sft.steps=10 --sft.evaluate_every_steps=0) ;;
  check) short=(--calibrate-s=1) ;;
  train)
    short=(--queue.groups_per_step=4 --queue.filter_zero_variance=false --trainer.schedule=constant)
    [[ " $* " == *" --resume "* ]] && short+=(--run.steps=16) || short+=(--run.steps=14) ;;
esac
exec "HEADWAY" "$@" "${short[@]}"
"""
pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


def blocks() -> list[tuple[str, str]]:
    """The blocks that are run or written: (sh or python, text), in order."""
    return re.findall(r"^```(sh|python)\n(.*?)^```", SKILL.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def script(found: list[tuple[str, str]]) -> str:
    """A shell script: commands as they stand, and files named by the first line of a Python block."""
    parts = ["set -euo pipefail"]
    for kind, text in found:
        if kind == "python":
            name = re.match(r"# ([\w.]+)\n", text)
            assert name, f"a block of Python without its file's name: {text[:60]}"
            parts.append(f"cat > {name[1]} <<'END'\n{text}END")
        else:
            parts += [f"echo '$ {line}'\n{line}" for line in text.splitlines()]
    return "\n".join(parts)


@pytest.mark.long
def test_commands_of_the_skill_work(tmp_path: Path) -> None:
    programs, folder = tmp_path / "bin", tmp_path / "empty"
    programs.mkdir()
    folder.mkdir()
    installed = Path(sys.executable).with_name("headway")
    assert installed.is_file()
    (programs / "headway").write_text(SHORTENED.replace("HEADWAY", str(installed)), encoding="utf-8")
    (programs / "headway").chmod(0o755)
    path = os.pathsep.join([str(programs), str(installed.parent), os.environ["PATH"]])
    ended = subprocess.run(
        ["bash", "-c", script(blocks())],
        cwd=folder,
        env=os.environ | {"PATH": path, "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    run = folder / "demo" / "runs" / "rl"
    assert (run / "report.html").is_file()
    assert (run / "best").is_dir()
    assert "Is every rollout accounted for?  Yes: every" in ended.stdout
    assert "bound by" in ended.stdout
    assert re.findall(r"^steps +(\d+) in", ended.stdout, re.MULTILINE) == ["14", "16"]


def test_every_command_of_the_skill_is_run() -> None:
    commands = [line for kind, text in blocks() if kind == "sh" for line in text.splitlines()]
    verbs = {line.split()[1] for line in commands if line.startswith("headway ")}
    assert {"new", "init-model", "sft", "check", "train", "report", "show", "runs", "eval", "doctor"} <= verbs
    assert any("--resume" in line for line in commands)
