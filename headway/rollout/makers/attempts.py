"""Attempts at rollouts of several turns: run, timed out, stopped, and retried after infrastructure failures."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, Protocol

import msgspec

from headway.records.clients import Stop
from headway.records.environment import PartialRollout
from headway.records.rollout import Failure, Group, Pruned, Rollout
from headway.rollout.makers.turn_sampler import TurnSampler, timed_out
from headway.runtime.retries import backoff_s

_RETRY_S = 0.25  # before the first retry of an environment that failed as infrastructure; doubled for each further one
_RETRIED_BOUNDARIES = ("environment", "sandbox")
_END_S = 30.0  # time for cancelled work to end


class RolloutAttempt(Protocol):
    """An attempt at a rollout."""

    group: Group
    member: int
    stopped: Failure | Pruned | None  # why it was stopped for good from outside

    async def run(self) -> None:
        """Make the rollout. Cancellation ends the attempt with the tokens so far."""
        ...

    def rollout(self, now: float, failure: Failure | None = None) -> Rollout:
        """Return the rollout so far, ended at ``now`` (clock seconds); ``failure``: why it failed."""
        ...


class RolloutFailed(Exception):
    """Raised by an attempt at a rollout that failed."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.cause)
        self.failure = failure


class RetryingRollouts(ABC):
    """Makes rollouts by attempts (`RolloutMaker`), whose turns are sampled, parked and retried by a `TurnSampler`.

    An attempt's exception fails its own rollout alone. Infrastructure failures at the boundaries "environment" and
    "sandbox" are retried with a new attempt, ``rollout.retries`` times. A rollout that was parked when the orchestrator
    died restarts, unless a subclass can continue it.
    """

    def __init__(self, sampler: TurnSampler) -> None:
        self.sampler = sampler
        self._running: dict[tuple[int, int], tuple[RolloutAttempt, asyncio.Task[None]]] = {}

    @abstractmethod
    def begin(self, group: Group, member: int) -> RolloutAttempt:
        """Return a new attempt at a member's rollout."""

    def failure_of(self, error: Exception) -> Failure | None:
        """Return the failure for an attempt's exception; None: the rollout ends with the tokens so far. Raises an
        exception that no other attempt could avoid, which ends the run."""
        if isinstance(error, RolloutFailed):
            return error.failure
        cause = f"{type(error).__name__}: {error}"  # a host of agents or environments died, or can't be started
        return Failure(boundary="environment", cause=cause[:300], infrastructure=True)

    def stop(self, group: int, member: int, why: Stop) -> None:
        """Park all open calls of a member, or stop its attempt for good, without retries (`RolloutMaker.stop`)."""
        if why in ("park", "leave"):
            self.sampler.stop(group, member, why)
        elif (group, member) in self._running:
            attempt, task = self._running[group, member]
            attempt.stopped = attempt.stopped or why
            task.cancel()

    def reached(self, group: int, member: int) -> int:
        return self.sampler.reached(group, member)

    async def generate_member(self, group: Group, member: int, parked: PartialRollout | None = None) -> Rollout:
        """Return the rollout of the last attempt (`RolloutMaker.generate_member`)."""
        attempt_count, clock = 0, self.sampler.clock
        while True:
            attempt = self.begin(group, member)
            rollout = await self._attempt(attempt)
            failure = rollout.failure
            is_retryable = failure is not None and failure.boundary in _RETRIED_BOUNDARIES and failure.infrastructure
            rollout = msgspec.structs.replace(rollout, attempts=attempt_count + 1)
            if not is_retryable or attempt.stopped is not None or attempt_count == self.sampler.settings.retries:
                return rollout
            await self._stoppable(attempt, clock.sleep(backoff_s(attempt_count + 1, _RETRY_S)))
            if attempt.stopped is not None:  # for good: the earlier failure stays
                stop_failure = attempt.stopped if isinstance(attempt.stopped, Failure) else failure
                return attempt.rollout(clock.now(), stop_failure)
            attempt_count += 1

    async def _attempt(self, attempt: RolloutAttempt) -> Rollout:
        failure = None
        limit = asyncio.timeout(self.sampler.settings.timeout_s)
        try:
            async with limit:
                await self._stoppable(attempt, attempt.run())
        except Exception as error:  # the boundary to a user's code
            rollout_timed_out = isinstance(error, TimeoutError) and limit.expired()
            failure = timed_out(self.sampler.settings) if rollout_timed_out else self.failure_of(error)
        if failure is None and isinstance(attempt.stopped, Failure):
            failure = attempt.stopped
        return attempt.rollout(self.sampler.clock.now(), failure)

    async def _stoppable(self, attempt: RolloutAttempt, work: Coroutine[Any, Any, None]) -> None:
        """Await ``work`` until it ends or `stop` cancels it, with time to clean up."""
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
