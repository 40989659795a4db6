"""Small repositories with something wrong: the policy reads, edits and tests, and hidden tests judge what it leaves."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from headway.records.errors import ConfigurationError
from headway.records.sandbox import ExecResult, SandboxError
from headway.rollout.code.hidden_tests import DRIVER, HiddenTestResults, Questions, asked, judged, questions_of
from headway.rollout.code.repositories import files_of
from headway.rollout.environment import Environment, Episode
from headway.rollout.environments.commands import AnswerTime, Interpreter, ended_badly, fills
from headway.rollout.environments.python_tool import shown
from headway.rollout.parameters import require_choice
from headway.rollout.tools import ToolError

REPOSITORY = "/work/repository"
SKIPPED = (".git", "__pycache__", ".pytest_cache")
LISTED = 500  # files
PATH_CHARACTERS = 1000
READ_BYTES = 1 << 20
SHOWN_BYTES = 16_000  # of a command's outputs; the environment's own limit cuts them further
_LEAST_S = 0.01  # that a hidden test file has where others have taken all the time
Reward = Literal["all", "share"]


class Repair(Environment):
    """The repository of a task lies in the rollout's sandbox; the policy works on it with tools until it answers
    without a call, or has no turn left. Then all that still runs there is ended, and the hidden tests are asked
    (rollout/code/hidden_tests.py): what they expect never enters the sandbox, so nothing that was left there, no
    planted file, no patched module, no daemon, can say that they have passed.

    A task's metadata: ``files`` (a text for each path) or ``repository`` (a directory or tar on this machine);
    ``hidden_tests`` (the source of each, by name); and, where they are needed, ``hidden_files`` (put over whatever is
    there before these are asked), ``test_command`` (what ``run_tests`` runs) and ``import_paths`` (["."]).
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
        """``system``: what every conversation begins with. ``reward``: 1 where all hidden tests pass, or the share that
        does. ``tools``: which there are. ``timeout_s``: of a command; ``turn_s``: of all commands of one answer;
        ``hidden_timeout_s``: of all hidden tests; these two less than environment.timeout_s. ``tolerance``: of numbers
        with a decimal point. ``numbered``: lines are shown with their numbers. ``interpreter``: of the hidden tests, in
        the sandbox. ``test_command``: of tasks that don't say."""
        require_choice("environment.parameters.reward", reward, Reward)
        known = {tool.__name__: tool for tool in self._all_tools()}
        if unknown := [name for name in tools if name not in known]:
            valid = ", ".join(known)
            raise ConfigurationError(f"environment.parameters: tools: there is no {unknown[0]!r}; valid: {valid}")
        self.system = system
        self._reward = reward
        self._tools = [known[name] for name in tools]
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
        self._hidden(episode)  # or it fails before anything is sampled
        files_of(episode.task.metadata)
        await super().begin(episode)

    # --- tools --------------------------------------------------------------------------------------------------

    async def list_files(self, episode: Episode, path: str = ".") -> str:
        """List the files of the repository.

        path: a directory in it
        """
        await self._repository(episode)
        found: list[str] = []
        folders = [_place(path)]
        unlisted: list[str] = []
        looked = 0
        while folders and len(found) <= LISTED and looked < LISTED:
            folder, looked = folders.pop(0), looked + 1
            try:
                entries = await _told(episode.sandbox.list(folder))
            except ToolError as error:
                if folder == _place(path):
                    raise
                unlisted.append(f"[{error}]")  # it alone: too many entries, no right to read it
                continue
            for entry in entries:
                inside = posixpath.join(folder, entry.name)
                if entry.kind == "directory" and entry.name not in SKIPPED:
                    folders.append(inside)
                elif entry.kind != "directory":
                    found.append(posixpath.relpath(inside, REPOSITORY))
        if folders and looked == LISTED:
            unlisted.append(f"[more directories: these are of {LISTED}]")
        if len(found) > LISTED:
            unlisted.append(f"[more files: these are {LISTED}]")
        return "\n".join([*sorted(found[:LISTED]), *unlisted]) or "[no files]"

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
        chosen = lines[first_line - 1 : last_line]
        if self._numbered:
            chosen = [f"{number}\t{line}" for number, line in enumerate(chosen, first_line)]
        return "\n".join(chosen) or "[empty]"

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
        count = content.count(old) if old else 0
        if count != 1:
            how = f"{count} times; give more of what is around it" if count else "nowhere"
            raise ToolError(f"the old text is in {path} {how}" if old else "the old text is empty")
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
        argv, limits = ["sh", "-c", command], {"timeout_s": self._timeout_s, "max_output_bytes": SHOWN_BYTES}
        result, limit_s = await _told(self._time.exec(episode, argv, workdir=REPOSITORY, **limits))
        return _as_told(result, limit_s)

    async def _read(self, path: str, episode: Episode) -> str:
        await self._repository(episode)
        content: bytes = await _told(episode.sandbox.read(_place(path), max_bytes=READ_BYTES))
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise ToolError(f"{path} is no text") from None

    async def _write(self, path: str, content: str, episode: Episode) -> None:
        """Write a file; an existing one keeps its mode, so that an executable stays one."""
        place = _place(path)
        found = await _told(episode.sandbox.exec(["stat", "-L", "-c", "%a", "--", place]))
        said = found.stdout.strip() if found.ok else b""
        mode = int(said, 8) & 0o777 if re.fullmatch(rb"[0-7]+", said) else 0o644
        await _told(episode.sandbox.write(place, content, mode=mode))

    async def _repository(self, episode: Episode) -> None:
        """Write the repository's files into the sandbox at the first call; later calls do nothing."""
        if episode.state.get("there"):
            return
        await self._interpreter.need(episode)
        with fills("the repository"):
            for path, (content, mode) in files_of(episode.task.metadata).items():
                await episode.sandbox.write(posixpath.join(REPOSITORY, path), content, mode=mode)
        episode.state["there"] = True

    # --- what it is worth ---------------------------------------------------------------------------------------

    async def score(self, episode: Episode) -> dict[str, Any]:
        hidden = self._hidden(episode)
        count = sum(len(questions.tests) for questions in hidden.values())
        if not episode.state.get("there"):
            return {"reward": 0.0, "solved": False, "tests": count, "passed": 0, "repository": "untouched"}
        detail: dict[str, Any] = {"tests": count, "passed": 0, "wrong": [], "unanswered": [], "ended": []}
        try:
            await self._hide(episode)
            left_s = self._hidden_timeout_s
            for name, questions in hidden.items():
                result = await self._ask(episode, questions, max(left_s, _LEAST_S))
                left_s -= result.duration_s
                how = ended_badly(result)
                told = HiddenTestResults(passed=(), wrong=(), unanswered=questions.tests)
                if not result.truncated:
                    told = judged(questions, result.stdout, self._tolerance)
                detail["passed"] += len(told.passed)
                detail["wrong"] += [f"{name}: {test}" for test in told.wrong]
                detail["unanswered"] += [f"{name}: {test}" for test in told.unanswered]
                detail["ended"] += [f"{name}: {how}"] if how else []
        except SandboxError as error:
            if not error.failure.reward_valid:
                raise
            # what was left there takes the room, the memory or the place of what is to be asked: the policy's own doing
            detail["ended"].append(error.failure.what)
        solved = detail["passed"] == count
        reward = detail["passed"] / count if self._reward == "share" else float(solved)
        return {"reward": reward, "solved": solved, **{key: value for key, value in detail.items() if value != []}}

    def _hidden(self, episode: Episode) -> dict[str, Questions]:
        given = episode.task.metadata.get("hidden_tests")
        if not isinstance(given, dict) or not given:
            raise ValueError("the task has no hidden_tests: valid: the source of each, by name")
        return {name: questions_of(source, name, self._tolerance) for name, source in given.items()}

    async def _hide(self, episode: Episode) -> None:
        """End whatever still runs, and only then put the hidden files in."""
        await episode.sandbox.exec(["true"], alone=True)
        hidden: Mapping[str, str] = episode.task.metadata.get("hidden_files") or {}
        for path, content in hidden.items():
            await episode.sandbox.write(posixpath.join(REPOSITORY, path), content)

    async def _ask(self, episode: Episode, questions: Questions, timeout_s: float) -> ExecResult:
        """-I: no variables, no modules of a user's own, no current directory; what is tested is found by its paths."""
        paths = [posixpath.join(REPOSITORY, path) for path in episode.task.metadata.get("import_paths") or ["."]]
        return await episode.sandbox.exec(
            [*self._interpreter.argv, "-B", "-c", DRIVER],
            workdir=REPOSITORY,
            stdin=asked(questions, [posixpath.normpath(path) for path in paths]),
            timeout_s=timeout_s,
            alone=True,
        )


def _place(path: str) -> str:
    """The sandbox path for a path that a model wrote, which may leave the repository but not the sandbox."""
    if len(path) > PATH_CHARACTERS or "\0" in path:
        raise ToolError("that is no path of a file")
    return posixpath.normpath(posixpath.join(REPOSITORY, path))


async def _told(work: Any) -> Any:
    """The result of a sandbox call. A failure that the policy caused becomes a ToolError, and the rollout continues."""
    try:
        return await work
    except SandboxError as error:
        if not error.failure.reward_valid:
            raise
        raise ToolError(error.failure.what.removeprefix(f"{REPOSITORY}/")) from None


def _as_told(result: ExecResult, timeout_s: float) -> str:
    """`shown`, and what a test runner writes to its errors though all is well."""
    errors = result.stderr.decode(errors="replace").strip()
    return f"{result.stdout.decode(errors='replace')}{errors}" if result.ok and errors else shown(result, timeout_s)
