"""Evaluation of many submissions by one evaluator: a client of kernel services, or this machine's evaluator."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from headway.kernels.client import KernelRequestRefused, KernelServiceFailed
from headway.records.errors import ConfigurationError, HeadwayError
from headway.records.kernels import KernelEvaluation, KernelSubmission
from headway.records.sandbox import SandboxError

MAX_SOURCE_CHARACTERS = 1 << 20  # characters
_UNAUTHORIZED = (401, 403)
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
    """Evaluate submissions, ``concurrent`` at once; the evaluations have the submissions' order. An infrastructure
    failure, or a task that can't be evaluated, is an evaluation with ``infrastructure``. Raises HeadwayError for a key
    that a service refuses."""
    evaluation_by_index: dict[int, KernelEvaluation] = {}
    pending_indices = iter(range(len(submissions)))

    async def work() -> None:
        for index in pending_indices:
            evaluation_by_index[index] = await _evaluation(judge, submissions[index])
            on_judged(len(evaluation_by_index), len(submissions))

    try:
        async with asyncio.TaskGroup() as task_group:
            for _ in range(min(concurrent, len(submissions))):
                task_group.create_task(work())
    except ExceptionGroup as exception_group:
        raise exception_group.exceptions[0] from None
    return [evaluation_by_index[index] for index in range(len(submissions))]


def require_success(results: Sequence[KernelEvaluation]) -> None:
    """Raise HeadwayError if all evaluations, at least one, failed as infrastructure."""
    if results and all(evaluation.infrastructure for evaluation in results):
        raise HeadwayError(f"none of {len(results)} evaluations succeeded; the first: {results[0].infrastructure}")


async def _evaluation(judge: SubmissionJudge, submission: KernelSubmission) -> KernelEvaluation:
    if len(submission.source) > MAX_SOURCE_CHARACTERS:
        text = f"source of {len(submission.source):,} characters; at most {MAX_SOURCE_CHARACTERS:,} are evaluated"
        return KernelEvaluation(fault="unknown", text=text)
    try:
        return await judge.evaluate(submission)
    except (KernelRequestRefused, KernelServiceFailed, ConfigurationError, SandboxError) as error:
        if isinstance(error, KernelRequestRefused) and error.status in _UNAUTHORIZED:
            raise
        return KernelEvaluation(infrastructure=str(error))
