"""Admission: computes how many groups may open so that none can exceed the staleness budget (design.md, rule 1).

AReaL's Eq. 3 in groups: a group may open while ``floor((N - 1) / groups_per_step) <= v + budget``, with v the
lowest version applied by any live replica and N = groups_per_step x completed steps + open groups, the new one
included. Solved for the number of open groups this is

    open <= groups_per_step x (v + budget + 1 - completed steps)

The bound is sufficient: the new group's first token has version >= v, so it may be trained up to step
v + budget, and from now to that step there are exactly ``v + budget + 1 - completed steps`` batches: all open
groups, the new one included, fit into them. ``staleness.OpenGroups.select`` preserves this from step to step.
"""

from __future__ import annotations


def credit(
    *,
    open_groups: int,
    completed_steps: int,
    applied_version: int,
    groups_per_step: int,
    budget: int,
    surplus_groups: int = 0,
) -> int:
    """Return how many groups may open now, >= 0.

    open_groups: groups running, parked, buffered or in the batch being trained (its step is not completed).
    completed_steps: training steps that made a version (a skipped step makes none).
    applied_version: lowest version applied by any live generator replica that takes requests, <= completed_steps.
    groups_per_step: groups of one batch. budget: eta, largest trajectory staleness trained on.
    surplus_groups: groups that may be open beyond that, because at the next batch all unfinished groups are discarded
    and those finished beyond the batch are kept only if they can be trained in time.

    Raises ValueError when an argument is out of range.
    """
    if groups_per_step < 1 or min(budget, open_groups, surplus_groups) < 0:
        counts_text = f"budget {budget}, open {open_groups}, surplus {surplus_groups}"
        raise ValueError(f"groups_per_step {groups_per_step} must be >= 1; {counts_text} must be >= 0")
    if not 0 <= applied_version <= completed_steps:
        raise ValueError(f"applied version {applied_version} is not within 0..{completed_steps} (completed steps)")
    capacity_groups = groups_per_step * (applied_version + budget + 1 - completed_steps)
    return max(0, capacity_groups + surplus_groups - open_groups)
