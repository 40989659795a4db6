"""Whether a run whose groups end untrained will ever train, and what their rewards say about its tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from headway.records.rollout import Failure


class FailedAlike(msgspec.Struct, frozen=True, kw_only=True):
    """The failure that all rollouts of a run share so far: one place in the user's code, or else one cause.

    A rollout that didn't fail, or failed otherwise, or for want of infrastructure, which may come back, ends that for
    good.
    """

    what: str = ""  # the place, or the cause, of all failures
    groups: int = 0
    differ: bool = False

    def after(self, failures: Iterable[Failure | None], task_id: str = "") -> FailedAlike:
        """Take in another group, of whose rollouts these are the failures; None: a rollout that didn't fail.
        ``task_id``: of its task; causes that differ in that alone are one."""
        found = {"" if f is None or f.infrastructure else f.place or f.cause for f in failures}
        if task_id:
            found = {what.replace(task_id, "…") for what in found}
        what = found.pop() if len(found) == 1 else ""
        if self.differ or not what or self.what not in ("", what):
            return FailedAlike(differ=True)
        return FailedAlike(what=what, groups=self.groups + 1)

    def hopeless(self, groups_per_step: int) -> bool:
        """Whether two steps' worth of groups, and 16 at least, came to nothing else."""
        return self.groups >= max(2 * groups_per_step, 16)


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
