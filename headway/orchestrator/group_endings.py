"""Ends a group's rollouts in the accounting and the length statistics, as the buffer's row of the group does."""

from __future__ import annotations

from headway.orchestrator.context import RunContext
from headway.orchestrator.state import RunningGroup
from headway.records.rollout import Ending, FinishedGroup, Rollout


def end_removed_members(run: RunContext, group: FinishedGroup) -> None:
    """End the failed, filtered and pruned members of a group that has just finished. The buffer ended them when it
    committed the group."""
    for rollout in group.rollouts:
        if rollout.ended is not None:
            ending, reason = rollout.ended
            boundary = rollout.failure.boundary if rollout.failure is not None else None
            run.state.accounting.end(group.group.index, rollout.member, ending, reason, boundary)
            _count_length(run, rollout, ending)


def end_finished(run: RunContext, group: FinishedGroup, ending: Ending, reason: str) -> None:
    """End the valid members of a finished group as ``ending``; the others ended when it finished. The caller ends the
    group's row in the buffer."""
    for rollout in group.valid:
        run.state.accounting.end(group.group.index, rollout.member, ending, reason)
        _count_length(run, rollout, ending)
    run.meter.ended(group.group, ending, run.state.version, finished=True)


def _count_length(run: RunContext, rollout: Rollout, ending: Ending) -> None:
    is_complete = rollout.finish_reason in ("stop", "length")
    run.meter.rollout_ended(rollout.group, ending, rollout.response_tokens, complete=is_complete)


def end_running(run: RunContext, entry: RunningGroup, ending: Ending, reason: str) -> None:
    """End a group some of whose members still generate, and cancel these. Each member counts with the length that was
    streamed; the generator may be some tokens further."""
    group = entry.group
    lengths = {m: entry.lengths.get(m) or (run.rollouts.reached(group.index, m), False) for m in range(group.size)}
    if entry.runner is not None:
        entry.runner.cancel()
    run.state.accounting.end_group(group.index, ending, reason)
    for length, is_complete in lengths.values():
        run.meter.rollout_ended(group.index, ending, length, complete=is_complete)
    run.meter.ended(group, ending, run.state.version, finished=False)
    run.buffer.end_group(group.index, ending, reason, lengths)
