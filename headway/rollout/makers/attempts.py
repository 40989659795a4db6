"""Attempts at rollouts of several turns: run, timed out, stopped, and retried where their surroundings failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec

from headway.config import schema
from headway.records.rollout import Failure, Group, Pruned, Rollout
from headway.rollout.makers.turn_sampler import timed_out
from headway.runtime.backoff import backoff_s
from headway.runtime.clock import Clock

_RETRY_S = 0.25  # before the first retry of an environment that failed as infrastructure; doubled for each further one
_SURROUNDINGS = ("environment", "sandbox")
_END_S = 30.0  # that cancelled work may take to end


class RolloutAttempt(Protocol):
    """An attempt at a rollout."""

    group: Group
    member: int
    stopped: Failure | Pruned | None  # for good, from outside

    async def run(self) -> None:
        """Make the rollout. Cancellation ends the attempt as it stands."""
        ...

    def rollout(self, now: float, failure: Failure | None = None) -> Rollout:
        """The rollout as far as it was made, ended at ``now`` (clock seconds); ``failure``: why it failed."""
        ...


class RetryingRollouts:
    """Makes rollouts by attempts; the turns inside them are sampled, parked and retried by a `TurnSampler`.

    Whatever an attempt raises fails its own rollout alone. Infrastructure failures at the boundaries "environment" and
    "sandbox" are retried with a new attempt, ``rollout.retries`` times.
    """

    def __init__(
        self,
        settings: schema.RolloutConfig,
        clock: Clock,
        begin: Callable[[Group, int], RolloutAttempt],
        failure_of: Callable[[Exception], Failure | None],
    ) -> None:
        """``begin`` makes a new attempt. ``failure_of``: the failure that an attempt's exception stands for; None: the
        rollout ends as it stands. It raises an exception that no other attempt could avoid, which ends the run."""
        self._settings = settings
        self._clock = clock
        self._begin = begin
        self._failure_of = failure_of
        self._running: dict[tuple[int, int], tuple[RolloutAttempt, asyncio.Task[None]]] = {}

    def stop(self, group: int, member: int, why: Failure | Pruned) -> None:
        """Stop a member's attempt for good: it isn't retried. No-op where there is none."""
        if (group, member) in self._running:
            attempt, task = self._running[group, member]
            attempt.stopped = attempt.stopped or why
            task.cancel()

    async def generate_member(self, group: Group, member: int) -> Rollout:
        """The rollout of the last attempt (`RolloutMaker.generate_member`)."""
        attempts = 0
        while True:
            attempt = self._begin(group, member)
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

    async def _attempt(self, attempt: RolloutAttempt) -> Rollout:
        failure = None
        limit = asyncio.timeout(self._settings.timeout_s)
        try:
            async with limit:
                await self._stoppable(attempt, attempt.run())
        except Exception as error:  # the boundary to what isn't ours
            own = isinstance(error, TimeoutError) and limit.expired()
            failure = timed_out(self._settings) if own else self._failure_of(error)
        return attempt.rollout(self._clock.now(), failure)

    async def _stoppable(self, attempt: RolloutAttempt, work: Coroutine[Any, Any, None]) -> None:
        """Await ``work`` until it ends or `stop` cancels it; it has had time to clean up when this returns."""
        key = attempt.group.index, attempt.member
        task = asyncio.create_task(work, name=f"attempt-{key[0]}-{key[1]}")
        self._running[key] = attempt, task
        try:
            await task
        except asyncio.CancelledError:
            if attempt.stopped is None:
                raise
        finally:
            task.cancel()
            del self._running[key]
            await asyncio.wait((task,), timeout=_END_S)
