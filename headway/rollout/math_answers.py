"""Comparing mathematical answers with the package math-verify: LaTeX and plain expressions, by value.

Its own time limits are signals, which work in no thread but the first and raise past every ``except Exception``; they
are switched off here, because the verifier's process has a watchdog of its own (service.py). What it swallows by
default is asked for instead, so that "no answer found", "not equal" and a reference that is no mathematics differ.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from typing import Any

from headway.records.task import Task
from headway.rollout.extraction import Extract, extract_answer
from headway.runtime.imports import import_extra

_LONGEST_TEXT = 4000  # characters at the end of a response that are searched: the search is quadratic in digits
_DELIMITERS = ("$", "\\boxed", "\\fbox", "\\(", "\\[", "\\begin")
_COMMAND = re.compile(r"\\(?:text|mathrm|operatorname|mbox)\s*\{[^{}]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{3,}")
_TWO_LETTERS = re.compile(r"[A-Za-z]{2}")
_MOST_WORDS = 2  # in a reference without delimiters; more are a sentence, which would parse as a product of letters

Parse = Callable[[str], list[Any]]


def math_scorer(extract: Extract, float_rounding: int, strict: bool) -> Callable[[Task, str], dict[str, Any]]:
    """A scorer: 1 when the answer in the response equals the task's, else 0, with the reason in the detail.

    Raises ConfigurationError when math-verify isn't installed. The scorer raises ValueError, naming the task, when
    the *reference* can't be parsed: that is a fault of the data and never a reward.
    """
    package = import_extra("math_verify", "math", "verifier.name = 'math'")
    for module in ("parser", "grader"):  # each warns once that somebody else must keep the time: somebody does
        logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)

    def parse(text: str) -> list[Any]:
        return package.parse(text, parsing_timeout=None, fallback_mode="no_fallback")

    @functools.lru_cache(maxsize=1024)
    def reference_of(answer: str) -> list[Any]:
        return parse(_reference_text(answer))

    def score(task: Task, response: str) -> dict[str, Any]:
        reference = reference_of(task.answer)
        if not reference:
            raise ValueError(
                f"task {task.task_id}: its answer {task.answer[:80]!r} is no mathematical expression that math-verify "
                "can parse (a LaTeX or plain expression; of a worked solution, what follows the last ####, or \\boxed)"
            )
        found = extract_answer(response, extract)
        if found is None:
            return {"reward": 0.0, "reason": f"the response has no answer (extract = {extract!r})"}
        answer = parse(_response_text(found, whole=extract == "all"))
        if not answer:
            return {"reward": 0.0, "reason": "no mathematical expression found in the response"}
        try:
            equal = package.verify(
                reference,
                answer,
                float_rounding=float_rounding,
                strict=strict,
                timeout_seconds=None,
                raise_on_error=True,
            )
        except Exception as error:  # sympy may raise anything for what a policy writes; the reference has parsed
            return {"reward": 0.0, "reason": f"can't be compared: {type(error).__name__}: {str(error)[:200]}"}
        return {"reward": 1.0} if equal else {"reward": 0.0, "reason": "not equal to the reference"}

    return score


def _reference_text(answer: str) -> str:
    """The reference as one expression: "3x+5" would otherwise be read as its first number, 3."""
    text = answer.rpartition("####")[2].strip()
    if not text or any(mark in text for mark in _DELIMITERS):
        return text
    return "" if len(_WORD.findall(_COMMAND.sub(" ", text))) > _MOST_WORDS else _boxed(text)


def _response_text(found: str, whole: bool) -> str:
    """What is searched. A bare expression is taken as one, as the reference is; ``whole``: ``found`` may be prose, of
    which the last box is the answer (math-verify would take several together for a set)."""
    boxed = extract_answer(found, "boxed") if whole else None
    if boxed is not None:
        return _boxed(boxed)
    text = found.strip()
    if len(text) > _LONGEST_TEXT:
        text = text[-_LONGEST_TEXT:]
        text = text[text.find("\n") + 1 :]  # math in a line is delimited in pairs: begin with a whole one
    if any(mark in text for mark in _DELIMITERS) or "\n" in text or not text:
        return text
    return text if whole and _TWO_LETTERS.search(_COMMAND.sub(" ", text)) else _boxed(text)


def _boxed(text: str) -> str:
    return f"\\boxed{{{text}}}"
