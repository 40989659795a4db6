"""How well each task source is solved, with the standard error that attempts at one task being alike calls for;
the scores of kernels."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec

from headway.control.estimates import clustered_standard_error, pass_at
from headway.control.summaries import histogram_in_tenths
from headway.kernels.scores import mean_over_tasks
from headway.records.kernels import KERNEL_ANSWERS, KernelAnswer
from headway.records.ledger import KernelScores, KernelShare, SourceScore
from headway.records.rollout import FinishedGroup, Rollout


def source_scores(attempts: Iterable[tuple[str, Rollout]]) -> dict[str, SourceScore]:
    """Label -> score of the (label of the task's source, rollout) pairs, in the order of their appearance; rollouts
    that failed don't count. Empty for fewer than two sources: nothing is told apart."""
    observed: dict[str, list[tuple[int, float]]] = {}
    for label, rollout in attempts:
        found = observed.setdefault(label, [])
        if rollout.failure is None:
            found.append((rollout.group, float(rollout.solved)))
    if len(observed) < 2:
        return {}
    return {
        label: SourceScore(
            tasks=len({group for group, _ in found}),
            samples=len(found),
            solve_rate=sum(solved for _, solved in found) / max(len(found), 1),
            standard_error=clustered_standard_error(found),
        )
        for label, found in observed.items()
    }


def kernel_scores(groups: Sequence[FinishedGroup], ks: Sequence[int] = ()) -> KernelScores | None:
    """Scores of the kernels in finished groups, by what their environment kept of each answer; None without any."""
    judged = [[answers for one in group.valid if (answers := _answers(one))] for group in groups]
    every = [answer for members in judged for answers in members for answer in answers]
    if not every:
        return None
    spent = Counter[str]()
    for answer in every:
        spent.update(answer.evaluation_s)
    compiled = [(sum(any(a.compiled for a in answers) for answers in members), len(members)) for members in judged]
    correct = [(sum(any(a.correct for a in answers) for answers in members), len(members)) for members in judged]
    return KernelScores(
        evaluations=len(every),
        repeated=sum(answer.repeated for answer in every),
        rewards=histogram_in_tenths(answer.reward for answer in every),
        faults=dict(Counter(answer.fault for answer in every if answer.fault)),
        compiled_at=pass_at(compiled, ks),
        correct_at=pass_at(correct, ks),
        log_speedups=histogram_in_tenths(math.log(one.speedup) for one in every if one.correct and one.speedup),
        wait_s=spent.pop("wait", 0.0),
        busy_s=sum(spent.values()),
    )


_KERNEL_SHARES: dict[str, Callable[[KernelAnswer], bool]] = {
    "compiles": lambda one: one.compiled and one.fault != "cheat",
    "correct": lambda one: one.correct,
    "faster": lambda one: one.correct and (one.speedup or 0.0) > 1.0,
}


def kernel_shares(rollouts: Sequence[Rollout]) -> dict[str, KernelShare]:
    """Shares of an evaluation's rollouts of which an answer compiles, is correct, is faster than the reference: means
    over tasks with their 95 % intervals (`mean_over_tasks`). Rollouts that failed don't count; one without any answer
    that was judged counts as none of the three. {} where no rollout has kernels."""
    judged = [(one.group, _answers(one)) for one in rollouts if one.failure is None]
    if not any(KERNEL_ANSWERS in one.verdict for one in rollouts if one.failure is None):
        return {}
    passed = {name: [any(map(passes, ones)) for _, ones in judged] for name, passes in _KERNEL_SHARES.items()}
    shares: dict[str, KernelShare] = {}
    for name, found in passed.items():
        by_task: dict[int, list[bool]] = {}
        for (task, _), true in zip(judged, found, strict=True):
            by_task.setdefault(task, []).append(true)
        mean = mean_over_tasks([sum(ones) / len(ones) for ones in by_task.values()])
        assert mean is not None
        shares[name] = KernelShare(value=mean.value, interval=mean.interval, count=sum(found), rollouts=len(found))
    untimed = sum(
        not faster and any(one.correct and one.speedup is None for one in ones)
        for (_, ones), faster in zip(judged, passed["faster"], strict=True)
    )
    return shares | {"faster": msgspec.structs.replace(shares["faster"], untimed=untimed)}


def _answers(rollout: Rollout) -> list[KernelAnswer]:
    try:
        return msgspec.convert(rollout.verdict.get(KERNEL_ANSWERS, []), list[KernelAnswer])
    except msgspec.ValidationError:  # a verifier of the user's own says something else under this name
        return []
