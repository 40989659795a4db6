"""Draws groups and rollouts on the tracks of a trace."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from headway.records.trace import GroupEnd, GroupTrace, RolloutTrace, StepTrace
from headway.report.trace_events import TraceEvents

_GROUPS, _ROLLOUTS = "groups", "rollouts"


@dataclass(kw_only=True)
class GroupLife:
    """A group from its admission to its end. Times are seconds since 1970."""

    index: int
    start_s: float
    finished_s: float | None  # when it was verified; None: never
    end_s: float
    trace: GroupTrace | None
    offset: float  # seconds, to be added to the times in ``trace``
    ending: str = ""  # "": still buffered
    step: int = -1  # the step that trained it

    @classmethod
    def of(cls, line: GroupTrace | GroupEnd, offset: float, session_s: float) -> GroupLife:
        """Make the life of a group that has finished (GroupTrace), or ended unfinished (GroupEnd). ``session_s``: start
        of the session; a group admitted in an earlier session was generated again, so its life starts there."""
        trace = line if isinstance(line, GroupTrace) else None
        end_s = (line.finished_s if isinstance(line, GroupTrace) else line.time_s) + offset
        start_s, finished_s = min(max(line.admitted_s + offset, session_s), end_s), end_s if trace else None
        return cls(index=line.index, start_s=start_s, finished_s=finished_s, end_s=end_s, trace=trace, offset=offset)

    @property
    def staleness(self) -> int | None:
        """Return the staleness of the oldest trajectory at its training step; None: not trained, or no token."""
        first_versions = [r.first_version for r in self.trace.rollouts if r.first_version >= 0] if self.trace else []
        return self.step - min(first_versions) if first_versions and self.ending == "trained" else None


@dataclass
class LaneAllocator:
    """Assigns intervals to the fewest parallel lanes without overlaps. Intervals must come in order of their start, or
    of their end; each takes the lane that was released last before it."""

    free: list[tuple[float, int]] = field(default_factory=list)  # (time of release, lane), sorted
    count: int = 0

    def claim(self, start_s: float) -> int:
        """Take the lane that was released last before ``start_s``, or a new one. It stays taken until `release`."""
        index = bisect_right(self.free, (start_s, math.inf)) - 1
        if index >= 0:
            return self.free.pop(index)[1]
        self.count += 1
        return self.count - 1

    def release(self, lane: int, end_s: float) -> None:
        """Release ``lane`` at ``end_s``."""
        insort(self.free, (end_s, lane))

    def take(self, start_s: float, end_s: float) -> int:
        """Take a lane from ``start_s`` to ``end_s``."""
        lane = self.claim(start_s)
        self.release(lane, end_s)
        return lane


Phase = tuple[str, float, float]  # name, start and end, seconds since 1970


def group_phases(life: GroupLife, computing_s: float | None) -> Iterator[Phase]:
    """Yield the phases of a finished group: generating, verifying, buffered, and the step that trained it, which began
    to compute at ``computing_s``. The first two don't depend on the group's ending."""
    if life.trace is None or life.finished_s is None:
        return
    generated_s = max((r.generated_s for r in life.trace.rollouts), default=0.0) + life.offset
    generated_s = min(max(generated_s, life.start_s), life.finished_s)
    trained_s = life.end_s if life.ending != "trained" or computing_s is None else max(computing_s, life.finished_s)
    yield "generating", life.start_s, generated_s
    yield "verifying", generated_s, life.finished_s
    yield "buffered", life.finished_s, trained_s
    yield f"step {life.step}", trained_s, life.end_s


def rollout_phases(life: GroupLife) -> Iterator[tuple[RolloutTrace, tuple[Phase, ...]]]:
    """Yield the rollouts of a finished group with their phases, from admission until they are verified."""
    if life.trace is None or life.finished_s is None:
        return
    offset, admitted_s, end_s = life.offset, life.start_s, life.finished_s
    verifying_s = min(max(max(r.generated_s for r in life.trace.rollouts) + offset, admitted_s), end_s)
    for rollout in life.trace.rollouts:
        generated_s = min(max(rollout.generated_s + offset, admitted_s), end_s)
        first_token_s = min(max(rollout.first_token_s + offset, admitted_s), generated_s)
        if not rollout.first_token_s:
            first_token_s = generated_s
        finished_s = min(max(rollout.finished_s + offset, admitted_s), end_s)
        finished_s = max(finished_s, verifying_s if not rollout.failure else generated_s)
        yield (
            rollout,
            (
                ("queued", admitted_s, first_token_s),
                ("generating", first_token_s, generated_s),
                ("waits for its group", generated_s, verifying_s),
                ("verifying", verifying_s, finished_s),
            ),
        )


def draw_groups(events: TraceEvents, lives: Sequence[GroupLife], steps: Sequence[StepTrace]) -> None:
    """Draw ``lives``, which are in order of their start: a slice for each group over its whole life, and a slice for
    each rollout until it is verified. The members of a group are drawn side by side."""
    computing = {s.step: max(s.start_s, s.end_s - max(s.rank_compute_s, default=0.0)) for s in steps if not s.skipped}
    group_lanes, member_blocks = LaneAllocator(), LaneAllocator()
    for life in lives:
        track = f"group lane {group_lanes.take(life.start_s, life.end_s):03d}"
        _draw_group(events, track, life, computing.get(life.step))
    for life in lives:
        if life.trace is not None and life.finished_s is not None:
            block_number = member_blocks.take(life.start_s, life.finished_s)
            for rollout, phases in rollout_phases(life):
                _draw_rollout(events, f"lane {block_number:03d} member {rollout.member:02d}", life, rollout, phases)


def _draw_group(events: TraceEvents, track: str, life: GroupLife, computing_s: float | None) -> None:
    arguments: dict[str, object] = {"ending": life.ending or "buffered"}
    if life.trace is not None:
        arguments |= {"task": life.trace.task, "admitted at version": life.trace.admitted_version}
        rewards = [r.reward for r in life.trace.rollouts if not r.failure]
        arguments |= {"mean reward": round(sum(rewards) / len(rewards), 4) if rewards else None}
    if life.ending == "trained":
        arguments |= {"step": life.step, "staleness": life.staleness}
    name = f"group {life.index}" + ("" if life.ending in ("", "trained") else f" ({life.ending})")
    events.slice(_GROUPS, track, name, life.start_s, life.end_s, arguments)
    for phase, start_s, end_s in group_phases(life, computing_s):
        events.slice(_GROUPS, track, phase, start_s, end_s)


def _draw_rollout(
    events: TraceEvents, track: str, life: GroupLife, rollout: RolloutTrace, phases: Sequence[Phase]
) -> None:
    has_tokens = rollout.first_version >= 0  # it has at least one token
    arguments = {
        "tokens": rollout.tokens,
        "reward": rollout.reward,
        "versions": f"{rollout.first_version} to {rollout.last_version}" if has_tokens else None,
        "staleness": life.step - rollout.first_version if has_tokens and life.ending == "trained" else None,
        "ending": "failed" if rollout.failure else life.ending or "buffered",
        "failed at": rollout.failure or None,
        "resumes": rollout.resumes,
        "prefilled again": rollout.reprefills,
        "verifier, s": rollout.verify_s,
    }
    name = f"rollout {life.index}-{rollout.member}"
    events.slice(_ROLLOUTS, track, name, life.start_s, phases[-1][2], arguments)
    for phase, start_s, end_s in phases:
        events.slice(_ROLLOUTS, track, phase, start_s, end_s)
