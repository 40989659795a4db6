"""Rollouts of several turns that something else makes: begun, stopped, timed out, made anew."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, Protocol

import msgspec

from headway.records.environment import SavedEpisode
from headway.records.generation import PartialResponse
from headway.records.rollout import Failure, Group, Pruned, Rollout
from headway.rollout.single_turn import SingleTurn
from headway.runtime.backoff import backoff_s

_RETRY_S = 0.25  # before an environment that failed as infrastructure is tried anew; doubled each time
_SURROUNDINGS = ("environment", "sandbox")
_END_S = 30.0  # that cancelled work may take to end


class Making(Protocol):
    """One rollout in the making."""

    group: Group
    member: int
    stopped: Failure | Pruned | None  # for good, from outside

    async def run(self) -> None:
        """Make it. Being cancelled ends it as it stands."""
        ...

    def rollout(self, now: float, failure: Failure | None = None) -> Rollout:
        """What it came to."""
        ...


class Attempts(SingleTurn, ABC):
    """Rollouts made by `begin`'s attempts, whose turns are requests like any other: retried, parked and resumed.

    What an attempt raises fails its rollout as `failure_of` says, and no other. Infrastructure at the boundaries
    "environment" and "sandbox" is tried anew, ``rollout.retries`` times. So is what was parked when the orchestrator
    died, unless it can be kept.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._attempts: dict[tuple[int, int], tuple[Making, asyncio.Task[None]]] = {}

    @abstractmethod
    def begin(self, group: Group, member: int) -> Making:
        """A new attempt."""

    @abstractmethod
    def failure_of(self, error: Exception) -> Failure | None:
        """What it means that an attempt raised this; None: it ends as it stands. Raises it where no other attempt could
        do better: that ends the run."""

    def prefixed(self, request_prefix: str) -> SingleTurn:
        twin = super().prefixed(request_prefix)
        assert isinstance(twin, Attempts)
        twin._attempts = {}
        return twin

    def cancel(self, group: int, member: int, why: Failure | Pruned) -> None:
        """Stop an attempt for good; it is not begun anew. No-op where there is none."""
        if (group, member) in self._attempts:
            attempt, task = self._attempts[group, member]
            attempt.stopped = attempt.stopped or why
            task.cancel()

    def now(self) -> float:
        return self._clock.now()

    async def generate_member(
        self,
        group: Group,
        member: int,
        partial: PartialResponse = PartialResponse(),
        resumes: int = 0,
        saved: SavedEpisode | None = None,
    ) -> Rollout:
        attempts = 0
        while True:
            attempt = self.begin(group, member)
            rollout = await self._attempt(attempt)
            failure = rollout.failure
            again = failure is not None and failure.boundary in _SURROUNDINGS and failure.infrastructure
            rollout = msgspec.structs.replace(rollout, attempts=attempts + 1)
            if not again or attempt.stopped is not None or attempts == self._settings.retries:
                return rollout
            await self._stoppable(attempt, self._clock.sleep(backoff_s(attempts + 1, _RETRY_S)))
            if attempt.stopped is not None:  # for good: what had failed stays so
                stopped = attempt.stopped if isinstance(attempt.stopped, Failure) else failure
                return attempt.rollout(self._clock.now(), stopped)
            attempts += 1

    async def _attempt(self, attempt: Making) -> Rollout:
        failure = None
        limit = asyncio.timeout(self._settings.timeout_s)
        try:
            async with limit:
                await self._stoppable(attempt, attempt.run())
        except Exception as error:  # the boundary to what isn't ours
            if isinstance(error, TimeoutError) and limit.expired():
                cause = f"not finished after rollout.timeout_s = {self._settings.timeout_s:g} s"
                failure = Failure(boundary="engine", cause=cause, infrastructure=True)
            else:
                failure = self.failure_of(error)
        return attempt.rollout(self._clock.now(), failure)

    async def _stoppable(self, attempt: Making, work: Coroutine[Any, Any, None]) -> None:
        """``work`` until it ends or `cancel` cancels it; it has had time to clean up when this returns."""
        key = attempt.group.index, attempt.member
        task = asyncio.create_task(work, name=f"attempt-{key[0]}-{key[1]}")
        self._attempts[key] = attempt, task
        try:
            await task
        except asyncio.CancelledError:
            if attempt.stopped is None:
                raise
        finally:
            task.cancel()
            del self._attempts[key]
            await asyncio.wait((task,), timeout=_END_S)
