"""Computes the solve rate of each task source, with standard errors clustered by task, and the scores of kernels."""

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
    """Compute each source's score from (source label, rollout) pairs, in the order of appearance. Rollouts that failed
    don't count. {} for fewer than two sources."""
    outcomes_by_label: dict[str, list[tuple[int, float]]] = {}
    for label, rollout in attempts:
        outcomes = outcomes_by_label.setdefault(label, [])
        if rollout.failure is None:
            outcomes.append((rollout.group, float(rollout.solved)))
    if len(outcomes_by_label) < 2:
        return {}
    return {
        label: SourceScore(
            tasks=len({group for group, _ in outcomes}),
            samples=len(outcomes),
            solve_rate=sum(solved for _, solved in outcomes) / max(len(outcomes), 1),
            standard_error=clustered_standard_error(outcomes),
        )
        for label, outcomes in outcomes_by_label.items()
    }


def kernel_scores(groups: Sequence[FinishedGroup], ks: Sequence[int] = ()) -> KernelScores | None:
    """Compute the scores of the kernels in finished groups, from the answers that were kept; None without any."""
    kernels = [[answers for rollout in group.valid if (answers := _answers(rollout))] for group in groups]
    all_answers = [answer for members in kernels for answers in members for answer in answers]
    if not all_answers:
        return None
    spent_s = Counter[str]()
    for answer in all_answers:
        spent_s.update(answer.evaluation_s)
    builds = [(sum(any(a.compiled for a in answers) for answers in members), len(members)) for members in kernels]
    passes = [(sum(any(a.correct for a in answers) for answers in members), len(members)) for members in kernels]
    return KernelScores(
        evaluations=len(all_answers),
        repeated=sum(answer.repeated for answer in all_answers),
        rewards=histogram_in_tenths(answer.reward for answer in all_answers),
        faults=dict(Counter(answer.fault for answer in all_answers if answer.fault)),
        compiled_at=pass_at(builds, ks),
        correct_at=pass_at(passes, ks),
        log_speedups=histogram_in_tenths(math.log(a.speedup) for a in all_answers if a.correct and a.speedup),
        wait_s=spent_s.pop("wait", 0.0),
        busy_s=sum(spent_s.values()),
    )


_KERNEL_SHARES: dict[str, Callable[[KernelAnswer], bool]] = {
    "compiles": lambda answer: answer.compiled and answer.fault != "cheat",
    "correct": lambda answer: answer.correct,
    "faster": lambda answer: answer.correct and (answer.speedup or 0.0) > 1.0,
}


def kernel_shares(rollouts: Sequence[Rollout]) -> dict[str, KernelShare]:
    """Compute the shares of rollouts with a kernel that compiles, is correct, or is faster than the reference. They are
    means over tasks with their 95 % intervals (`mean_over_tasks`). Rollouts that failed don't count; a rollout without
    any judged answer counts as none of the three. {} where no rollout has kernels."""
    valid = [rollout for rollout in rollouts if rollout.failure is None]
    answered = [(rollout.group, _answers(rollout)) for rollout in valid]
    if not any(KERNEL_ANSWERS in rollout.verdict for rollout in valid):
        return {}
    passed = {grade: [any(map(passes, answers)) for _, answers in answered] for grade, passes in _KERNEL_SHARES.items()}
    shares: dict[str, KernelShare] = {}
    for grade, flags in passed.items():
        flags_by_task: dict[int, list[bool]] = {}
        for (task, _), flag in zip(answered, flags, strict=True):
            flags_by_task.setdefault(task, []).append(flag)
        mean = mean_over_tasks([sum(task_flags) / len(task_flags) for task_flags in flags_by_task.values()])
        assert mean is not None
        shares[grade] = KernelShare(value=mean.value, interval=mean.interval, count=sum(flags), rollouts=len(flags))
    untimed_count = sum(
        not faster and any(answer.correct and answer.speedup is None for answer in answers)
        for (_, answers), faster in zip(answered, passed["faster"], strict=True)
    )
    return shares | {"faster": msgspec.structs.replace(shares["faster"], untimed=untimed_count)}


def _answers(rollout: Rollout) -> list[KernelAnswer]:
    try:
        return msgspec.convert(rollout.verdict.get(KERNEL_ANSWERS, []), list[KernelAnswer])
    except msgspec.ValidationError:  # a user's verifier uses this name for something else
        return []
