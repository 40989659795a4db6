"""Does what a page for people says: writes its files, makes its changes, runs its commands, in one folder."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from docs.blocks import Block, blocks_of, commands_in

_CTRL_C = "^C"
_OUTPUT_S = 120.0  # longest until a command that is interrupted has said what the page waits for
_LABEL = re.compile(r"[A-Za-z][^\d:·]*?(?=\s{2,}|\d|:|·|$)")


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of a page, and the lines that are shown below it."""

    text: str
    shown: list[str] = field(default_factory=list)

    @property
    def waits_for(self) -> str | None:
        """What it has said when Ctrl-C comes; None: nobody interrupts it."""
        at = next((place for place, line in enumerate(self.shown) if line.startswith(_CTRL_C)), None)
        said = [label for label in map(label_of, self.shown[:at]) if label]
        return None if at is None else (said or [""])[-1]

    @property
    def code(self) -> int:
        """Its exit code, by what is shown."""
        return {"error": 2, "interrupted": 130}.get(self.shown[-1].partition(":")[0] if self.shown else "", 0)

    @property
    def labels(self) -> list[str]:
        """Beginnings of its lines, without numbers: what doesn't depend on the machine."""
        return [label for line in self.shown if (label := label_of(line.removeprefix(_CTRL_C)))]


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A command that ran."""

    command: Command
    output: str
    code: int
    seconds: float

    @property
    def missing(self) -> list[str]:
        """Labels that the page shows and the command has not printed."""
        said = " ".join(self.output.split())
        return [label for label in self.command.labels if " ".join(label.split()) not in said]


def label_of(line: str) -> str:
    """The beginning of a row or sentence up to its first number, colon or column; "" where it begins otherwise."""
    found = _LABEL.match(line)
    return found[0].strip() if found else ""


def commands_of(block: Block) -> list[Command]:
    """The commands of a console block."""
    return [Command(text=text, shown=output.splitlines()) for text, output in commands_in(block)]


def changed(text: str, change: str) -> str:
    """``text`` with a change like a diff's, without line numbers. Raises ValueError unless it fits one place."""
    lines = change.splitlines(keepends=True)
    old = "".join(line[1:] for line in lines if line[0] in " -")
    new = "".join(line[1:] for line in lines if line[0] in " +")
    if text.count(old) != 1:
        raise ValueError(f"{text.count(old)} places for the change\n{change}")
    return text.replace(old, new)


def do_page(
    page: Path,
    folder: Path,
    environment: Mapping[str, str],
    options: Callable[[Command], Sequence[str]] = lambda command: (),
) -> Iterator[Ran]:
    """Do ``page`` in ``folder``, and yield each command that ran. ``options`` are appended to it. Raises ValueError for
    a block that is neither a file, a change nor commands, and isn't marked as not to be run."""
    for block in blocks_of(page):
        mark, _, name = block.mark.partition(" ")
        if mark == "file":
            (folder / name).write_text(block.text, encoding="utf-8")
        elif mark == "change":
            file = folder / name
            file.write_text(changed(file.read_text(encoding="utf-8"), block.text), encoding="utf-8")
        elif block.run and block.language != "console":
            raise ValueError(f"{block.place}: a block that nobody does")
        for command in commands_of(block) if block.language == "console" else ():
            words = [*shlex.split(command.text), *options(command)]
            if words[0] == "cd":
                folder = folder / words[1]
            else:
                yield _run(command, words, folder, environment)


def _run(command: Command, words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Ran:
    started_s = time.monotonic()
    process = subprocess.Popen(
        words, cwd=folder, env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    output = ""
    if command.waits_for is not None:
        for line in process.stdout:
            output += line
            if command.waits_for in line or time.monotonic() - started_s > _OUTPUT_S:
                process.send_signal(signal.SIGINT)
                break
    output += process.stdout.read()
    return Ran(command=command, output=output, code=process.wait(), seconds=time.monotonic() - started_s)
