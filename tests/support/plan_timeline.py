"""Runs a plan's chunks event by event: when each part works on which chunk, and when the step is complete.

The plan's seconds aren't read: they are what this must come to.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import NamedTuple

from headway.records.plan import PlacedPart, PlacedPipeline, PlacementPlan


class TurnSpan(NamedTuple):
    """A turn of a stage on its part's devices, for one chunk in one round."""

    start_s: float
    end_s: float
    stage: str
    part: PlacedPart
    chunk: int
    round: int


class PlanRun(NamedTuple):
    """The turns of a step in the order in which they began, and its end."""

    spans: list[TurnSpan]
    end_s: float


def run_plan(plan: PlacementPlan, spans: bool = True) -> PlanRun:
    """Run the phases one after the other. Without ``spans`` only the end is found."""
    found: list[TurnSpan] | None = [] if spans else None
    now_s = 0.0
    for phase in plan.phases:
        now_s = run_pipeline(phase, now_s + phase.switch_s, found)
    return PlanRun(sorted(found or (), key=lambda span: span[:3]), now_s)


def run_pipeline(pipeline: PlacedPipeline, start_s: float, spans: list[TurnSpan] | None = None) -> float:
    """The time at which the last chunk has gone its last round, from a start with all chunks before the first level.

    Events are chunks that a level has done. A level takes waiting chunks in the order in which they came.
    """
    levels = pipeline.levels
    waiting: list[deque[tuple[int, int]]] = [deque() for _ in levels]
    waiting[0].extend((chunk, 0) for chunk in range(pipeline.items // pipeline.items_per_chunk))
    busy = [False] * len(levels)
    events: list[tuple[float, int, int, int]] = []  # time, level, chunk, round

    def begin(level: int, now_s: float) -> None:
        if busy[level] or not waiting[level]:
            return
        busy[level] = True
        chunk, done = waiting[level].popleft()
        end_s = max(_run_part(part, now_s, chunk, done, spans) for part in levels[level])
        heapq.heappush(events, (end_s, level, chunk, done))

    begin(0, start_s)
    now_s = start_s
    while events:
        now_s, level, chunk, done = heapq.heappop(events)
        busy[level] = False
        following, done = (level + 1, done) if level + 1 < len(levels) else (0, done + 1)
        if done < pipeline.rounds:
            waiting[following].append((chunk, done))
            begin(following, now_s)
        begin(level, now_s)
    return now_s


def _run_part(part: PlacedPart, now_s: float, chunk: int, done: int, spans: list[TurnSpan] | None) -> float:
    now_s += part.receive_s
    for turn in part.turns:
        now_s += turn.switch_s
        start_s = now_s
        if turn.inside is None:
            now_s += turn.seconds
        else:
            now_s = run_pipeline(turn.inside, now_s, spans)
        if spans is not None:
            spans.append(TurnSpan(start_s, now_s, turn.name, part, chunk, done))
    return now_s
