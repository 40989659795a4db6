"""Deterministic stand-ins, on the injected clock: the verifier pool, and the life of a rollout in a sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from headway.records.environment import Parked, SavedEpisode
from headway.records.errors import HeadwayError
from headway.records.generation import PartialResponse
from headway.records.rollout import Group, Rollout, Verdict
from headway.records.task import Task
from headway.rollout.makers.single_turn import ResumeGate, Resumption, SingleTurn
from headway.rollout.seeds import rollout_seed
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


SANDBOX = "sandbox: "  # begins the cause of a failure that is the environment's, not the engine's


class Lived(NamedTuple):
    """What a rollout did in its environment."""

    turns: int = 0  # model calls
    resumed_version: int = -1  # of the oldest turn whose effect its sandbox held when it was resumed; -1: it was not
    environment_s: float = 0.0  # between its turns


class FakeEnvironment(Protocol):
    """What keeps the sandboxes of simulated rollouts, by their sampling seeds."""

    def state_version(self, seed: int) -> int:
        """Version of the oldest turn whose effect its sandbox holds; -1: of none."""
        ...

    def resume(self, seed: int, *, anew: bool) -> None:
        """A parked rollout goes on: with the sandbox it has, or from its beginning in a fresh one."""
        ...

    def forget(self, seed: int) -> Lived:
        """The rollout is over: what it did."""
        ...


class FakeRollout(SingleTurn):
    """The life of a simulated rollout: a failure of its sandbox is the sandbox's, and its turns are counted."""

    def __init__(self, *args: Any, environment: FakeEnvironment, resume_gate: ResumeGate | None, **named: Any) -> None:
        async def gate(parked: Parked) -> Resumption:
            assert resume_gate is not None
            seed = rollout_seed(self._run_seed, parked.group, parked.member, self._prefix)
            version = environment.state_version(seed)
            how = await resume_gate(msgspec.structs.replace(parked, environment_version=version))
            environment.resume(seed, anew=how == "restart")
            return how

        super().__init__(*args, resume_gate=gate if resume_gate is not None else None, **named)
        self._environment = environment

    async def generate_member(
        self,
        group: Group,
        member: int,
        partial: PartialResponse = PartialResponse(),
        resumes: int = 0,
        saved: SavedEpisode | None = None,
    ) -> Rollout:
        """See SingleTurn."""
        seed = rollout_seed(self._run_seed, group.index, member, self._prefix)
        lived = Lived()
        try:
            rollout = await super().generate_member(group, member, partial, resumes)
        finally:
            lived = self._environment.forget(seed)
        failure = rollout.failure
        if failure is not None and failure.cause.startswith(SANDBOX):
            failure = msgspec.structs.replace(failure, boundary="sandbox")
        return msgspec.structs.replace(
            rollout,
            failure=failure,
            turns=max(1, lived.turns),
            environment_s=lived.environment_s,
            environment_version=lived.resumed_version,
        )
