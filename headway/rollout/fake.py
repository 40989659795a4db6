"""A deterministic stand-in for the verifier pool, on the injected clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from headway.records.errors import HeadwayError
from headway.records.rollout import Verdict
from headway.records.task import Task
from headway.rollout.verdicts import to_verdict
from headway.runtime.clock import Clock


class FakeVerifier:
    """Scores with ``reward(task, response)`` after ``latency_s`` per response.

    ``reward`` returns whatever a verifier may (a number, a mapping, a Verdict with a failure). ``latency_s`` is a
    number or a function of (task, response); responses of a group are scored one after another, ``workers``
    groups at a time, as the real pool does.
    """

    def __init__(
        self,
        reward: Callable[[Task, str], object],
        clock: Clock,
        *,
        latency_s: float | Callable[[Task, str], float] = 0.0,
        workers: int = 1,
    ) -> None:
        self._reward = reward
        self._clock = clock
        self._latency_s: Callable[[Task, str], float] = latency_s if callable(latency_s) else lambda *_: latency_s
        self._free = asyncio.Semaphore(workers)
        self._stopped = False
        self.verified = 0  # responses scored so far

    async def start(self) -> None:
        """Nothing to start."""

    async def verify(self, task: Task, responses: Sequence[str]) -> list[Verdict]:
        """One Verdict per response, in order."""
        if self._stopped:
            raise HeadwayError("the verifier pool is stopped")
        async with self._free:
            verdicts: list[Verdict] = []
            total_s = 0.0
            for response in responses:
                latency_s = self._latency_s(task, response)
                total_s += latency_s
                verdict = to_verdict(self._reward(task, response))
                verdicts.append(msgspec.structs.replace(verdict, verify_s=latency_s))
            if total_s > 0:
                await self._clock.sleep(total_s)
            self.verified += len(responses)
            return verdicts

    async def stop(self) -> None:
        """Refuse further calls."""
        self._stopped = True
