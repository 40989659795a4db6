"""`headway kernels sft-data`: conversations for `headway sft` from candidates that an evaluator finds good."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headway.kernels.jobs.evaluate import JudgeSettings, answer_source, answer_text, submission_of
from headway.kernels.jobs.judging import JudgeAll, require_some
from headway.kernels.jobs.task_files import KernelTaskFile
from headway.kernels.prompts import feedback, source_in
from headway.records.errors import ConfigurationError
from headway.records.kernels import KernelEvaluation
from headway.tasks.rows import read_objects, require_messages

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
_INSTRUCTIVE = ("not compiled", "wrong", "slow")  # the attempts that may stand before a good one


class SftSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions of a conversation for training."""

    need: str = "correct"  # one of NEEDS: what its last answer must be
    least_speedup: float = 1.0  # with "faster": above it
    seeds: int = 3  # of the unit check: from 42 upwards, each with so many ...
    trials: int = 5  # ... trials
    shortest_tokens: int = 100  # of a whole conversation, without the chat template's own ...
    longest_tokens: int = 8192  # ... tokens
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
    key: tuple[str, str]  # its task, and what is equal for sources that differ by layout and comments
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
    """Makes conversations out of the rows of a file.

    A row is a candidate, {"task", "source" or "text"}, or a conversation of several, {"messages"}. It is written if one
    of its answers passes, as the prompt and that answer; the wrong answers before it, a conversation's own or earlier
    rows' for the same task, become the turns before, each with the evaluator's feedback. Invariant: a source is written
    once as an answer that passes, and once at most as one that doesn't. Example, of four rows for a task, wrong, right,
    another right, wrong: [wrong, feedback, right] and [right] are written; the two wrong rows count as left out.
    """

    def __init__(self, book: KernelTaskFile, settings: SftSettings, count_tokens: CountTokens) -> None:
        self._book = book
        self._settings = settings
        self._count_tokens = count_tokens
        self._judged: dict[tuple[str, str], _Judged] = {}  # by an attempt's key
        self._written: set[tuple[str, str]] = set()
        self._used: set[tuple[str, str]] = set()  # as wrong answers

    async def make(self, path: Path, judge: JudgeAll) -> tuple[list[dict[str, Any]], SftCounts]:
        """Conversations as rows of `headway sft`, in the file's order, and the counts. Raises ConfigurationError for a
        malformed file, HeadwayError where nothing can be evaluated."""
        rows = [self._read(row, where) for where, row in read_objects(path)]
        if not rows:
            raise ConfigurationError(f"{path}: no rows; valid: one JSON object a line")
        left, chosen = {one.key: one.source for row in rows for one in row.attempts}, self._settings
        for number in range(1 if chosen.need == "compiled" else chosen.seeds):
            timed = chosen.need == "faster" and number == 0
            settings = JudgeSettings(
                correct_trials=chosen.trials, timed=timed, seed=42 + number, timeout_s=chosen.timeout_s
            )
            results = await judge([submission_of(self._book, key[0], left[key], settings) for key in left])
            if number == 0:
                require_some(results)
            found = {key: _Judged(one, self._reason(one, timed)) for key, one in zip(left, results, strict=True)}
            self._judged |= {key: one for key, one in found.items() if number == 0 or one.reason is not None}
            left = {key: source for key, source in left.items() if found[key].reason is None}
        return self._conversations(rows)

    @property
    def missing(self) -> list[tuple[str, str]]:
        """Task of each candidate that wasn't evaluated, and why not."""
        every = ((task, one.evaluation.infrastructure) for (task, _), one in self._judged.items())
        return [(task, why) for task, why in every if why]

    def _reason(self, found: KernelEvaluation, timed: bool) -> str | None:
        reasons = {
            "not evaluated": bool(found.infrastructure),
            "cheat": bool(found.cheat),
            "not compiled": not found.compiled,
            "wrong": self._settings.need != "compiled" and not found.correct,
            "untimed": timed and found.speedup is None,
            "slow": timed and (found.speedup or 0.0) <= self._settings.least_speedup,
        }
        return next((reason for reason, is_true in reasons.items() if is_true), None)

    # Rows.

    def _read(self, row: dict[str, Any], where: str) -> _Row:
        task = self._book.name_of(row, where)
        is_conversation = "messages" in row
        if is_conversation:
            messages = require_messages(row["messages"], "messages", where)
            said = [one["content"] for one in messages if one["role"] == "assistant"]
            texts = [(text, source_in(text)) for text in said]
        else:
            source = answer_source(row, where)
            texts = [(answer_text(row) or f"```python\n{source.rstrip()}\n```", source)]
        if not task:
            return _Row(task, [], "unknown task")
        attempts, reason = list[_Attempt](), "no source"
        for text, source in texts:
            if source:
                reason = self._length_reason(self._book.tasks[task].prompt, text)
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
            before = [] if row.conversation else wrong.setdefault(row.task, [])
            reason = row.reason
            for one in row.attempts:
                reason = self._judged[one.key].reason
                if reason is None:
                    break
                if reason in _INSTRUCTIVE and one.key not in {other.key for other in before}:
                    before.append(one)
            else:
                one = None
            if one is not None and one.key in self._written:
                reason = "duplicate"
            elif one is not None:
                messages = self._messages(row.task, before, one)
                written.append({"messages": messages, "task": row.task})
                turns[len(messages) // 2] += 1
                before.clear()
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

    def _messages(self, task: str, before: Sequence[_Attempt], good: _Attempt) -> list[dict[str, str]]:
        """The conversation that ends with ``good``, with as many of the answers before as fit, the last ones."""
        prompt = self._book.tasks[task].prompt
        fresh = [one for one in before if one.key not in self._used]
        for first in range(max(0, len(fresh) - self._settings.turns + 1), len(fresh) + 1):
            messages = [{"role": "user", "content": prompt}]
            for one in fresh[first:]:
                said = feedback(self._judged[one.key].evaluation)
                messages += [{"role": "assistant", "content": one.text}, {"role": "user", "content": said}]
            messages.append({"role": "assistant", "content": good.text})
            if self._length_reason(*(one["content"] for one in messages)) is None:
                break
        self._written.add(good.key)
        self._used.update(one.key for one in fresh[first:])
        return messages


def source_key(source: str) -> str:
    """A text that is equal for sources that differ by layout, comments and docstrings alone; within texts, C++ say, by
    white space alone."""
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
