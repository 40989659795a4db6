"""Detects runs that can't train: rollouts with one common failure, or groups that all end untrained."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from headway.records.rollout import Failure
from headway.records.task import Task

FAILED_SHARE = 0.9  # of a window's rollouts with the same failure, from which on a run can't train
_MIN_TEXT_CHARACTERS = 4  # of a task's texts that are replaced in causes: shorter ones are words of any message
_VARIABLE = re.compile(r"""(?<!\w)'[^']*'(?!\w)|"[^"]*"|`[^`]*`|[\w.+-]*\d[\w.+-]*""")  # quoted; with a digit


def failure_kind(failure: Failure, task: Task | None = None) -> str:
    """Return the kind of a failure: the location in the user's code that raised it, else its normalised cause.

    Parts of the cause that may be specific to ``task`` are removed: quoted texts, words with digits, the task's id,
    prompt, answer and further columns."""
    if failure.raised_at:
        return failure.raised_at
    cause = failure.cause
    for task_text in () if task is None else _task_texts(task):
        if task_text in cause:
            cause = re.sub(rf"(?<!\w){re.escape(task_text)}(?!\w)", "…", cause)
    return _VARIABLE.sub("…", cause)


def _task_texts(task: Task) -> list[str]:
    field_values: tuple[Any, ...] = (task.task_id, task.prompt, task.answer, *task.metadata.values())
    texts = {field for field in field_values if isinstance(field, str) and len(field) >= _MIN_TEXT_CHARACTERS}
    return sorted(texts, key=len, reverse=True)  # the longest first: one may contain another


class CommonFailureDetector(msgspec.Struct, frozen=True, kw_only=True):
    """Failures of a run's last rollouts, from which a defect that nearly all of them meet is found early.

    The window is two steps' worth of groups, 16 at least. A failure of the infrastructure, which may recover, isn't
    counted. Once a step's worth of groups was accepted the detector stops: a later outage is the concern of
    `GIVE_UP_AFTER_BATCHES` of the orchestrator.
    """

    groups_per_step: int
    # for each group its rollouts' failures: kind ("": none that counts) and cause
    window: tuple[tuple[tuple[str, str], ...], ...] = ()
    accepted: int = 0  # groups

    def after(
        self, failures: Iterable[Failure | None], task: Task | None = None, *, accepted: bool = False
    ) -> CommonFailureDetector:
        """Return the detector after another group of ``task`` with these ``failures``, None for each that succeeded."""
        accepted_count = min(self.accepted + accepted, self.groups_per_step)
        if accepted_count == self.groups_per_step:
            return CommonFailureDetector(groups_per_step=self.groups_per_step, accepted=accepted_count)
        counted = (None if failed is None or failed.infrastructure else failed for failed in failures)
        pairs = tuple(("", "") if failed is None else (failure_kind(failed, task), failed.cause) for failed in counted)
        window = (*self.window, pairs)[-self._size :]
        return CommonFailureDetector(groups_per_step=self.groups_per_step, window=window, accepted=accepted_count)

    @property
    def _size(self) -> int:
        return max(2 * self.groups_per_step, 16)

    @property
    def unrecoverable(self) -> str:
        """Sentence with the number of rollouts that have the same failure, and the last one's cause.

        It is "" while the window isn't full, or they are less than FAILED_SHARE of it."""
        failures = [failure for group in self.window for failure in group]
        kind_counts = Counter(kind for kind, _ in failures if kind).most_common(1)
        if len(self.window) < self._size or not kind_counts or kind_counts[0][1] < FAILED_SHARE * len(failures):
            return ""
        kind, count = kind_counts[0]
        cause = next(cause for other_kind, cause in reversed(failures) if other_kind == kind)
        return f"{count:,} of the {len(failures):,} rollouts of the last {len(self.window)} groups failed with: {cause}"


def mostly_solved(group_counts: Mapping[tuple[float, bool], int]) -> bool:
    """Return whether most groups in which all attempts got one reward were solved.

    ``group_counts``: number of groups by that reward and whether it counts as solved."""
    return 2 * sum(groups for (_, is_solved), groups in group_counts.items() if is_solved) > sum(group_counts.values())


def same_reward(group_counts: Mapping[tuple[float, bool], int]) -> str:
    """Return a phrase on the common reward of all attempts at each task, and advice. ``group_counts`` as above."""
    if len(group_counts) == 1:
        ((reward, _),) = group_counts
        rewards_text = f"{reward:g}"
    else:
        largest_counts = sorted(group_counts.items(), key=lambda pair: -pair[1])[:3]
        rewards_text = ", ".join(f"{reward:g} in {group_count} groups" for (reward, _), group_count in largest_counts)
    if mostly_solved(group_counts):
        advice = "most tasks are solved already: use harder tasks"
    elif any(is_solved for _, is_solved in group_counts):
        advice = "some tasks are always solved, the others never: use tasks in between"
    else:
        advice = "no task was solved: run `headway sft` first, or use easier tasks or partial rewards"
    return f"all attempts at each task got the same reward, {rewards_text} ({advice})"
