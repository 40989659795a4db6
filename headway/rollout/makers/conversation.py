"""Rollouts that are recorded conversations: each answer a request like any other, parked, resumed and retried."""

from __future__ import annotations

import asyncio
import copy

import msgspec

from headway.records.clients import Watch
from headway.records.conversations import RecordedConversation, Told, Wanted, rollout_of
from headway.records.environment import Parked
from headway.records.generation import GenerationResult, PartialResponse
from headway.records.rollout import Failure, Group, Pruned, Rollout
from headway.rollout.makers.attempts import Attempts
from headway.rollout.makers.single_turn import Resumption, SingleTurn, Stop


class RolloutFailed(Exception):
    """An attempt came to nothing."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.cause)
        self.failure = failure


class RecordedRollouts(Attempts):
    """Rollouts whose attempts have their answers sampled one by one, or side by side, and recorded."""

    def stop(self, group: int, member: int, why: Stop) -> None:
        """`SingleTurn.stop`: parked with all the calls it has open; for good, its attempt ends."""
        if why == "park":
            super().stop(group, member, why)
        else:
            self.cancel(group, member, why)

    def failure_of(self, error: Exception) -> Failure | None:
        if isinstance(error, RolloutFailed):
            return error.failure
        cause = f"{type(error).__name__}: {error}"  # a host of agents or environments died, or can't be started
        return Failure(boundary="environment", cause=cause[:300], infrastructure=True)

    def name(self, group: Group, member: int) -> str:
        return f"{self._prefix}{group.index}-{member}"

    async def gate(self, parked: Parked) -> Resumption:
        """The orchestrator's."""
        return "continue" if self._resume_gate is None else await self._resume_gate(parked)

    async def sample(self, attempt: RecordedAttempt, wanted: Wanted, told: Told) -> Rollout:
        """One answer, through parkings and engine errors. The run's own parameters hold, not the client's."""
        twin = copy.copy(self)  # shares who is open, so that `stop` and `reached` find it
        twin._environment_version = attempt.oldest_version
        twin._session = self.name(attempt.group, attempt.member)
        twin._prefix = f"{self._prefix}{wanted.purpose}-"
        twin._sampling = msgspec.structs.replace(self._sampling, max_tokens=wanted.max_tokens, stop=wanted.stop)
        twin._settings = self._settings.model_copy(update={"max_prompt_tokens": len(wanted.prompt_ids)})
        twin._resume_gate = attempt.gate
        twin._watch_of = lambda group, member: Watch(1, told)
        asked = msgspec.structs.replace(attempt.group, prompt_ids=wanted.prompt_ids)
        before = attempt.parkings  # ``max_resumes`` is a rollout's, whatever calls it was in
        begun = attempt.take_begun()
        turn = await SingleTurn.generate_member(twin, asked, attempt.member, begun, attempt.parkings)
        return msgspec.structs.replace(turn, resumes=turn.resumes - before)


class RecordedAttempt:
    """One conversation in the making: *running* -> *over*, its conversation sealed."""

    def __init__(self, rollouts: RecordedRollouts, group: Group, member: int) -> None:
        self.group = group
        self.member = member
        self.stopped: Failure | Pruned | None = None
        self.oldest_version = -1  # of its answers
        self.parkings = 0  # of all its open calls at once
        self._made_by = rollouts
        self._recorded = RecordedConversation()
        self._gate: asyncio.Future[Resumption] | None = None
        self._waiting = 0  # calls that are parked
        self._held_version = -1  # of the oldest answer whose effect its environment held when it was resumed
        self._engine: Failure | None = None  # the last call's, that got no answer for it
        self._doomed: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()  # what ends it all
        self._sampling = 0  # calls that are sampled now
        self._idle_since_s: float | None = None  # no call is; None: one is, or none was yet
        self._environment_s = 0.0

    def rollout(self, now: float, failure: Failure | None = None) -> Rollout:
        if failure is None and isinstance(self.stopped, Failure):
            failure = self.stopped
        rollout = rollout_of(self._recorded, self.group, self.member, now, failure)
        return msgspec.structs.replace(
            rollout, environment_s=self._environment_s, environment_version=self._held_version
        )

    async def gate(self, parked: Parked) -> Resumption:
        """For all its calls that are parked at once: a member is parked once."""
        if self._gate is None or self._gate.done():
            self._gate, self.parkings = asyncio.ensure_future(self._park(parked)), self.parkings + 1
        gate, self._waiting = self._gate, self._waiting + 1
        try:
            resumption = await asyncio.shield(gate)
        finally:
            self._waiting -= 1
            if not self._waiting:  # where their clients left, the member isn't parked any more
                gate.cancel()
                self._gate = None
        if parked.environment_version >= 0:
            versions = [version for version in (self._held_version, parked.environment_version) if version >= 0]
            self._held_version = min(versions)
        return resumption

    async def _park(self, parked: Parked) -> Resumption:
        """Wait where parked members wait."""
        return await self._made_by.gate(parked)

    def doom(self, failure: Failure) -> None:
        """End the attempt; `run` says how."""
        if not self._doomed.done():
            self._doomed.set_result(failure)

    async def sampled(self, wanted: Wanted, told: Told, /) -> GenerationResult:
        """An answer (records.conversations.Sample)."""
        self.note(1)
        told(PartialResponse())
        try:
            turn = await self._made_by.sample(self, wanted, told)
        finally:
            self.note(-1)
        refused = turn.failure is not None and turn.failure.boundary == "engine" and not turn.failure.infrastructure
        self._engine = None if refused else turn.failure
        if turn.failure is not None and turn.failure.boundary == "environment":
            self.doom(turn.failure)  # it was parked for too long: it begins anew, or fails
        self.hold(turn.first_version)
        return GenerationResult(
            request_id=wanted.purpose,
            response=PartialResponse(ids=turn.response_ids, logprobs=turn.response_logprobs, versions=turn.versions),
            finish_reason=turn.finish_reason,
            error="" if turn.failure is None else turn.failure.cause,
            refused=refused,
            reprefills=turn.reprefills,
            resumes=turn.resumes,
            first_token_s=turn.first_token_s,
        )

    def take_begun(self) -> PartialResponse:
        """What was sampled of the next answer before a former process ended."""
        return PartialResponse()

    def hold(self, version: int) -> None:
        """An answer of this version has its effect from now on; -1: none."""
        versions = [one for one in (self.oldest_version, version) if one >= 0]
        self.oldest_version = min(versions, default=-1)

    def note(self, change: int) -> None:
        """A call begins, ends, or (0) none will come: what passes between is the environment's time."""
        now = self._made_by.now()
        if self._sampling == 0 and self._idle_since_s is not None:
            self._environment_s += now - self._idle_since_s
        self._sampling += change
        self._idle_since_s = now if self._sampling == 0 and change else None
