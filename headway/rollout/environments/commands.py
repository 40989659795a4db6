"""Shared parts of environments whose policies run commands: an answer's time limit, an interpreter, initial files.

Failures that the policy caused are reported to it or scored; others must never become a reward of 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from headway.records.sandbox import ExecResult, SandboxError, environment_failure
from headway.rollout.environment import Episode
from headway.rollout.tools import ToolError

Ending = Literal["out of memory", "timeout", "truncated output", "error"]

_LEFT = "answer_time"  # of an episode's state: number of the answer, seconds left for it
_RAN = "ran"  # likewise: whether its sandbox has been used


class AnswerTime:
    """Time limit of all commands of one answer together: less than environment.timeout_s, or a policy that sleeps would
    be taken for a broken machine."""

    def __init__(self, total_s: float) -> None:
        self.total_s = total_s

    def begin(self, episode: Episode) -> None:
        """Give what follows the whole time, as every answer has it by itself."""
        episode.state[_LEFT] = [episode.turns, self.total_s]

    def left(self, episode: Episode) -> float:
        """Seconds left for commands of this answer. Raises ToolError where there are none."""
        if episode.state.get(_LEFT, [-1])[0] != episode.turns:
            self.begin(episode)
        left_s: float = episode.state[_LEFT][1]
        if left_s <= 0:
            raise ToolError(f"the commands of one answer have {self.total_s:g} s together, and these are over")
        return left_s

    async def exec(
        self, episode: Episode, argv: Sequence[str], *, timeout_s: float, **options: Any
    ) -> tuple[ExecResult, float]:
        """How a command ended, and the limit that it had: ``timeout_s``, or what is left of the answer's time."""
        limit_s = min(timeout_s, self.left(episode))
        result = await episode.sandbox.exec(argv, timeout_s=limit_s, **options)
        episode.state[_LEFT][1] -= result.duration_s
        return result, limit_s


class Interpreter:
    """Python's interpreter in the sandbox, checked until it has worked once, in sandboxes that no policy has used."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv = list(argv)
        self._works = False

    async def need(self, episode: Episode) -> None:
        """Check the interpreter before a rollout uses its sandbox: without one all rollouts would fail, whatever their
        answers. Raises SandboxError."""
        unused, episode.state[_RAN] = not episode.state.get(_RAN), True
        if self._works or not unused:
            return
        with fills(" ".join(self.argv)):
            result = await episode.sandbox.exec([*self.argv, "-c", "print(6 * 7)"])
        if result.stdout.split() != [b"42"]:
            how = result.stderr.decode(errors="replace").strip()[-200:] or f"exit code {result.exit_code}"
            raise SandboxError(environment_failure(f"{' '.join(self.argv)} doesn't run in the sandbox: {how}"))
        self._works = True


def ended_badly(result: ExecResult) -> Ending | None:
    """How a program failed; None: it ended well."""
    if result.oom and not result.ok:
        return "out of memory"
    if result.timed_out:
        return "timeout"
    if result.truncated:
        return "truncated output"
    return None if result.ok else "error"


@contextmanager
def fills(what: str) -> Iterator[None]:
    """Report the environment, not the policy, as failed where ``what``, which the environment puts into a fresh sandbox
    within the block, exceeds its limits."""
    try:
        yield
    except SandboxError as error:
        if error.failure.cause != "model_code":
            raise
        told = f"{what} needs more than sandbox.limits.disk_bytes or memory_bytes: {error.failure.what}"
        raise SandboxError(environment_failure(told)) from None
