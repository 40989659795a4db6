"""``docs/cli.md``, written from the commands themselves: help, arguments, options, examples.

python -m docs.write_cli > docs/cli.md
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer

from docs.write_configuration import linked
from headway.cli.main import app

_INTRODUCTION = """\
# Commands

<!-- Written by `python -m docs.write_cli > docs/cli.md`; edit headway/cli/ instead. -->

`headway COMMAND --help` says the same. Where an experiment file is an argument, any of its keys may be given as
`--section.key=value` ([configuration.md](configuration.md)); commands with `--json` print one object for programs.

Exit codes: 0 done, 1 failed, 2 bad input or configuration, 3 a worker failed, 4 the accounting or the staleness budget
don't hold, 130 interrupted; runs that end with 3 or 130 go on with `--resume` ([map.md](map.md#exit-codes)).
"""


def reference() -> str:
    """The whole page in Markdown."""
    return "\n".join([_INTRODUCTION, *(line for path, command in commands() for line in _section(path, command))])


def commands(group: Any = None, path: tuple[str, ...] = ("headway",)) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each command that does something, with the words that call it: ``("headway", "cost", "run")``."""
    for name, command in (group or typer.main.get_command(app)).commands.items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def _section(path: tuple[str, ...], command: Any) -> Iterator[str]:
    arguments = [one for one in command.params if not one.opts[0].startswith("-")]
    options = [one for one in command.params if one.opts[0].startswith("-")]
    yield f"## `{' '.join(path)}`\n"
    yield linked(inspect.cleandoc(command.help or "")) + "\n"
    yield f"```text\n{' '.join([*path, *(f'{one.metavar}' for one in arguments), '[OPTIONS]'])}\n```\n"
    if rows := [_row(one) for one in (*arguments, *options)]:
        yield from ("| | default | |", "| --- | --- | --- |", *rows, "")
    if command.epilog:
        yield "```sh\n" + "\n".join(command.epilog.partition(": ")[2].split("; ")) + "\n```\n"


def _row(parameter: Any) -> str:
    named = parameter.opts[0].startswith("-")
    names = ", ".join([*parameter.opts, *parameter.secondary_opts]) if named else parameter.metavar
    value = f" {parameter.metavar or 'VALUE'}" if named and not parameter.is_flag else ""
    unset = (
        parameter.default in (None, "") or parameter.default is False or (parameter.multiple and not parameter.default)
    )
    default = "**required**" if parameter.required else "" if unset else f"`{parameter.default}`"
    return f"| `{names}{value}` | {default} | {linked(parameter.help or '').replace('|', chr(92) + '|')} |"


if __name__ == "__main__":
    print(reference(), end="")
