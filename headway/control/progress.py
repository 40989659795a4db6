"""Whether a run whose rollouts fail, or whose groups end untrained, will ever train, and what its rewards say about its
tasks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from headway.records.rollout import Failure
from headway.records.task import Task

FAILED_SHARE = 0.9  # of a window's rollouts that fail alike, from which on a run comes to nothing
_OWN_CHARACTERS = 4  # of a task's texts that are looked for in causes: shorter ones are words of any message
_VARIABLE = re.compile(r"""(?<!\w)'[^']*'(?!\w)|"[^"]*"|`[^`]*`|[\w.+-]*\d[\w.+-]*""")  # quoted; with a digit


def failure_kind(failure: Failure, task: Task | None = None) -> str:
    """The place in the user's code that raised a failure, or else its cause without what may be its ``task``'s own:
    quoted texts, words with digits, the task's id, prompt, answer and further columns. Failures of one kind are
    alike."""
    if failure.place:
        return failure.place
    cause = failure.cause
    for text in () if task is None else _own_texts(task):
        if text in cause:
            cause = re.sub(rf"(?<!\w){re.escape(text)}(?!\w)", "…", cause)
    return _VARIABLE.sub("…", cause)


def _own_texts(task: Task) -> list[str]:
    values: tuple[Any, ...] = (task.task_id, task.prompt, task.answer, *task.metadata.values())
    texts = {value for value in values if isinstance(value, str) and len(value) >= _OWN_CHARACTERS}
    return sorted(texts, key=len, reverse=True)  # the longest first: one may hold another


class FailedAlike(msgspec.Struct, frozen=True, kw_only=True):
    """Failures of a run's last rollouts, to find out soon that nearly all meet one defect.

    Over a window of two steps' worth of groups, 16 at least. A failure for want of infrastructure, which may come back,
    counts as none. Once a step's worth of groups was accepted nothing is looked for any more: what has worked may be
    out for a while, which `GIVE_UP_AFTER_BATCHES` of the orchestrator is for.
    """

    groups_per_step: int
    # of each group, its rollouts' failures: kind ("": none that counts) and cause
    window: tuple[tuple[tuple[str, str], ...], ...] = ()
    accepted: int = 0  # groups

    def after(
        self, failures: Iterable[Failure | None], task: Task | None = None, *, accepted: bool = False
    ) -> FailedAlike:
        """Take in another group of ``task``, of whose rollouts these are the failures; None: one that didn't fail."""
        count = min(self.accepted + accepted, self.groups_per_step)
        if count == self.groups_per_step:
            return FailedAlike(groups_per_step=self.groups_per_step, accepted=count)
        counted = (None if one is None or one.infrastructure else one for one in failures)
        group = tuple(("", "") if one is None else (failure_kind(one, task), one.cause) for one in counted)
        window = (*self.window, group)[-self._size :]
        return FailedAlike(groups_per_step=self.groups_per_step, window=window, accepted=count)

    @property
    def _size(self) -> int:
        return max(2 * self.groups_per_step, 16)

    @property
    def hopeless(self) -> str:
        """How many rollouts of the window failed alike, and the last one's cause, in words; "" while the window isn't
        full, or they are less than FAILED_SHARE of it."""
        every = [one for group in self.window for one in group]
        most = Counter(kind for kind, _ in every if kind).most_common(1)
        if len(self.window) < self._size or not most or most[0][1] < FAILED_SHARE * len(every):
            return ""
        kind, count = most[0]
        cause = next(cause for other, cause in reversed(every) if other == kind)
        return f"{count:,} of the {len(every):,} rollouts of the last {len(self.window)} groups failed alike: {cause}"


def mostly_solved(alike: Mapping[tuple[float, bool], int]) -> bool:
    """Whether most groups whose attempts got one reward were solved. ``alike``: how many groups by that reward, and
    whether it counts as solved."""
    return 2 * sum(groups for (_, solved), groups in alike.items() if solved) > sum(alike.values())


def same_reward(alike: Mapping[tuple[float, bool], int]) -> str:
    """Which reward all attempts at each task got, and what that says, in a phrase. ``alike`` as of `mostly_solved`."""
    if len(alike) == 1:
        ((reward, _),) = alike
        which = f"{reward:g}"
    else:
        counts = sorted(alike.items(), key=lambda one: -one[1])[:3]
        which = ", ".join(f"{reward:g} in {groups} groups" for (reward, _), groups in counts)
    if mostly_solved(alike):
        says = "most are solved already: harder tasks teach more"
    elif any(solved for _, solved in alike):
        says = "some always solved, the others never: tasks between"
    else:
        says = "never solved: `headway sft` first, easier tasks, partial rewards"
    return f"all attempts at each task got the same reward, {which} ({says})"
