"""Evaluation of many submissions by one evaluator: a service's client, or this machine's own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from headway.kernels.client import KernelRequestRefused, KernelServiceFailed
from headway.records.errors import ConfigurationError, HeadwayError
from headway.records.kernels import KernelEvaluation, KernelSubmission
from headway.records.sandbox import SandboxError

LONGEST_SOURCE = 1 << 20  # characters
_NOT_ADMITTED = (401, 403)
OnJudged = Callable[[int, int], None]  # evaluations done, of all
JudgeAll = Callable[[Sequence[KernelSubmission]], Awaitable[list[KernelEvaluation]]]  # `judge_all` by some judge


class SubmissionJudge(Protocol):
    """Evaluates submissions (KernelClient, KernelEvaluator)."""

    async def evaluate(self, submission: KernelSubmission) -> KernelEvaluation: ...


async def judge_all(
    judge: SubmissionJudge,
    submissions: Sequence[KernelSubmission],
    *,
    concurrent: int,
    on_judged: OnJudged = lambda done, total: None,
) -> list[KernelEvaluation]:
    """Evaluations in the order of the submissions, ``concurrent`` at once. One that fails as infrastructure, or that
    its task makes impossible, says so in ``infrastructure``. Raises HeadwayError for a key that a service refuses."""
    found: dict[int, KernelEvaluation] = {}
    waiting = iter(range(len(submissions)))

    async def work() -> None:
        for index in waiting:
            found[index] = await _evaluation(judge, submissions[index])
            on_judged(len(found), len(submissions))

    try:
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(concurrent, len(submissions))):
                workers.create_task(work())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [found[index] for index in range(len(submissions))]


def require_some(results: Sequence[KernelEvaluation]) -> None:
    """Raise HeadwayError if there are evaluations, all of which failed as infrastructure."""
    if results and all(one.infrastructure for one in results):
        raise HeadwayError(f"none of {len(results)} evaluations succeeded; the first: {results[0].infrastructure}")


async def _evaluation(judge: SubmissionJudge, submission: KernelSubmission) -> KernelEvaluation:
    if len(submission.source) > LONGEST_SOURCE:
        text = f"source of {len(submission.source):,} characters; at most {LONGEST_SOURCE:,} are evaluated"
        return KernelEvaluation(fault="unknown", text=text)
    try:
        return await judge.evaluate(submission)
    except (KernelRequestRefused, KernelServiceFailed, ConfigurationError, SandboxError) as error:
        if isinstance(error, KernelRequestRefused) and error.status in _NOT_ADMITTED:
            raise
        return KernelEvaluation(infrastructure=str(error))
