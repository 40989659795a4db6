"""Scores of a set of answers to kernel tasks: pass@k and fast_p with intervals, outcomes, speed-ups."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from headway.control.estimates import pass_share
from headway.control.summaries import histogram_in_tenths, mean_interval, quantile
from headway.records.kernels import KernelEvaluation

FASTER_THAN = (0.8, 1.0, 1.5, 2.0)  # p of fast_p
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_Z = 1.959964  # 97.5 % quantile of the normal distribution


class JudgedTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task and the evaluations of its candidates, failures of the infrastructure included."""

    name: str
    level: int
    evaluations: tuple[KernelEvaluation, ...] = ()

    @property
    def valid(self) -> list[KernelEvaluation]:
        return [evaluation for evaluation in self.evaluations if not evaluation.infrastructure]


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over tasks, with the 95 % interval over tasks."""

    value: float
    interval: tuple[float, float]
    tasks: int  # that it is the mean over: those with enough evaluations


class SpeedupSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Natural logarithms of the speed-ups of correct candidates."""

    count: int
    mean: float  # exp of it: the geometric mean
    quantiles: dict[str, float]  # QUANTILES
    histogram: dict[str, int]  # value rounded down to tenths -> count


class CandidateScores(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of the candidates of a set of tasks. Only evaluated candidates count; ``missing`` and ``unanswered`` count
    the others.

    ``fast``: the mean over tasks of the share of a task's candidates that are correct and have a speed-up above p; with
    one candidate per task it is KernelBench's fast_p. A correct candidate without a speed-up (``untimed``) counts as no
    faster.
    """

    tasks: int
    candidates: int  # evaluated
    missing: int  # not evaluated, by a failure of the infrastructure
    unanswered: int  # tasks without any candidate
    untimed: int  # correct, without a speed-up
    compiled: dict[str, Share]  # by k: pass@k
    correct: dict[str, Share]
    fast: dict[str, Share]  # by p; {}: nothing was to be timed
    outcomes: dict[str, int]  # correct, wrong, cheat, "not compiled" or the class of the fault -> candidates
    speedups: SpeedupSummary | None  # None: none was measured


def score_tasks(judged: Sequence[JudgedTask], ks: Sequence[int], *, timed: bool = True) -> CandidateScores:
    """Score a set of tasks. pass@k leaves out tasks with fewer than k evaluated candidates (see `Share.tasks`), and any
    k that no task reaches. ``timed``: whether timing was requested."""
    valid_by_task = [task.valid for task in judged]
    valid = [evaluation for evaluations in valid_by_task for evaluation in evaluations]
    log_speedups = [math.log(evaluation.speedup) for evaluation in valid if evaluation.correct and evaluation.speedup]
    return CandidateScores(
        tasks=len(judged),
        candidates=len(valid),
        missing=sum(len(task.evaluations) for task in judged) - len(valid),
        unanswered=sum(not task.evaluations for task in judged),
        untimed=sum(evaluation.correct and evaluation.speedup is None for evaluation in valid),
        compiled=_pass_at(valid_by_task, ks, compiles),
        correct=_pass_at(valid_by_task, ks, lambda evaluation: evaluation.correct),
        fast={f"{p:g}": share for p in FASTER_THAN if (share := _fast(valid_by_task, p))} if timed else {},
        outcomes=dict(Counter(evaluation.outcome for evaluation in valid).most_common()),
        speedups=_summary(log_speedups) if log_speedups else None,
    )


def scores_by_level(
    judged: Sequence[JudgedTask], ks: Sequence[int], *, timed: bool = True
) -> dict[str, CandidateScores]:
    """Scores of each level's tasks, the lowest level first."""
    return {
        str(level): score_tasks([task for task in judged if task.level == level], ks, timed=timed)
        for level in sorted({task.level for task in judged})
    }


def compiles(evaluation: KernelEvaluation) -> bool:
    """Whether a candidate compiles and is no cheat."""
    return evaluation.compiled and not evaluation.cheat


def mean_over_tasks(values: Sequence[float]) -> Share | None:
    """Mean over tasks of a value in 0..1; None: no task. The interval is a bootstrap over tasks with a fixed seed, or
    Wilson's if all values are 0 or all are 1, which resampling can't vary."""
    if not values:
        return None
    count, mean = len(values), math.fsum(values) / len(values)
    if mean in (0.0, 1.0):
        margin = _Z**2 / (count + _Z**2)
        low, high = (0.0, margin) if mean == 0.0 else (1.0 - margin, 1.0)
    else:
        low, high = mean_interval(values)
    return Share(value=mean, interval=(low, high), tasks=count)


def _pass_at(
    valid: Sequence[Sequence[KernelEvaluation]], ks: Sequence[int], passes: Callable[[KernelEvaluation], bool]
) -> dict[str, Share]:
    passed_and_total = [(sum(map(passes, evaluations)), len(evaluations)) for evaluations in valid]
    shares = {str(k): mean_over_tasks([pass_share(c, n, k) for c, n in passed_and_total if n >= k]) for k in ks}
    return {k: share for k, share in shares.items() if share is not None}


def _fast(valid: Sequence[Sequence[KernelEvaluation]], p: float) -> Share | None:
    return mean_over_tasks(
        [sum(e.correct and (e.speedup or 0.0) > p for e in group) / len(group) for group in valid if group]
    )


def _summary(logs: Sequence[float]) -> SpeedupSummary:
    return SpeedupSummary(
        count=len(logs),
        mean=math.fsum(logs) / len(logs),
        quantiles={f"{q:g}": quantile(logs, q) for q in QUANTILES},
        histogram=histogram_in_tenths(logs),
    )
