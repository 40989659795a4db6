"""Ending a group everywhere at once: books, length statistics and buffer say the same."""

from __future__ import annotations

from headway.orchestrator.context import RunContext
from headway.records.rollout import Ending, FinishedGroup, Group


def end_finished(run: RunContext, group: FinishedGroup, ending: Ending, reason: str) -> None:
    """End the members of a finished group: the valid ones as ``ending``, the failed ones as failed."""
    index = group.group.index
    for rollout in group.rollouts:
        failure = rollout.failure
        complete = rollout.finish_reason in ("stop", "length")
        length = len(rollout.response_ids)
        if failure is None:
            run.state.books.end(index, rollout.member, ending, reason)
            run.meter.length_bias.end(index, ending, length, complete=complete)
        else:
            run.state.books.end(index, rollout.member, "failed", failure.boundary, failure.boundary)
            run.meter.length_bias.end(index, "failed", length, complete=complete)


def end_running(run: RunContext, group: Group, ending: Ending, reason: str) -> None:
    """End a group whose members are cancelled. What they had reached is not known here, so their lengths
    count as 0: the scheduling part of the length bias is then at least the share that was cut."""
    run.state.books.end_group(group.index, ending, reason)
    run.meter.length_bias.end(group.index, ending, 0, complete=False, count=group.size)
