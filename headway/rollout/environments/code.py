"""Environment for programming tasks: a program is judged by the task's tests, in a sandbox."""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from headway.records.sandbox import ExecResult, SandboxError
from headway.rollout.code.code_tests import CodeTest, CodeTests, code_tests
from headway.rollout.code.comparison import Compare, same_text, same_value
from headway.rollout.environment import Answer, Environment, Episode
from headway.rollout.environments.command_limits import AnswerTime, Ending, Interpreter, ended_badly
from headway.rollout.parameters import require_choice
from headway.rollout.tools import ToolError

Outcome = Ending | Literal["passed", "wrong", "not run"]
Reward = Literal["all", "share"]

PROGRAM = "solution.py"
PREAMBLE = """\
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
"""  # imports that solutions of the style "complete this function" expect

# Runs in the sandbox, in one process with the solution, which can manipulate it: it has no secret. The worker asks for
# a value and compares it with the expected one, which never enters the sandbox.
_CALL = """\
import json, os, sys
_answer = os.dup(1)
os.dup2(2, 1)
_asked = json.loads(sys.stdin.buffer.read())
sys.stdin = open(os.devnull)
sys.setrecursionlimit(20000)
sys.set_int_max_str_digits(0)
def _plain(value):
    return value.tolist() if hasattr(value, "tolist") else list(value)
def _main():
    names = {"__name__": "solution"}
    exec(_asked["preamble"], names)
    with open("solution.py", encoding="utf-8") as file:
        exec(compile(file.read(), "solution.py", "exec"), names)
    name = _asked["function"]
    function = names[name] if name in names else getattr(names["Solution"](), name)
    value = json.dumps(function(*_asked["arguments"]), default=_plain).encode()
    while value:
        value = value[os.write(_answer, value):]
_main()
"""
_FEEDBACK_CHARACTERS = 400  # of each text of a test in the policy's feedback


class ProgramResult(msgspec.Struct, frozen=True, kw_only=True):
    """A program's result in one test."""

    outcome: Outcome
    got: str = ""  # its output or return value
    errors: str = ""


class Code(Environment):
    """Environment in which the policy answers with a program (the last fenced block of Python, or a call of
    ``submit``). It runs in the rollout's sandbox against the tests in the task's metadata, in one of the forms of
    rollout/code/code_tests.py.

    Expected results never enter the sandbox: a program gets a test's input, and the worker compares its output. So the
    program can't find, patch or forge them. Every test begins, in a directory of its own, after all processes of
    earlier tests are killed.
    """

    uses_sandbox = True

    def __init__(
        self,
        system: str = "",
        reward: Reward = "all",
        feedback_turns: int = 0,
        submit: bool = False,
        timeout_s: float = 6.0,
        total_s: float = 120.0,
        compare: Compare = "tokens",
        tolerance: float = 1e-9,
        output_bytes: int = 1 << 20,
        interpreter: Sequence[str] = ("python3", "-I"),
        preamble: str = PREAMBLE,
    ) -> None:
        """``system``: the first message of every conversation. ``reward``: "all": 1 for a program that passes all
        tests, which stop at the first failure; "share": the share that passes. ``feedback_turns``: how often the policy
        sees which public tests fail, and may try again. ``submit``: whether there is also a tool. ``timeout_s``: of a
        test; ``total_s``: of all tests of an answer, less than environment.timeout_s; remaining tests count as
        "timeout". ``compare``: "tokens" or "lines". ``tolerance``: of numbers with a decimal point. ``output_bytes``:
        limit of a test's output; more is a failure. ``interpreter``: in the sandbox. ``preamble``: imports for
        functions."""
        require_choice("environment.parameters.reward", reward, Reward)
        require_choice("environment.parameters.compare", compare, Compare)
        self.system = system
        self._reward = reward
        self._feedback_turns = feedback_turns
        self._submit = submit
        self._timeout_s = timeout_s
        self._time = AnswerTime(total_s)
        self.longest_s = {"total_s": total_s}
        self._compare: Compare = compare
        self._tolerance = tolerance
        self._output_bytes = output_bytes
        self._interpreter = Interpreter(interpreter)
        self._preamble = preamble

    def tools(self) -> Sequence[Callable[..., Any]]:
        return (self.submit,) if self._submit else ()

    async def submit(self, code: str, episode: Episode) -> str:
        """Hand in a program.

        code: the whole program
        """
        return await self._submit_program(episode, code) or "handed in"

    async def begin(self, episode: Episode) -> None:
        code_tests(episode.task.metadata)  # an invalid task fails before the first sample
        await super().begin(episode)

    async def reply(self, episode: Episode, answer: Answer) -> None:
        if await self.call_tools(episode, answer):
            if episode.state.get("final"):
                episode.end()
            return
        feedback = await self._submit_program(episode, last_program(answer.text))
        if feedback is None:
            episode.end()
        else:
            episode.add_message(feedback)

    async def score(self, episode: Episode) -> dict[str, Any]:
        code = episode.state.get("code")
        tests = code_tests(episode.task.metadata)
        if code is None:
            return {"reward": 0.0, "solved": False, "tests": len(tests.tests), "outcomes": {}, "code": "none"}
        self._time.begin(episode)
        runs = await self._run(episode, code, tests, tests.tests, until_failure=self._reward == "all")
        outcome_counts = Counter(run.outcome for run in runs)
        passed_share = outcome_counts["passed"] / len(runs)
        failed_index = next((index for index, run in enumerate(runs) if run.outcome != "passed"), None)
        detail: dict[str, Any] = {"tests": len(runs), "outcomes": dict(outcome_counts)}
        if failed_index is not None:
            detail["first_failure"] = {"test": failed_index, **msgspec.to_builtins(_brief(runs[failed_index]))}
        reward = passed_share if self._reward == "share" else float(failed_index is None)
        return {"reward": reward, "solved": failed_index is None, **detail}

    async def _submit_program(self, episode: Episode, code: str | None) -> str | None:
        """Run the public tests on a submitted program and return the feedback; None when the submission is final."""
        state = episode.state
        if code is not None:
            state["code"] = code
        if state.get("feedback", 0) >= self._feedback_turns:
            state["final"] = True
            return None
        if code is None:
            state["feedback"] = state.get("feedback", 0) + 1
            return "There is no program in this answer. Write it between ```python and ```."
        self._time.left(episode)  # an answer may hold several programs
        tests = code_tests(episode.task.metadata)
        public_tests = [test for test in tests.tests if test.public]
        runs = await self._run(episode, code, tests, public_tests, until_failure=False)
        if all(run.outcome == "passed" for run in runs):
            state["final"] = True
            return None
        state["feedback"] = state.get("feedback", 0) + 1
        feedback_texts = [
            self._test_feedback(i, test, run) for i, (test, run) in enumerate(zip(public_tests, runs, strict=True))
        ]
        return self.shortened("\n\n".join(text for text in feedback_texts if text))

    def _test_feedback(self, index: int, test: CodeTest, run: ProgramResult) -> str:
        if run.outcome == "passed":
            return ""
        test_input, expected = (
            (test.stdin, test.stdout) if not test.returns else (repr(test.arguments), repr(test.returns[0]))
        )
        lines = [f"test {index + 1}: {run.outcome}", f"input: {_cut(test_input)}", f"expected: {_cut(expected)}"]
        lines += [f"output: {_cut(run.got)}"] if run.got else []
        lines += [f"errors: {run.errors[-_FEEDBACK_CHARACTERS:]}"] if run.errors else []
        return "\n".join(lines)

    # --- in the sandbox -----------------------------------------------------------------------------------------

    async def _run(
        self, episode: Episode, code: str, tests: CodeTests, chosen: Sequence[CodeTest], *, until_failure: bool
    ) -> list[ProgramResult]:
        """Run tests one after another. Raises SandboxError for a failure that the program didn't cause."""
        await self._interpreter.need(episode)
        runs: list[ProgramResult] = []
        for test in chosen:
            if until_failure and runs and runs[-1].outcome != "passed":
                runs.append(ProgramResult(outcome="not run"))
            else:
                runs.append(await self._test(episode, code, tests, test))
        return runs

    async def _test(self, episode: Episode, code: str, tests: CodeTests, test: CodeTest) -> ProgramResult:
        folder = f"/work/{secrets.token_hex(8)}"
        program_argv, stdin = [PROGRAM], test.stdin
        if tests.function:
            call_request = {"preamble": self._preamble, "function": tests.function, "arguments": test.arguments}
            program_argv, stdin = ["-c", _CALL], json.dumps(call_request)
        try:
            self._time.left(episode)
            await episode.sandbox.write(f"{folder}/{PROGRAM}", code.encode(errors="replace"))
            exec_result, _ = await self._time.exec(
                episode,
                [*self._interpreter.argv, *program_argv],
                workdir=folder,
                stdin=stdin.encode(errors="replace"),
                timeout_s=tests.timeout_s or self._timeout_s,
                max_output_bytes=self._output_bytes,
                alone=True,
            )
        except ToolError:  # no time is left
            return ProgramResult(outcome="timeout")
        except SandboxError as error:
            if not error.failure.reward_valid:
                raise
            # the program's own failure: it filled the disk, or all memory, so that the sandbox is gone
            is_out_of_memory = "out of memory" in error.failure.message
            return ProgramResult(outcome="out of memory" if is_out_of_memory else "error", errors=error.failure.message)
        return self._judged(exec_result, tests, test)

    def _judged(self, result: ExecResult, tests: CodeTests, test: CodeTest) -> ProgramResult:
        output, errors = result.stdout.decode(errors="replace"), result.stderr.decode(errors="replace")
        outcome: Outcome | None = ended_badly(result)
        if not result.ok and errors.rstrip().endswith("MemoryError"):
            outcome = "out of memory"
        if outcome is None:
            outcome = "passed" if self._matches(output, tests, test) else "wrong"
        return ProgramResult(outcome=outcome, got=output, errors=errors)

    def _matches(self, got: str, tests: CodeTests, test: CodeTest) -> bool:
        tolerance = self._tolerance if tests.tolerance is None else tests.tolerance
        if not tests.function:
            return same_text(got, test.stdout, self._compare, tolerance)
        try:
            returned = json.loads(got)
        except (ValueError, RecursionError):  # no output, or not the driver's
            return False
        return any(same_value(returned, expected, tolerance) for expected in test.returns)


_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})[ \t]*([\w+.-]*)[^`\n]*$")


def last_program(text: str) -> str | None:
    """Return the last fenced block of Python, or of no language; None where there is no complete one."""
    program: str | None = None
    fence, language, lines = "", "", list[str]()
    for line in text.splitlines():
        match = _FENCE.match(line)
        if not fence:
            if match:
                fence, language, lines = match[1], match[2].lower(), []
        elif match and match[1].startswith(fence) and not match[2]:
            if language in ("", "py", "python", "python3"):
                program = "\n".join(lines) + "\n"
            fence = ""
        else:
            lines.append(line)
    return program


def _cut(text: str) -> str:
    return text if len(text) <= _FEEDBACK_CHARACTERS else text[:_FEEDBACK_CHARACTERS] + "..."


def _brief(run: ProgramResult) -> ProgramResult:
    return ProgramResult(outcome=run.outcome, got=_cut(run.got), errors=run.errors[-_FEEDBACK_CHARACTERS:])
