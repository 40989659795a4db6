"""A sandbox's command: its defaults, what it refuses, and that a rollout's environment gives all of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headway.records.environment import Operation
from headway.records.errors import ConfigurationError
from headway.records.sandbox import OUTPUT_BYTES, Command, ExecResult
from headway.rollout import episode_sandbox


def test_a_command_has_the_documented_defaults() -> None:
    command = Command(argv=["true"])
    assert (command.environment, command.workdir, command.stdin) == ({}, None, None)
    assert (command.timeout_s, command.max_output_bytes, command.exclusive) == (60.0, OUTPUT_BYTES, False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"argv": []}, r"command argv = \[\]: needs a program"),
        ({"argv": ["true"], "max_output_bytes": -1}, "command max_output_bytes = -1: at least 0"),
    ],
)
def test_a_command_that_cannot_run_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Command(**fields)


@pytest.mark.parametrize("given", [True, False])
def test_an_operation_that_was_recorded_is_the_command_it_was(given: bool) -> None:
    commands: list[Command] = []

    class Box:
        async def exec(self, command: Command) -> ExecResult:
            commands.append(command)
            return ExecResult(exit_code=0)

    recorded: dict[str, Any] = {
        "argv": ["sh", "-c", "cat"],
        "environment": {"A": "b"} if given else None,
        "workdir": "/tmp" if given else None,
        "stdin": b"x" if given else None,
        "timeout_s": 3.0,
        "max_output_bytes": 7,
        "alone": given,
    }
    box: Any = Box()
    asyncio.run(episode_sandbox._execute(box, Operation(kind="exec", arguments=recorded)))
    rest: dict[str, Any] = {"environment": {"A": "b"}, "workdir": "/tmp", "stdin": b"x"} if given else {}
    assert commands == [Command(argv=["sh", "-c", "cat"], timeout_s=3.0, max_output_bytes=7, exclusive=given, **rest)]
