"""`headway kernels sft-data`: conversations for `headway sft` from candidates that an evaluator finds good."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headway.kernels.jobs.evaluate import JudgeSettings, answer_source, answer_text, submission_of
from headway.kernels.jobs.judging import JudgeAll, require_success
from headway.kernels.jobs.task_files import KernelTaskFile
from headway.kernels.prompts import feedback, source_in
from headway.records.errors import ConfigurationError
from headway.records.kernels import KernelEvaluation
from headway.tasks.source_rows import read_objects, require_messages

NEEDS = ("compiled", "correct", "faster")
CountTokens = Callable[[str], int]
REASONS = (  # why a row isn't written, in the order of the checks
    "unknown task",
    "no source",
    "too short",
    "too long",
    "not evaluated",
    "cheat",
    "not compiled",
    "wrong",
    "untimed",
    "slow",
    "duplicate",
)
_INSTRUCTIVE = ("not compiled", "wrong", "slow")  # reasons of attempts that may precede a good one


class SftSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions of a conversation for training."""

    need: str = "correct"  # one of NEEDS: the requirement on its last answer
    least_speedup: float = 1.0  # with "faster": above it
    seeds: int = 3  # of the check, from 42 upwards
    trials: int = 5  # per seed
    shortest_tokens: int = 100  # of a conversation, without the chat template's tokens
    longest_tokens: int = 8192  # likewise
    turns: int = 3  # answers of a conversation, at most
    counted_by: str = "characters / 4"  # or the model folder whose tokenizer counts
    timeout_s: float = 600.0


class SftCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of rows; written and left out add up to all of them."""

    rows: int
    written: int
    left_out: dict[str, int]  # by REASONS
    turns: dict[str, int]  # answers of a written conversation -> conversations
    settings: SftSettings


class _Attempt(NamedTuple):
    key: tuple[str, str]  # its task, and its `source_key`
    text: str  # of the assistant's message
    source: str


class _Row(NamedTuple):
    task: str
    attempts: list[_Attempt]  # several: a conversation's, in order
    reason: str | None = None  # why none of them is evaluated
    conversation: bool = False


class _Judged(NamedTuple):
    evaluation: KernelEvaluation
    reason: str | None  # why it isn't good enough


class SftData:
    """Makes SFT conversations out of the rows of a file.

    A row is a candidate, {"task", "source" or "text"}, or a conversation of several, {"messages"}. A row of which an
    answer passes is written as the prompt and that answer. Wrong answers before it, of the conversation or of earlier
    rows of the task, become earlier turns, each with the evaluator's feedback. Invariant: a source is written once as
    a passing answer, and at most once as a wrong one. Example of four rows of a task, wrong, right, another right,
    wrong: [wrong, feedback, right] and [right] are written; the two wrong rows count as left out.
    """

    def __init__(self, task_file: KernelTaskFile, settings: SftSettings, count_tokens: CountTokens) -> None:
        self._file = task_file
        self._settings = settings
        self._count_tokens = count_tokens
        self._judged: dict[tuple[str, str], _Judged] = {}  # by an attempt's key
        self._written: set[tuple[str, str]] = set()
        self._used: set[tuple[str, str]] = set()  # as wrong answers

    async def make(self, path: Path, judge: JudgeAll) -> tuple[list[dict[str, Any]], SftCounts]:
        """The conversations as rows of `headway sft`, in the file's order, and the counts. Raises ConfigurationError
        for a malformed file, HeadwayError if no candidate can be evaluated."""
        rows = [self._read(row, location) for location, row in read_objects(path)]
        if not rows:
            raise ConfigurationError(f"{path}: no rows; valid: one JSON object a line")
        pending, chosen = {attempt.key: attempt.source for row in rows for attempt in row.attempts}, self._settings
        for number in range(1 if chosen.need == "compiled" else chosen.seeds):
            timed = chosen.need == "faster" and number == 0
            settings = JudgeSettings(
                correct_trials=chosen.trials, timed=timed, seed=42 + number, timeout_s=chosen.timeout_s
            )
            evaluations = await judge([submission_of(self._file, key[0], pending[key], settings) for key in pending])
            if number == 0:
                require_success(evaluations)
            judged = {key: _Judged(e, self._reason(e, timed)) for key, e in zip(pending, evaluations, strict=True)}
            self._judged |= {key: j for key, j in judged.items() if number == 0 or j.reason is not None}
            pending = {key: source for key, source in pending.items() if judged[key].reason is None}
        return self._conversations(rows)

    @property
    def missing(self) -> list[tuple[str, str]]:
        """Task and reason of each candidate that wasn't evaluated."""
        every = ((task, judged.evaluation.infrastructure) for (task, _), judged in self._judged.items())
        return [(task, why) for task, why in every if why]

    def _reason(self, evaluation: KernelEvaluation, timed: bool) -> str | None:
        reasons = {
            "not evaluated": bool(evaluation.infrastructure),
            "cheat": bool(evaluation.cheat),
            "not compiled": not evaluation.compiled,
            "wrong": self._settings.need != "compiled" and not evaluation.correct,
            "untimed": timed and evaluation.speedup is None,
            "slow": timed and (evaluation.speedup or 0.0) <= self._settings.least_speedup,
        }
        return next((reason for reason, is_true in reasons.items() if is_true), None)

    # Rows.

    def _read(self, row: dict[str, Any], location: str) -> _Row:
        task = self._file.name_of(row, location)
        is_conversation = "messages" in row
        if is_conversation:
            messages = require_messages(row["messages"], "messages", location)
            replies = [message["content"] for message in messages if message["role"] == "assistant"]
            texts = [(text, source_in(text)) for text in replies]
        else:
            source = answer_source(row, location)
            texts = [(answer_text(row) or f"```python\n{source.rstrip()}\n```", source)]
        if not task:
            return _Row(task, [], "unknown task")
        attempts, reason = list[_Attempt](), "no source"
        for text, source in texts:
            if source:
                reason = self._length_reason(self._file.tasks[task].prompt, text)
                if reason is None:
                    attempts.append(_Attempt((task, source_key(source)), text, source))
        return _Row(task, attempts, None if attempts else reason, is_conversation)

    def _length_reason(self, *texts: str) -> str | None:
        tokens = sum(map(self._count_tokens, texts))
        if tokens < self._settings.shortest_tokens:
            return "too short"
        return "too long" if tokens > self._settings.longest_tokens else None

    # Conversations.

    def _conversations(self, rows: Sequence[_Row]) -> tuple[list[dict[str, Any]], SftCounts]:
        written: list[dict[str, Any]] = []
        reasons, turns = Counter[str](), Counter[int]()
        wrong: dict[str, list[_Attempt]] = {}  # of rows so far, by task
        for row in rows:
            previous = [] if row.conversation else wrong.setdefault(row.task, [])
            reason = row.reason
            for attempt in row.attempts:
                reason = self._judged[attempt.key].reason
                if reason is None:
                    break
                if reason in _INSTRUCTIVE and attempt.key not in {other.key for other in previous}:
                    previous.append(attempt)
            else:
                attempt = None
            if attempt is not None and attempt.key in self._written:
                reason = "duplicate"
            elif attempt is not None:
                messages = self._messages(row.task, previous, attempt)
                written.append({"messages": messages, "task": row.task})
                turns[len(messages) // 2] += 1
                previous.clear()
            if reason is not None:
                reasons[reason] += 1
        counts = SftCounts(
            rows=len(rows),
            written=len(written),
            left_out={reason: reasons[reason] for reason in REASONS if reason in reasons},
            turns={str(count): turns[count] for count in sorted(turns)},
            settings=self._settings,
        )
        return written, counts

    def _messages(self, task: str, previous: Sequence[_Attempt], good: _Attempt) -> list[dict[str, str]]:
        """The conversation that ends with ``good``, preceded by as many of the latest ``previous`` answers as fit."""
        prompt = self._file.tasks[task].prompt
        unused = [attempt for attempt in previous if attempt.key not in self._used]
        for first in range(max(0, len(unused) - self._settings.turns + 1), len(unused) + 1):
            messages = [{"role": "user", "content": prompt}]
            for attempt in unused[first:]:
                reply = feedback(self._judged[attempt.key].evaluation)
                messages += [{"role": "assistant", "content": attempt.text}, {"role": "user", "content": reply}]
            messages.append({"role": "assistant", "content": good.text})
            if self._length_reason(*(message["content"] for message in messages)) is None:
                break
        self._written.add(good.key)
        self._used.update(attempt.key for attempt in unused[first:])
        return messages


def source_key(source: str) -> str:
    """A text that is equal for sources that differ only in layout, comments and docstrings; inside string literals,
    such as C++ code, only in white space."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # as ast.parse says that it may
        return " ".join(source.split())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = " ".join(node.value.split())
    return ast.dump(tree)
