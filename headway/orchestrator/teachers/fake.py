"""A deterministic stand-in, on the injected clock, for the teachers of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from headway.orchestrator.teachers.stage import BusyTime
from headway.records.ledger import TeacherStatistics
from headway.records.rollout import Group, Rollout
from headway.runtime.clock import Clock


class FakeTeachers:
    """Takes ``rollout_s(rollout)`` for each valid rollout, ``at_once`` of them together, and adds no scores."""

    def __init__(self, clock: Clock, rollout_s: Callable[[Rollout], float], *, at_once: int = 1) -> None:
        self._clock, self._rollout_s = clock, rollout_s
        self._free = asyncio.Semaphore(at_once)
        self._busy = BusyTime(clock)
        self._statistics = TeacherStatistics()

    async def score(self, group: Group, rollouts: tuple[Rollout, ...]) -> tuple[Rollout, ...]:
        """See `TeacherStage.score`."""
        valid_rollouts = [rollout for rollout in rollouts if rollout.valid]
        with self._busy:
            await asyncio.gather(*map(self._score, valid_rollouts))
        self._statistics = msgspec.structs.replace(
            self._statistics,
            rollouts=self._statistics.rollouts + len(valid_rollouts),
            tokens=self._statistics.tokens + sum(rollout.all_tokens for rollout in valid_rollouts),
        )
        return rollouts

    async def _score(self, rollout: Rollout) -> None:
        async with self._free:
            await self._clock.sleep(self._rollout_s(rollout))

    def take_statistics(self) -> TeacherStatistics:
        """See `TeacherStage.take_statistics`."""
        statistics, self._statistics = self._statistics, TeacherStatistics()
        return msgspec.structs.replace(statistics, busy_s=self._busy.take())
