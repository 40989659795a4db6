"""Scorers: verifiers with bound parameters, as functions of a task and a response; some score several at once."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from headway.records.rollout import Verdict
from headway.records.task import Task
from headway.rollout.verification.verdicts import failed_verdict, to_verdict
from headway.runtime.hooks import error_text, is_infrastructure, storable

Scorer = Callable[[Task, str], object]

_LONGEST_DETAIL = 4000  # characters of a traceback that are kept: its end says what happened


@runtime_checkable
class ManyScorer(Protocol):
    """A scorer that mostly waits for external services, and therefore scores several responses at once."""

    @property
    def concurrency(self) -> int:
        """The number of responses that are scored at once in one process."""
        ...

    @property
    def longest_s(self) -> float:
        """The longest time of one response."""
        ...

    def __call__(self, task: Task, response: str) -> object: ...

    def score_all(self, task: Task, responses: Sequence[str]) -> list[Verdict]:
        """Return one verdict per response, in order; raises nothing for a response that can't be scored."""
        ...


def score_each(scorer: Scorer, task: Task, responses: Sequence[str]) -> list[Verdict]:
    """Score each response, several at once where ``scorer`` can; raises nothing."""
    if isinstance(scorer, ManyScorer):
        return scorer.score_all(task, responses)
    return [score_guarded(scorer, task, response) for response in responses]


def longest_s(scorer: Scorer) -> float:
    """Return a scorer's longest time of one response by its own limits; 0 where it has none."""
    return scorer.longest_s if isinstance(scorer, ManyScorer) else 0.0


def score_guarded(score: Callable[[Task, str], object], task: Task, response: str) -> Verdict:
    """Score one response; the verifier's exceptions become failed Verdicts with the traceback in detail.

    Infrastructure failures (`is_infrastructure`) are worth a retry; other exceptions are defects of the verifier."""
    started_s = time.monotonic()
    try:
        verdict = to_verdict(score(task, response))
    except (Exception, SystemExit) as error:  # the reward boundary's one capture point
        detail = storable("".join(traceback.format_exception(error)))[-_LONGEST_DETAIL:]
        cause = storable(f"the verifier raised {error_text(error)}")
        verdict = failed_verdict(cause[:300], infrastructure=is_infrastructure(error), detail=detail)
    return msgspec.structs.replace(verdict, verify_s=time.monotonic() - started_s)
