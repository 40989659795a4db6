"""Deterministic fakes, on the injected clock, of the verifier pool and of a rollout's life in a sandbox."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from headway.records.environment import PartialRollout
from headway.records.errors import HeadwayError
from headway.records.rollout import Group, Rollout, Verdict
from headway.records.task import Task
from headway.rollout.makers.single_turn import SingleTurn
from headway.rollout.makers.turn_sampler import ModelCall, Resumption, TurnSampler
from headway.rollout.seeds import rollout_seed
from headway.rollout.verification.verdicts import to_verdict
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
        self._workers, self._too_many = workers, 0
        self._stopped = False
        self.start_s = 0.0
        self.verified = 0  # responses scored so far

    async def start(self) -> None:
        """Do nothing: there is nothing to start."""

    def max_workers(self) -> int:
        """Return the largest integer: the number of workers has no limit."""
        return sys.maxsize

    def set_workers(self, count: int) -> None:
        """Set the number of workers to ``count``; excess workers end after their current group."""
        for _ in range(count - self._workers):
            self._free.release()
        self._too_many += max(0, self._workers - count)
        self._workers = count

    async def verify(self, task: Task, responses: Sequence[str]) -> list[Verdict]:
        """Return one verdict per response, in order."""
        if self._stopped:
            raise HeadwayError("the verifier pool is stopped")
        while self._too_many:  # excess permits are removed as they become free, before a caller waits for one
            self._too_many -= 1
            await self._free.acquire()
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


SANDBOX = "sandbox: "  # begins the cause of a failure that is the environment's, not the engine's


class EpisodeCounts(NamedTuple):
    """A rollout's turns and time in its environment."""

    turns: int = 0  # model calls
    resumed_version: int = -1  # of the oldest turn whose effect its sandbox had when it was resumed; -1: never resumed
    environment_s: float = 0.0  # between its turns


class FakeEnvironment(Protocol):
    """Keeps the sandboxes of simulated rollouts, by their sampling seeds."""

    def state_version(self, seed: int) -> int:
        """Return the version of the oldest turn whose effect the sandbox has; -1: no turn had one."""
        ...

    def resume(self, seed: int, *, restart: bool) -> None:
        """Resume a parked rollout with its sandbox, or (``restart``) from its beginning in a fresh one."""
        ...

    def forget(self, seed: int) -> EpisodeCounts:
        """Forget an ended rollout, and return its counts."""
        ...


class FakeRollout(SingleTurn):
    """Makes simulated rollouts (`RolloutMaker`): counts turns, and moves sandbox failures to the boundary "sandbox"."""

    def __init__(self, sampler: TurnSampler, *, environment: FakeEnvironment) -> None:
        super().__init__(sampler)
        self._environment = environment

    def for_evaluation(self, request_prefix: str, temperature: float | None = None) -> FakeRollout:
        sampler = self._sampler.for_evaluation(request_prefix, temperature)
        return FakeRollout(sampler, environment=self._environment)

    async def generate_member(self, group: Group, member: int, parked: PartialRollout | None = None) -> Rollout:
        sampler, environment = self._sampler, self._environment
        seed = rollout_seed(sampler.run_seed, group.index, member, sampler.request_prefix)

        async def gate(now: PartialRollout) -> Resumption:
            now = msgspec.structs.replace(now, environment_version=environment.state_version(seed))
            resumption = "continue" if sampler.resume_gate is None else await sampler.resume_gate(now)
            environment.resume(seed, restart=resumption == "restart")
            return resumption

        call = msgspec.structs.replace(ModelCall.first(group, member, parked), resume_gate=gate)
        episode_counts = EpisodeCounts()
        try:
            rollout = sampler.refused(call) or await sampler.sample(call)
        finally:
            episode_counts = environment.forget(seed)
        failure = rollout.failure
        if failure is not None and failure.cause.startswith(SANDBOX):
            failure = msgspec.structs.replace(failure, boundary="sandbox")
        return msgspec.structs.replace(
            rollout,
            failure=failure,
            turns=max(1, episode_counts.turns),
            environment_s=episode_counts.environment_s,
            environment_version=episode_counts.resumed_version,
        )
