"""Environment with a Python interpreter in a sandbox as the policy's tool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headway.records.sandbox import ExecResult
from headway.rollout.environment import Environment, Episode
from headway.rollout.environments.command_limits import AnswerTime, Interpreter

_OUTPUT_BYTES = 16_000  # of stdout and of stderr; environment.tool_result_characters cuts them further


class PythonTool(Environment):
    """Environment with the tool ``python``, which runs a program in the rollout's sandbox and returns its output; files
    stay from call to call. ``[verifier]`` judges the answer."""

    uses_sandbox = True

    def __init__(
        self, system: str = "", timeout_s: float = 5.0, turn_s: float = 60.0, interpreter: Sequence[str] = ("python3",)
    ) -> None:
        """``system``: the first message of every conversation. ``timeout_s``: of a program; ``turn_s``: of all programs
        of one answer, less than environment.timeout_s. ``interpreter``: in the sandbox."""
        self.system = system
        self.longest_s = {"turn_s": turn_s}
        self._timeout_s = timeout_s
        self._time = AnswerTime(turn_s)
        self._interpreter = Interpreter(interpreter)

    def tools(self) -> Sequence[Callable[..., Any]]:
        return (self.python,)

    async def python(self, code: str, episode: Episode) -> str:
        """Run a Python program, and see what it prints.

        code: the program
        """
        await self._interpreter.need(episode)
        exec_result, limit_s = await self._time.exec(
            episode, [*self._interpreter.argv, "-c", code], timeout_s=self._timeout_s, max_output_bytes=_OUTPUT_BYTES
        )
        return format_output(exec_result, limit_s)


def format_output(result: ExecResult, timeout_s: float) -> str:
    """Return a program's result as text for the model: its output, and its error, if it failed."""
    output_text = result.stdout.decode(errors="replace")
    if result.timed_out:
        return output_text + f"[stopped after {timeout_s:g} s]"
    if result.oom:
        return output_text + "[out of memory]"
    if not result.ok:
        error_text = result.stderr.decode(errors="replace").strip()
        exit_text = f"signal {result.signal}" if result.exit_code is None else f"exit code {result.exit_code}"
        return output_text + (error_text or f"[{exit_text}]")
    return output_text.rstrip("\n") or "[no output]"
