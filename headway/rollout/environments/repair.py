"""Environment for repairs of small repositories: the policy reads, edits and tests; hidden tests judge the result."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from headway.records.errors import ConfigurationError
from headway.records.sandbox import ExecResult, SandboxError
from headway.rollout.code.hidden_tests import DRIVER, HiddenTestResults, Questions, driver_input, grade, questions_of
from headway.rollout.code.repositories import files_of
from headway.rollout.environment import Environment, Episode
from headway.rollout.environments.command_limits import AnswerTime, Interpreter, ended_badly, fills
from headway.rollout.environments.python_tool import format_output
from headway.rollout.parameters import require_choice
from headway.rollout.tools import ToolError

REPOSITORY = "/work/repository"
SKIPPED = (".git", "__pycache__", ".pytest_cache")
LISTED = 500  # files
PATH_CHARACTERS = 1000
READ_BYTES = 1 << 20
MAX_OUTPUT_BYTES = 16_000  # of a command's stdout and stderr; environment.tool_result_characters cuts them further
_LEAST_S = 0.01  # limit of a hidden test file where earlier ones have used all the time
Reward = Literal["all", "share"]


class Repair(Environment):
    """Environment in which the policy repairs a repository in its sandbox with tools, until it answers without a call
    or has no turn left. Then all processes there are ended and the hidden tests run (rollout/code/hidden_tests.py).
    Their expected values never enter the sandbox, so that no planted file, patched module or daemon can make them pass.

    A task's metadata has ``files`` (a text for each path) or ``repository`` (a directory or tar on this machine);
    ``hidden_tests`` (sources by name); and optionally ``hidden_files`` (written before the hidden tests run, over
    existing files), ``test_command`` (for the tool ``run_tests``) and ``import_paths`` (default ["."]).
    """

    uses_sandbox = True

    def __init__(
        self,
        system: str = "",
        reward: Reward = "all",
        tools: Sequence[str] = ("list_files", "read_file", "write_file", "edit_file", "run", "run_tests"),
        timeout_s: float = 20.0,
        turn_s: float = 60.0,
        hidden_timeout_s: float = 60.0,
        tolerance: float = 1e-9,
        numbered: bool = False,
        interpreter: Sequence[str] = ("python3",),
        test_command: str = "python3 -m unittest",
    ) -> None:
        """``system``: the first message of every conversation. ``reward``: 1 where all hidden tests pass, or the share
        that passes. ``tools``: names of the tools. ``timeout_s``: of a command; ``turn_s``: of all commands of one
        answer; ``hidden_timeout_s``: of all hidden tests; these two less than environment.timeout_s. ``tolerance``: of
        numbers with a decimal point. ``numbered``: lines are displayed with their numbers. ``interpreter``: of the
        hidden tests, in the sandbox. ``test_command``: of tasks that have none."""
        require_choice("environment.parameters.reward", reward, Reward)
        tool_by_name = {tool.__name__: tool for tool in self._all_tools()}
        if unknown := [name for name in tools if name not in tool_by_name]:
            valid_text = ", ".join(tool_by_name)
            raise ConfigurationError(f"environment.parameters: tools: there is no {unknown[0]!r}; valid: {valid_text}")
        self.system = system
        self._reward = reward
        self._tools = [tool_by_name[name] for name in tools]
        self._timeout_s = timeout_s
        self._time = AnswerTime(turn_s)
        self.longest_s = {"turn_s": turn_s, "hidden_timeout_s": hidden_timeout_s}
        self._hidden_timeout_s = hidden_timeout_s
        self._tolerance = tolerance
        self._numbered = numbered
        self._interpreter = Interpreter([*interpreter, "-I"])
        self._test_command = test_command

    def _all_tools(self) -> Sequence[Callable[..., Any]]:
        return (self.list_files, self.read_file, self.write_file, self.edit_file, self.run, self.run_tests)

    def tools(self) -> Sequence[Callable[..., Any]]:
        return self._tools

    async def begin(self, episode: Episode) -> None:
        self._hidden_tests(episode)  # an invalid task fails before the first sample
        files_of(episode.task.metadata)
        await super().begin(episode)

    # --- tools --------------------------------------------------------------------------------------------------

    async def list_files(self, episode: Episode, path: str = ".") -> str:
        """List the files of the repository.

        path: a directory in it
        """
        await self._repository(episode)
        paths: list[str] = []
        folders = [_sandbox_path(path)]
        notes: list[str] = []
        folders_listed = 0
        while folders and len(paths) <= LISTED and folders_listed < LISTED:
            folder, folders_listed = folders.pop(0), folders_listed + 1
            try:
                file_infos = await _with_tool_errors(episode.sandbox.list(folder))
            except ToolError as error:
                if folder == _sandbox_path(path):
                    raise
                notes.append(f"[{error}]")  # this folder alone: too many entries, or no permission
                continue
            for file_info in file_infos:
                entry_path = posixpath.join(folder, file_info.name)
                if file_info.kind == "directory" and file_info.name not in SKIPPED:
                    folders.append(entry_path)
                elif file_info.kind != "directory":
                    paths.append(posixpath.relpath(entry_path, REPOSITORY))
        if folders and folders_listed == LISTED:
            notes.append(f"[more directories: these are of {LISTED}]")
        if len(paths) > LISTED:
            notes.append(f"[more files: these are {LISTED}]")
        return "\n".join([*sorted(paths[:LISTED]), *notes]) or "[no files]"

    async def read_file(
        self,
        path: str,
        episode: Episode,
        first_line: Annotated[int, Field(ge=1)] = 1,
        last_line: Annotated[int, Field(ge=1)] | None = None,
    ) -> str:
        """Read a file, or some of its lines.

        path: of the file
        first_line: the first line to read, from 1
        last_line: the last one; all that follow unless it is given
        """
        lines = (await self._read(path, episode)).splitlines()
        if first_line > max(1, len(lines)):
            raise ToolError(f"{path} has {len(lines)} lines")
        chosen_lines = lines[first_line - 1 : last_line]
        if self._numbered:
            chosen_lines = [f"{line_number}\t{line}" for line_number, line in enumerate(chosen_lines, first_line)]
        return "\n".join(chosen_lines) or "[empty]"

    async def write_file(self, path: str, content: str, episode: Episode) -> str:
        """Write a file, a new one or over what is there.

        path: of the file
        content: all of it
        """
        await self._repository(episode)
        await self._write(path, content, episode)
        return f"wrote {path}"

    async def edit_file(self, path: str, old: str, new: str, episode: Episode) -> str:
        """Replace a text that is in a file exactly once.

        path: of the file
        old: the text that is there
        new: what takes its place
        """
        content = await self._read(path, episode)
        match_count = content.count(old) if old else 0
        if match_count != 1:
            count_text = f"{match_count} times; give more of what is around it" if match_count else "nowhere"
            raise ToolError(f"the old text is in {path} {count_text}" if old else "the old text is empty")
        await self._write(path, content.replace(old, new), episode)
        return f"edited {path}"

    async def run(self, command: str, episode: Episode) -> str:
        """Run a shell command in the repository, and see what it prints.

        command: for sh
        """
        return await self._command(command, episode)

    async def run_tests(self, episode: Episode) -> str:
        """Run the tests of the repository."""
        return await self._command(episode.task.metadata.get("test_command") or self._test_command, episode)

    async def _command(self, command: str, episode: Episode) -> str:
        await self._repository(episode)
        argv, limits = ["sh", "-c", command], {"timeout_s": self._timeout_s, "max_output_bytes": MAX_OUTPUT_BYTES}
        exec_result, limit_s = await _with_tool_errors(self._time.exec(episode, argv, workdir=REPOSITORY, **limits))
        return _command_output(exec_result, limit_s)

    async def _read(self, path: str, episode: Episode) -> str:
        await self._repository(episode)
        content: bytes = await _with_tool_errors(episode.sandbox.read(_sandbox_path(path), max_bytes=READ_BYTES))
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise ToolError(f"{path} is no text") from None

    async def _write(self, path: str, content: str, episode: Episode) -> None:
        """Write a file; an existing one keeps its mode, so that an executable stays one."""
        sandbox_path = _sandbox_path(path)
        stat_result = await _with_tool_errors(episode.sandbox.exec(["stat", "-L", "-c", "%a", "--", sandbox_path]))
        mode_text = stat_result.stdout.strip() if stat_result.ok else b""
        mode = int(mode_text, 8) & 0o777 if re.fullmatch(rb"[0-7]+", mode_text) else 0o644
        await _with_tool_errors(episode.sandbox.write(sandbox_path, content, mode=mode))

    async def _repository(self, episode: Episode) -> None:
        """Write the repository's files into the sandbox at the first call; later calls do nothing."""
        if episode.state.get("there"):
            return
        await self._interpreter.need(episode)
        with fills("the repository"):
            for path, (content, mode) in files_of(episode.task.metadata).items():
                await episode.sandbox.write(posixpath.join(REPOSITORY, path), content, mode=mode)
        episode.state["there"] = True

    # --- score --------------------------------------------------------------------------------------------------

    async def score(self, episode: Episode) -> dict[str, Any]:
        questions_by_file = self._hidden_tests(episode)
        test_count = sum(len(questions.tests) for questions in questions_by_file.values())
        if not episode.state.get("there"):
            return {"reward": 0.0, "solved": False, "tests": test_count, "passed": 0, "repository": "untouched"}
        detail: dict[str, Any] = {"tests": test_count, "passed": 0, "wrong": [], "unanswered": [], "ended": []}
        try:
            await self._place_hidden_files(episode)
            left_s = self._hidden_timeout_s
            for file_name, questions in questions_by_file.items():
                exec_result = await self._run_hidden(episode, questions, max(left_s, _LEAST_S))
                left_s -= exec_result.duration_s
                ending = ended_badly(exec_result)
                test_results = HiddenTestResults(passed=(), wrong=(), unanswered=questions.tests)
                if not exec_result.truncated:
                    test_results = grade(questions, exec_result.stdout, self._tolerance)
                detail["passed"] += len(test_results.passed)
                detail["wrong"] += [f"{file_name}: {test}" for test in test_results.wrong]
                detail["unanswered"] += [f"{file_name}: {test}" for test in test_results.unanswered]
                detail["ended"] += [f"{file_name}: {ending}"] if ending else []
        except SandboxError as error:
            if not error.failure.reward_valid:
                raise
            # the policy's own failure: its files or processes use up the space, the memory or the path that tests need
            detail["ended"].append(error.failure.message)
        solved = detail["passed"] == test_count
        reward = detail["passed"] / test_count if self._reward == "share" else float(solved)
        return {"reward": reward, "solved": solved, **{key: value for key, value in detail.items() if value != []}}

    def _hidden_tests(self, episode: Episode) -> dict[str, Questions]:
        sources = episode.task.metadata.get("hidden_tests")
        if not isinstance(sources, dict) or not sources:
            raise ValueError("the task has no hidden_tests: valid: the source of each, by name")
        return {name: questions_of(source, name, self._tolerance) for name, source in sources.items()}

    async def _place_hidden_files(self, episode: Episode) -> None:
        """End all processes, and only then write the hidden files."""
        await episode.sandbox.exec(["true"], alone=True)
        content_by_path: Mapping[str, str] = episode.task.metadata.get("hidden_files") or {}
        for path, content in content_by_path.items():
            await episode.sandbox.write(posixpath.join(REPOSITORY, path), content)

    async def _run_hidden(self, episode: Episode, questions: Questions, timeout_s: float) -> ExecResult:
        """Run a hidden test file. The option -I excludes variables, user modules and the current directory; the tested
        modules are imported by the given paths."""
        import_paths = [posixpath.join(REPOSITORY, path) for path in episode.task.metadata.get("import_paths") or ["."]]
        return await episode.sandbox.exec(
            [*self._interpreter.argv, "-B", "-c", DRIVER],
            workdir=REPOSITORY,
            stdin=driver_input(questions, [posixpath.normpath(path) for path in import_paths]),
            timeout_s=timeout_s,
            alone=True,
        )


def _sandbox_path(path: str) -> str:
    """Return the sandbox path for a model's path, which may leave the repository but not the sandbox."""
    if len(path) > PATH_CHARACTERS or "\0" in path:
        raise ToolError("that is no path of a file")
    return posixpath.normpath(posixpath.join(REPOSITORY, path))


async def _with_tool_errors(work: Any) -> Any:
    """Await a sandbox call. A failure caused by the policy becomes a ToolError, and the rollout continues."""
    try:
        return await work
    except SandboxError as error:
        if not error.failure.reward_valid:
            raise
        raise ToolError(error.failure.message.removeprefix(f"{REPOSITORY}/")) from None


def _command_output(result: ExecResult, timeout_s: float) -> str:
    """Return `format_output`, for successful commands with their stderr, to which test runners write."""
    error_text = result.stderr.decode(errors="replace").strip()
    if not (result.ok and error_text):
        return format_output(result, timeout_s)
    return f"{result.stdout.decode(errors='replace')}{error_text}"
