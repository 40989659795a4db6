"""What environments whose policies run commands have in common: the time of an answer, an interpreter, a first filling.

What is the policy's doing is told or scored; what isn't must never become a reward of 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from headway.records.sandbox import ExecResult, SandboxError, environment_failure
from headway.rollout.environment import Episode
from headway.rollout.tools import ToolError

_LEFT = "answer_s"  # of an episode's state
_RAN = "ran"  # likewise: whether its sandbox has been used


class AnswerTime:
    """What all commands of one answer may take together: less than environment.timeout_s, or a policy that sleeps would
    be taken for a broken machine."""

    def __init__(self, total_s: float) -> None:
        self.total_s = total_s

    def begin(self, episode: Episode) -> None:
        """An answer has come: it has all of it."""
        episode.state[_LEFT] = self.total_s

    def left(self, episode: Episode) -> float:
        """Raises ToolError where there is none."""
        left_s: float = episode.state.get(_LEFT, self.total_s)
        if left_s <= 0:
            raise ToolError(f"the commands of one answer have {self.total_s:g} s together, and these are over")
        return left_s

    def spend(self, episode: Episode, seconds: float) -> None:
        episode.state[_LEFT] = episode.state.get(_LEFT, self.total_s) - seconds

    async def exec(
        self, episode: Episode, argv: Sequence[str], *, timeout_s: float, **options: Any
    ) -> tuple[ExecResult, float]:
        """How a command ended, and the limit that it had: ``timeout_s``, or what is left of the answer's time."""
        limit_s = min(timeout_s, self.left(episode))
        result = await episode.sandbox.exec(argv, timeout_s=limit_s, **options)
        self.spend(episode, result.duration_s)
        return result, limit_s


class Interpreter:
    """Of Python, in the sandbox. Looked for once, in a sandbox that nobody has used."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv = list(argv)
        self._works = False

    async def need(self, episode: Episode) -> None:
        """Before a rollout uses its sandbox: without an interpreter all of them would fail, and nobody's answer would
        be wrong. Raises SandboxError."""
        unused, episode.state[_RAN] = not episode.state.get(_RAN), True
        if self._works or not unused:
            return
        with fills(" ".join(self.argv)):
            result = await episode.sandbox.exec([*self.argv, "-c", "print(6 * 7)"])
        if result.stdout.split() != [b"42"]:
            how = result.stderr.decode(errors="replace").strip()[-200:] or f"exit code {result.exit_code}"
            raise SandboxError(environment_failure(f"{' '.join(self.argv)} doesn't run in the sandbox: {how}"))
        self._works = True


@contextmanager
def fills(what: str) -> Iterator[None]:
    """While the environment itself puts ``what`` into a fresh sandbox: limits that it doesn't fit are no policy's
    doing."""
    try:
        yield
    except SandboxError as error:
        if error.failure.cause != "model_code":
            raise
        told = f"{what} needs more than sandbox.limits.disk_bytes, inodes or memory_bytes: {error.failure.what}"
        raise SandboxError(environment_failure(told)) from None
