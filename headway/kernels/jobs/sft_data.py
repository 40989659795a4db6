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
        rows = [self._read(fields, location) for location, fields in read_objects(path)]
        if not rows:
            raise ConfigurationError(f"{path}: no rows; valid: one JSON object a line")
        pending, options = {attempt.key: attempt.source for row in rows for attempt in row.attempts}, self._settings
        for seed_index in range(1 if options.need == "compiled" else options.seeds):
            timed = options.need == "faster" and seed_index == 0
            settings = JudgeSettings(
                correct_trials=options.trials, timed=timed, seed=42 + seed_index, timeout_s=options.timeout_s
            )
            evaluations = await judge([submission_of(self._file, key[0], pending[key], settings) for key in pending])
            if seed_index == 0:
                require_success(evaluations)
            judged = {key: _Judged(e, self._reason(e, timed)) for key, e in zip(pending, evaluations, strict=True)}
            self._judged |= {key: j for key, j in judged.items() if seed_index == 0 or j.reason is not None}
            pending = {key: source for key, source in pending.items() if judged[key].reason is None}
        return self._conversations(rows)

    @property
    def missing(self) -> list[tuple[str, str]]:
        """Task and reason of each candidate that wasn't evaluated."""
        failures = ((task, judged.evaluation.infrastructure) for (task, _), judged in self._judged.items())
        return [(task, reason) for task, reason in failures if reason]

    def _reason(self, evaluation: KernelEvaluation, timed: bool) -> str | None:
        conditions = {
            "not evaluated": bool(evaluation.infrastructure),
            "cheat": bool(evaluation.cheat),
            "not compiled": not evaluation.compiled,
            "wrong": self._settings.need != "compiled" and not evaluation.correct,
            "untimed": timed and evaluation.speedup is None,
            "slow": timed and (evaluation.speedup or 0.0) <= self._settings.least_speedup,
        }
        return next((reason for reason, is_true in conditions.items() if is_true), None)

    # Rows.

    def _read(self, row: dict[str, Any], location: str) -> _Row:
        task_name = self._file.name_of(row, location)
        is_conversation = "messages" in row
        if is_conversation:
            messages = require_messages(row["messages"], "messages", location)
            reply_texts = [message["content"] for message in messages if message["role"] == "assistant"]
            answers = [(text, source_in(text)) for text in reply_texts]
        else:
            source = answer_source(row, location)
            answers = [(answer_text(row) or f"```python\n{source.rstrip()}\n```", source)]
        if not task_name:
            return _Row(task_name, [], "unknown task")
        attempts, reason = list[_Attempt](), "no source"
        for text, source in answers:
            if source:
                reason = self._length_reason(self._file.tasks[task_name].prompt, text)
                if reason is None:
                    attempts.append(_Attempt((task_name, source_key(source)), text, source))
        return _Row(task_name, attempts, None if attempts else reason, is_conversation)

    def _length_reason(self, *texts: str) -> str | None:
        token_count = sum(map(self._count_tokens, texts))
        if token_count < self._settings.shortest_tokens:
            return "too short"
        return "too long" if token_count > self._settings.longest_tokens else None

    # Conversations.

    def _conversations(self, rows: Sequence[_Row]) -> tuple[list[dict[str, Any]], SftCounts]:
        conversations: list[dict[str, Any]] = []
        reason_counts, turn_counts = Counter[str](), Counter[int]()
        wrong_by_task: dict[str, list[_Attempt]] = {}  # of rows so far, by task
        for row in rows:
            previous_attempts = [] if row.conversation else wrong_by_task.setdefault(row.task, [])
            reason = row.reason
            for attempt in row.attempts:
                reason = self._judged[attempt.key].reason
                if reason is None:
                    break
                if reason in _INSTRUCTIVE and attempt.key not in {other.key for other in previous_attempts}:
                    previous_attempts.append(attempt)
            else:
                attempt = None
            if attempt is not None and attempt.key in self._written:
                reason = "duplicate"
            elif attempt is not None:
                messages = self._messages(row.task, previous_attempts, attempt)
                conversations.append({"messages": messages, "task": row.task})
                turn_counts[len(messages) // 2] += 1
                previous_attempts.clear()
            if reason is not None:
                reason_counts[reason] += 1
        counts = SftCounts(
            rows=len(rows),
            written=len(conversations),
            left_out={reason: reason_counts[reason] for reason in REASONS if reason in reason_counts},
            turns={str(count): turn_counts[count] for count in sorted(turn_counts)},
            settings=self._settings,
        )
        return conversations, counts

    def _messages(self, task: str, previous: Sequence[_Attempt], good: _Attempt) -> list[dict[str, str]]:
        """The conversation that ends with ``good``, preceded by as many of the latest ``previous`` answers as fit."""
        prompt = self._file.tasks[task].prompt
        attempts_unused_so_far = [attempt for attempt in previous if attempt.key not in self._used]
        for first_index in range(
            max(0, len(attempts_unused_so_far) - self._settings.turns + 1), len(attempts_unused_so_far) + 1
        ):
            messages = [{"role": "user", "content": prompt}]
            for attempt in attempts_unused_so_far[first_index:]:
                feedback_text = feedback(self._judged[attempt.key].evaluation)
                messages += [{"role": "assistant", "content": attempt.text}, {"role": "user", "content": feedback_text}]
            messages.append({"role": "assistant", "content": good.text})
            if self._length_reason(*(message["content"] for message in messages)) is None:
                break
        self._written.add(good.key)
        self._used.update(attempt.key for attempt in attempts_unused_so_far[first_index:])
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
