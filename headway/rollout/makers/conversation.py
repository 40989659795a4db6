"""Rollouts that are recorded conversations: each answer is a model call that can be parked, resumed and retried."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

import msgspec

from headway.records.clients import Watch
from headway.records.conversations import OnTokens, OpenConversation, RecordedConversation, TurnRequest, rollout_from
from headway.records.environment import PartialRollout
from headway.records.generation import GenerationResult, PartialResponse
from headway.records.rollout import CallTimes, Failure, Group, Pruned, Rollout, ToolTimes
from headway.rollout.makers.attempts import RolloutFailed
from headway.rollout.makers.turn_sampler import ModelCall, Resumption, TurnSampler


class ConversationAttempt(ABC):
    """An attempt at a rollout that is a conversation with the policy: *running* -> *over*, then it is sealed."""

    def __init__(self, sampler: TurnSampler, group: Group, member: int) -> None:
        self.group = group
        self.member = member
        self.name = sampler.name(group, member)
        self.stopped: Failure | Pruned | None = None
        self.parkings = 0  # of all its open calls at once
        self._sampler = sampler
        self._opened: list[OpenConversation] = []
        self._recorded = RecordedConversation()
        self._oldest_version = -1  # of its answers
        self._gate: asyncio.Future[Resumption] | None = None
        self._waiting = 0  # calls that are parked
        self._held_version = -1  # of the oldest answer whose effect its environment had when it was resumed
        self._engine: Failure | None = None  # the engine's failure of the last call
        self._failed: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()  # ends the attempt
        self._sampling = 0  # calls that are being sampled
        self._idle_since_s: float | None = None  # when the last call ended; None: one is open, or there was none yet
        self._environment_s = 0.0
        self._call_times: list[CallTimes] = []
        self._tool_times: list[ToolTimes] = []

    async def run(self) -> None:
        """Run the conversation and seal it. Raises RolloutFailed."""
        play_task = asyncio.create_task(self._play(), name=f"play-{self.name}")
        try:
            await asyncio.wait((play_task, self._failed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            play_task.cancel()
            sealed = [conversation.seal() for conversation in self._opened]
            self._recorded = next(iter(sealed), self._recorded)  # first: a second cancellation interrupts the wait
            self.note(0)
            await asyncio.wait((play_task,))
        if self._failed.done():
            raise RolloutFailed(self._failed.result())
        play_task.result()

    @abstractmethod
    async def _play(self) -> None:
        """Run the conversations, and append them to ``_opened``; the first one is the rollout."""

    def rollout(self, now: float, failure: Failure | None = None) -> Rollout:
        """Return the recorded rollout, ended at ``now`` (clock seconds); ``failure``: why it failed."""
        rollout = rollout_from(self._recorded, self.group, self.member, now, failure)
        return msgspec.structs.replace(
            rollout,
            environment_s=self._environment_s,
            environment_version=self._held_version,
            call_times=tuple(self._call_times),
            tool_times=tuple(self._tool_times),
        )

    async def gate(self, parked: PartialRollout) -> Resumption:
        """The resume gate of the attempt's calls; simultaneously parked calls count as one parking of the member."""
        if self._gate is None or self._gate.done():
            self._gate, self.parkings = asyncio.ensure_future(self._park(parked)), self.parkings + 1
        park_future, self._waiting = self._gate, self._waiting + 1
        try:
            resumption = await asyncio.shield(park_future)
        finally:
            self._waiting -= 1
            if not self._waiting:  # all parked calls were cancelled: the member isn't parked any more
                park_future.cancel()
                self._gate = None
        if parked.environment_version >= 0:
            versions = [version for version in (self._held_version, parked.environment_version) if version >= 0]
            self._held_version = min(versions)
        return resumption

    async def _park(self, parked: PartialRollout) -> Resumption:
        """Wait at the orchestrator's gate."""
        gate = self._sampler.resume_gate
        return "continue" if gate is None else await gate(parked)

    def fail(self, failure: Failure) -> None:
        """End the attempt: `run` raises ``failure``, or the one that was reported first."""
        if not self._failed.done():
            self._failed.set_result(failure)

    async def sampled(self, request: TurnRequest, on_tokens: OnTokens, /) -> GenerationResult:
        """Sample an answer (`records.conversations.SampleTurn`), with the run's own parameters, not the client's."""
        self.note(1)
        on_tokens(PartialResponse())
        parkings_before_call, response = self.parkings, self.take_partial()  # which sets parkings
        call = ModelCall(
            group=self.group,
            member=self.member,
            prompt_ids=request.prompt_ids,
            partial=response,
            resumes=self.parkings,  # max_resumes limits a rollout's parkings over all its calls
            purpose=f"{request.purpose}-",
            session=self.name,
            max_tokens=request.max_tokens,
            stop=request.stop,
            rows_known=request.rows_known,
            grammar=request.grammar,
            environment_version=self._oldest_version,
            resume_gate=self.gate,
            watch=Watch(1, on_tokens),
        )
        try:
            turn = await self._sampler.sample(call)
        finally:
            self.note(-1)
        self._call_times += turn.call_times
        is_refused = turn.failure is not None and turn.failure.boundary == "engine" and not turn.failure.infrastructure
        self._engine = None if is_refused else turn.failure
        if turn.failure is not None and turn.failure.boundary == "environment":
            self.fail(turn.failure)  # it was parked for too long: the rollout restarts, or fails
        self.keep_version(turn.first_version)
        return GenerationResult(
            request_id=request.purpose,
            response=turn.response,
            finish_reason=turn.finish_reason,
            error="" if turn.failure is None else turn.failure.cause,
            refused=is_refused,
            reprefills=turn.reprefills,
            resumes=turn.resumes - parkings_before_call,
            first_token_s=turn.first_token_s,
        )

    def take_partial(self) -> PartialResponse:
        """Return the tokens of the next answer that were sampled before a former process ended."""
        return PartialResponse()

    def keep_version(self, version: int) -> None:
        """Record that the conversation has an answer whose first token is of ``version``; -1: it has no token."""
        versions = [candidate for candidate in (self._oldest_version, version) if candidate >= 0]
        self._oldest_version = min(versions, default=-1)

    def note(self, change: int) -> None:
        """Count a call that begins (1) or ends (-1), or the end of the attempt (0). The time without any call is the
        environment's."""
        now = self._sampler.clock.now()
        if self._sampling == 0 and self._idle_since_s is not None:
            self._environment_s += now - self._idle_since_s
        self._sampling += change
        self._idle_since_s = now if self._sampling == 0 and change else None
