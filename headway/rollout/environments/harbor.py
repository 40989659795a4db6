"""Environment for Harbor's tasks (terminal-bench, for example): an agent with a shell in a sandbox, scored by tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from headway.records.sandbox import ExecResult, SandboxError
from headway.rollout.environment import Environment, Episode
from headway.rollout.environments.command_limits import AnswerTime, fills
from headway.rollout.environments.harbor_tasks import COLUMN, HarborTask, read_task, reward_of
from headway.rollout.environments.python_tool import format_output

_LOGS = "/logs/verifier"
_OUTPUT_BYTES = 16_000  # of a command's stdout, and of its stderr
_REWARD_BYTES = 1 << 20
SYSTEM = "You work in a shell. Call bash until the task is done, then say so without a call."


class Harbor(Environment):
    """Environment for Harbor's tasks: the tool ``bash`` runs commands in the rollout's sandbox, which has the task's
    files. When the agent answers without a call, or has no turn left, all its processes are killed and the folders of
    tests and rewards are cleared. Then the task's tests are copied into the sandbox and run; they write the reward."""

    uses_sandbox = True

    def __init__(
        self, system: str = SYSTEM, timeout_s: float = 60.0, turn_s: float = 120.0, solved_at: float = 1.0
    ) -> None:
        """``system``: the first message of every conversation. ``timeout_s``: of a command; ``turn_s``: of all commands
        of one answer, less than environment.timeout_s. ``solved_at``: reward from which a task counts as solved."""
        self.system = system
        self.longest_s = {"turn_s": turn_s}
        self._timeout_s = timeout_s
        self._time = AnswerTime(turn_s)
        self._solved_at = solved_at
        self._tasks: dict[str, HarborTask] = {}
        self._judged: set[str] = set()  # folders whose tests have written a reward

    def tools(self) -> Sequence[Callable[..., Any]]:
        return (self.bash,)

    async def begin(self, episode: Episode) -> None:
        task = await self._task(episode)
        if task.verifier_s >= self.reply_timeout_s:
            setting = f"environment.timeout_s = {self.reply_timeout_s:g} s"
            raise ValueError(f"the tests of {task.name} may take {task.verifier_s:g} s: more is needed than {setting}")
        with fills(f"what {task.name} begins with"):
            await _upload(episode, task.files)
            mkdir = await episode.sandbox.exec(["mkdir", "-p", task.workdir, "/logs/agent", _LOGS], workdir="/")
        if not mkdir.ok:
            raise RuntimeError(f"{task.workdir} and /logs can't be made: {mkdir.stderr.decode(errors='replace')[:200]}")
        await super().begin(episode)

    async def bash(self, command: str, episode: Episode) -> str:
        """Run a command in a shell, and see what it prints.

        command: the command
        """
        task = await self._task(episode)
        exec_result, limit_s = await self._time.exec(
            episode,
            ["bash", "-c", command],
            environment=dict(task.environment),
            workdir=task.workdir,
            timeout_s=self._timeout_s,
            max_output_bytes=_OUTPUT_BYTES,
        )
        return format_output(exec_result, limit_s)

    async def score(self, episode: Episode) -> Any:
        try:
            return await self._run_tests(episode, await self._task(episode))
        except SandboxError as error:
            if not error.failure.reward_valid:
                raise
            return {"reward": 0.0, "tests": error.failure.message}  # a disk that the agent has filled, say

    async def _run_tests(self, episode: Episode, task: HarborTask) -> dict[str, Any]:
        # Alone: processes that the agent left running can't see or change the tests.
        clear_result = await episode.sandbox.exec(
            ["/bin/sh", "-c", f"rm -rf /tests {_LOGS} && mkdir -p {_LOGS}"], workdir="/", alone=True
        )
        if not clear_result.ok:
            return {"reward": 0.0, "tests": "what the agent left in /tests or /logs can't be removed"}
        await _upload(episode, task.tests)
        test_run = await episode.sandbox.exec(
            ["bash", "/tests/test.sh"],
            environment={**task.environment, **task.test_environment},
            workdir=task.workdir,
            timeout_s=task.verifier_s,
            max_output_bytes=_OUTPUT_BYTES,
            alone=True,
        )
        # Tests run the agent's code, which may end them before they write a reward, or leave a process that writes one.
        if interruption := _interruption(test_run, task.verifier_s):
            return {"reward": 0.0, "tests": interruption}
        await episode.sandbox.exec(["true"], workdir="/", alone=True)
        reward_files = [await _read(episode, f"{_LOGS}/reward.{suffix}") for suffix in ("json", "txt")]
        try:
            verdict = reward_of(*reward_files)
        except ValueError as error:
            if _task_folder(episode) not in self._judged or (test_run.ok and not test_run.oom):
                raise  # tests that have never written a reward may be broken themselves
            return {"reward": 0.0, "tests": f"exit code {test_run.exit_code}: {error}"}
        self._judged.add(_task_folder(episode))
        return {**verdict, "solved": verdict["reward"] >= self._solved_at, "exit_code": test_run.exit_code}

    async def _task(self, episode: Episode) -> HarborTask:
        task_folder = _task_folder(episode)
        if task_folder not in self._tasks:
            self._tasks[task_folder] = await asyncio.to_thread(read_task, Path(task_folder))
        return self._tasks[task_folder]


def _task_folder(episode: Episode) -> str:
    folder: str | None = (episode.task.metadata.get(COLUMN) or {}).get("folder")
    if folder is None:
        raise ValueError(f"task {episode.task.task_id} has no folder: headway.rollout.environments.harbor_tasks:tasks")
    return folder


def _interruption(result: ExecResult, limit_s: float) -> str:
    """Return how the tests were interrupted; "" where they ran to their end."""
    if result.timed_out:
        return f"stopped after {limit_s:g} s"
    if result.exit_code is None:
        return "no memory" if result.oom else f"ended by signal {result.signal}"
    return ""


async def _upload(episode: Episode, files: Iterable[tuple[Path, str]]) -> None:
    for path, sandbox_path in files:
        content, mode = await asyncio.to_thread(path.read_bytes), path.stat().st_mode & 0o777
        await episode.sandbox.write(sandbox_path, content, mode=mode)


async def _read(episode: Episode, path: str) -> bytes | None:
    """Return a file's content; None where it can't be read. Raises SandboxError where infrastructure failed."""
    try:
        return await episode.sandbox.read(path, max_bytes=_REWARD_BYTES)
    except SandboxError as error:
        if error.failure.cause == "infrastructure":
            raise
        return None
