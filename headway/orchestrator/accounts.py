"""Ending a group everywhere at once: books, length statistics and buffer say the same."""

from __future__ import annotations

from headway.orchestrator.context import RunContext
from headway.records.rollout import Ending, FinishedGroup, Group, Rollout


def end_leavers(run: RunContext, group: FinishedGroup) -> None:
    """End the members that left a group that has just finished: failed, filtered or pruned. The buffer ended them as it
    committed the group."""
    for rollout in group.rollouts:
        if rollout.ended is not None:
            ending, reason = rollout.ended
            boundary = rollout.failure.boundary if rollout.failure is not None else None
            run.state.books.end(group.group.index, rollout.member, ending, reason, boundary)
            _enter_length(run, rollout, ending)


def end_finished(run: RunContext, group: FinishedGroup, ending: Ending, reason: str) -> None:
    """End the valid members of a finished group as ``ending``; the others ended when it finished."""
    for rollout in group.valid:
        run.state.books.end(group.group.index, rollout.member, ending, reason)
        _enter_length(run, rollout, ending)
    run.meter.ended(group.group, ending, run.state.version, finished=True)


def _enter_length(run: RunContext, rollout: Rollout, ending: Ending) -> None:
    complete = rollout.finish_reason in ("stop", "length")
    run.meter.length_bias.end(rollout.group, ending, len(rollout.response_ids), complete=complete)


def end_running(run: RunContext, group: Group, ending: Ending, reason: str) -> None:
    """End a group whose members are cancelled. What they had reached is not known here, so their lengths
    count as 0: the scheduling part of the length bias is then at least the share that was cut."""
    run.state.books.end_group(group.index, ending, reason)
    run.meter.length_bias.end(group.index, ending, 0, complete=False, count=group.size)
    run.meter.ended(group, ending, run.state.version, finished=False)
