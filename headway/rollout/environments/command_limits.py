"""Shared parts of environments whose policies run commands: an answer's time limit, an interpreter, initial files.

Failures caused by the policy are reported to it or scored; other failures must never become a reward of 0.
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
_RAN = "ran"  # of an episode's state: whether its sandbox has been used


class AnswerTime:
    """The total time limit of all commands of an answer: less than environment.timeout_s, because a policy that sleeps
    must not look like an infrastructure failure."""

    def __init__(self, total_s: float) -> None:
        self.total_s = total_s

    def begin(self, episode: Episode) -> None:
        """Reset the remaining time to the total, as for a new answer."""
        episode.state[_LEFT] = [episode.turns, self.total_s]

    def left(self, episode: Episode) -> float:
        """Return the seconds left for commands of this answer. Raises ToolError where there are none."""
        if episode.state.get(_LEFT, [-1])[0] != episode.turns:
            self.begin(episode)
        left_s: float = episode.state[_LEFT][1]
        if left_s <= 0:
            raise ToolError(f"the commands of one answer have {self.total_s:g} s together, and these are over")
        return left_s

    async def exec(
        self, episode: Episode, argv: Sequence[str], *, timeout_s: float, **options: Any
    ) -> tuple[ExecResult, float]:
        """Run a command; returns its result and the limit that it had: the smaller of ``timeout_s`` and the answer's
        remaining time."""
        limit_s = min(timeout_s, self.left(episode))
        exec_result = await episode.sandbox.exec(argv, timeout_s=limit_s, **options)
        episode.state[_LEFT][1] -= exec_result.duration_s
        return exec_result, limit_s


class Interpreter:
    """The sandbox's Python interpreter, checked in sandboxes that no policy has used until it has worked once."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv = list(argv)
        self._works = False

    async def need(self, episode: Episode) -> None:
        """Check the interpreter before a rollout uses its sandbox: without one all rollouts would fail, whatever they
        answer. Raises SandboxError."""
        is_unused, episode.state[_RAN] = not episode.state.get(_RAN), True
        if self._works or not is_unused:
            return
        with fills(" ".join(self.argv)):
            check = await episode.sandbox.exec([*self.argv, "-c", "print(6 * 7)"])
        if check.stdout.split() != [b"42"]:
            failure_text = check.stderr.decode(errors="replace").strip()[-200:] or f"exit code {check.exit_code}"
            raise SandboxError(environment_failure(f"{' '.join(self.argv)} doesn't run in the sandbox: {failure_text}"))
        self._works = True


def ended_badly(result: ExecResult) -> Ending | None:
    """Return how a program failed; None where it succeeded."""
    if result.oom and not result.ok:
        return "out of memory"
    if result.timed_out:
        return "timeout"
    if result.truncated:
        return "truncated output"
    return None if result.ok else "error"


@contextmanager
def fills(content: str) -> Iterator[None]:
    """Blame the environment, not the policy, where ``content`` exceeds the limits of a fresh sandbox, into which the
    environment writes it within the block."""
    try:
        yield
    except SandboxError as error:
        if error.failure.cause != "model_code":
            raise
        reason = f"{content} needs more than sandbox.limits.disk_bytes or memory_bytes: {error.failure.message}"
        raise SandboxError(environment_failure(reason)) from None
