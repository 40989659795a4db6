"""Environments that run commands: whose doing it is when files don't fit, time is over, or nothing can run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from boxed import Box, Boxed
from played import play, text_of

from headway.records.errors import ConfigurationError
from headway.records.sandbox import ExecResult, SandboxError
from headway.rollout.environments.python_tool import PythonTool

HIDDEN = "from m import f\n\ndef test_it():\n    assert f(1) == 1\n    assert f(2) == 4\n"
REPAIR = {"files": {"m.py": "f = 1\n" * 100, "x/n.py": ""}, "hidden_tests": {"h": HIDDEN}}
CODE = {"tests": [{"stdin": "1", "stdout": "1", "public": True}, {"stdin": "2", "stdout": "4"}]}


def sleepy(box: Box, argv: Any, options: Any) -> ExecResult | None:
    """Whatever a policy runs takes all the time that it has."""
    if "print(6 * 7)" in argv:
        return None
    return ExecResult(exit_code=None, signal=9, timed_out=True, duration_s=options["timeout_s"])


@pytest.mark.parametrize(
    ("name", "metadata", "command", "parameters"),
    [
        ("python_tool", {}, ("python", {"code": "sleep"}), {"timeout_s": 40.0, "turn_s": 100.0}),
        ("repair", REPAIR, ("run", {"command": "sleep"}), {"timeout_s": 40.0, "turn_s": 100.0}),
        ("code", CODE, ("submit", {"code": "sleep"}), {"submit": True, "feedback_turns": 9, "timeout_s": 40.0}),
    ],
)
def test_all_commands_of_one_answer_share_its_time(name: str, metadata: Any, command: Any, parameters: Any) -> None:
    if name == "code":
        parameters["total_s"] = 100.0
    boxed = Boxed(name, metadata, Box(sleepy), **parameters)
    for _ in range(2):  # the next answer has time of its own
        boxed.box.commands.clear()
        told = boxed.call(*[command] * 6)
        slept = [options["timeout_s"] for argv, options in boxed.box.commands if "print(6 * 7)" not in argv]
        assert slept == [40.0, 40.0, 20.0]
        assert all("100 s together, and these are over" in one for one in told[3:])


@pytest.mark.parametrize(
    ("name", "parameters", "timeout_s"),
    [
        ("python_tool", {"turn_s": 50.0}, 50.0),
        ("harbor", {"turn_s": 50.0}, 50.0),
        ("repair", {"turn_s": 50.0}, 40.0),
        ("repair", {"hidden_timeout_s": 50.0, "turn_s": 1.0}, 40.0),
        ("code", {"total_s": 50.0}, 50.0),
        ("code", {"total_s": 0.0}, 50.0),
    ],
)
def test_limits_that_the_workers_own_would_cut_off_are_refused(name: str, parameters: Any, timeout_s: float) -> None:
    first = next(iter(parameters))
    with pytest.raises(
        ConfigurationError, match=rf"environment.parameters.{first} = .*environment.timeout_s = {timeout_s:g}"
    ):
        Boxed(name, {}, Box(), timeout_s, **parameters)


@pytest.mark.parametrize(
    ("name", "metadata", "command"),
    [
        ("python_tool", {}, ("python", {"code": "1"})),
        ("repair", REPAIR, ("run", {"command": "true"})),
        ("code", CODE, ("submit", {"code": "1"})),
    ],
)
def test_a_sandbox_without_an_interpreter_is_nobodys_answer(name: str, metadata: Any, command: Any) -> None:
    parameters = {"submit": True, "feedback_turns": 9} if name == "code" else {}
    without = Boxed(name, metadata, Box(lambda box, argv, options: ExecResult(exit_code=127)), **parameters)
    with pytest.raises(SandboxError, match="doesn't run in the sandbox: exit code 127") as caught:
        without.call(command)
    assert (caught.value.failure.cause, caught.value.failure.reward_valid) == ("environment", False)


def test_an_interpreter_is_looked_for_once_and_only_where_nobody_could_have_harmed_it() -> None:
    boxed = Boxed("python_tool", {}, Box())
    looks = [
        sum("print(6 * 7)" in argv for argv, _ in boxed.box.commands)
        for _ in range(2)
        if boxed.call(("python", {"code": "1"}))
    ]
    boxed.new()
    boxed.call(("python", {"code": "1"}))
    assert looks == [1, 1]
    assert sum("print(6 * 7)" in argv for argv, _ in boxed.box.commands) == 1
    gone_on = Boxed("python_tool", {}, Box(lambda box, argv, options: ExecResult(exit_code=127, stderr=b"gone")))
    gone_on.episode.state = dict(boxed.episode.state)  # in another worker
    assert gone_on.call(("python", {"code": "1"})) == ["gone"]


def test_a_repository_that_does_not_fit_is_nobodys_repair() -> None:
    boxed = Boxed("repair", REPAIR, Box(room=100))
    with pytest.raises(SandboxError, match=r"the repository needs more than sandbox.limits.disk_bytes") as caught:
        boxed.call(("run", {"command": "true"}))
    assert (caught.value.failure.cause, caught.value.failure.reward_valid) == ("environment", False)
    fits = Boxed("repair", REPAIR, Box(room=650))
    told = fits.call(("write_file", {"path": "more", "content": "x" * 60}))
    assert told == ["error: more: No space left on device"], "what the policy writes is its own"


def listed(names: Sequence[str], path: str = ".") -> list[str]:
    boxed = Boxed("repair", {**REPAIR, "files": dict.fromkeys(names, "")}, Box())
    [told] = boxed.call(("list_files", {"path": path}))
    return told.splitlines()


def test_a_directory_of_many_files_does_not_hide_the_others() -> None:
    many = [f"data/{number:04}" for number in range(700)]
    lines = listed(["m.py", *many])
    assert lines == [*many[:499], "m.py", "[more files: these are 500]"]
    assert len(listed(["m.py", *many[:499]])) == 500


def test_very_many_directories_are_not_all_looked_into() -> None:
    lines = listed([f"{number}/m.py" for number in range(600)])
    assert (len(lines), lines[-1]) == (500, "[more directories: these are of 500]")


def test_a_directory_that_can_not_be_listed_is_said_so_beside_the_others() -> None:
    class Odd(Box):
        async def list(self, path: str, *, max_entries: int = 10_000) -> Any:
            return await super().list(path, max_entries=1 if path.endswith("/x") else max_entries)

    boxed = Boxed("repair", {**REPAIR, "files": {"m.py": "", "x/1": "", "x/2": ""}}, Odd())
    assert boxed.call(("list_files", {})) == ["m.py\n[x: more than 1 entries]"]
    assert boxed.call(("list_files", {"path": "x"})) == ["error: x: more than 1 entries"]


def test_a_file_keeps_its_mode() -> None:
    modes = {"run.sh": b"755\n", "own": b"4711\n", "odd": b"?\n"}

    def stat(box: Box, argv: Any, options: Any) -> ExecResult | None:
        name = argv[-1].rpartition("/")[2]
        if argv[0] != "stat":
            return None
        return ExecResult(exit_code=0, stdout=modes[name]) if name in modes else ExecResult(exit_code=1)

    boxed = Boxed("repair", {**REPAIR, "files": {"run.sh": "echo old", "own": "", "odd": ""}}, Box(stat))
    assert boxed.call(
        ("edit_file", {"path": "run.sh", "old": "old", "new": "new"}),
        ("write_file", {"path": "own", "content": "1"}),
        ("write_file", {"path": "odd", "content": "2"}),
        ("write_file", {"path": "new", "content": "3"}),
    ) == ["edited run.sh", "wrote own", "wrote odd", "wrote new"]
    found = {path.rpartition("/")[2]: mode for path, (_, mode) in boxed.box.files.items()}
    assert found == {"run.sh": 0o755, "own": 0o711, "odd": 0o644, "new": 0o644}


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (ExecResult(exit_code=0, stdout=b"42\n"), "42"),
        (ExecResult(exit_code=0), "[no output]"),
        (ExecResult(exit_code=1, stderr=b"Traceback\nNameError: x\n"), "Traceback\nNameError: x"),
        (ExecResult(exit_code=None, signal=9, timed_out=True, stdout=b"a\n"), "a\n[stopped after 5 s]"),
        (ExecResult(exit_code=None, signal=9, oom=True), "[out of memory]"),
        (ExecResult(exit_code=None, signal=11), "[signal 11]"),
        (ExecResult(exit_code=0, stdout=b"x" * 20_000), "characters left out]"),
    ],
)
def test_a_program_and_what_a_model_is_told_of_it(result: ExecResult, told: str) -> None:
    said = '<tool_call>\n{"name": "python", "arguments": {"code": "print(42)"}}\n</tool_call>'
    ran: list[Any] = []

    def answer(argv: Any) -> ExecResult:
        ran.append(argv)
        return result if len(ran) > 1 else ExecResult(exit_code=0, stdout=b"42\n")

    played = play(PythonTool(), [said, "done"], answer=answer, context_tokens=60_000)
    assert ran == [["python3", "-c", "print(6 * 7)"], ["python3", "-c", "print(42)"]]
    assert played.rollout.failure is None
    assert f"{told}\n</tool_response>" in text_of(played) or told in text_of(played)
