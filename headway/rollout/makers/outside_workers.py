"""Rollouts of outside workers, programs in any language and on any machine that lease members and finish them."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from headway.config.endpoint import EndpointConfig, EnvironmentConfig
from headway.records.conversations import Conversations, OnTokens, OpenConversation, TurnRequest
from headway.records.environment import PartialRollout
from headway.records.generation import GenerationResult, PartialResponse
from headway.records.rollout import Failure, Group, Rollout
from headway.rollout.leases import LeaseBook, LeaseEnding, LeaseKey, LeaseRefused
from headway.rollout.makers.attempts import RetryingRollouts, RolloutAttempt, RolloutFailed
from headway.rollout.makers.conversation import ConversationAttempt
from headway.rollout.makers.turn_sampler import Resumption, TurnSampler
from headway.runtime.clock import Clock
from headway.runtime.stalls.waits import Waits
from headway.runtime.workers import EventCallback

_FINISH = "finish"  # key of a worker's report in the rollout's verdict
KeepRollout = Callable[[PartialRollout], None]  # commits a partial rollout
_NO_SESSION = (
    "no answered model call is recorded under this lease's API key, and text can't be trained on: its tokens aren't "
    "known. Call the model at base_url with api_key; or write messages without a uid: they are kept for headway sft"
)


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's report of a member that it has finished."""

    reward: float | None = None  # finite; None: the run's verifier scores the last answer
    solved: bool | None = None  # None: reward >= 1
    metadata: dict[str, Any] = {}  # the worker's, JSON types
    extra: dict[str, Any] = {}  # the worker's, JSON types

    @property
    def ending(self) -> LeaseEnding:
        """The end of the attempt; equal for equal reports, regardless of the order of their keys."""
        encoded = msgspec.msgpack.encode(self, order="deterministic")
        digest = hashlib.blake2b(encoded, digest_size=8).hexdigest()
        return LeaseEnding("finished", f"reward = {self.reward} ({digest})")

    @classmethod
    def of(cls, rollout: Rollout) -> Finish | None:
        """Return the report of the worker that finished a stored rollout; None where no worker did."""
        report = rollout.verdict.get(_FINISH)
        return None if report is None else msgspec.convert(report, cls)


@dataclass(frozen=True, kw_only=True)
class RemoteHost:
    """The orchestrator's resources for outside workers: the endpoint at which they call the model, and their leases."""

    environment: EnvironmentConfig
    endpoint: EndpointConfig
    conversations: Conversations
    lease_manager: LeaseManager


class LeaseManager:
    """Matches members that wait for workers with workers that wait for members.

    While members wait and no worker has any, a wait for "outside workers" is open, so that the stall watch reports it.
    """

    def __init__(
        self,
        lease_s: float,
        clock: Clock,
        waits: Waits | None = None,
        on_event: EventCallback = lambda name, detail, /, **fields: None,
    ) -> None:
        self.book = LeaseBook(lease_s)
        self.clock = clock
        self.process = secrets.token_hex(4)  # unique among the processes of the run
        self._waits = waits or Waits(clock.now)
        self._on_event = on_event
        self._attempts: dict[LeaseKey, RemoteAttempt] = {}  # offered or leased
        self._offers = asyncio.Event()
        self._worker_wait = ExitStack()  # the wait that is open while no worker has a member
        self._waiting = False

    def offer(self, attempt: RemoteAttempt) -> int:
        """Offer an attempt to workers; returns its number."""
        attempt_number = self.book.offer(attempt.key, (attempt.group.index, attempt.member))
        self._attempts[attempt.key] = attempt
        self._offers.set()
        self._update_wait()
        return attempt_number

    def withdraw(self, attempt: RemoteAttempt, why: str) -> None:
        """Withdraw an ended attempt that no worker has ended."""
        del self._attempts[attempt.key]
        self._end(attempt.key, LeaseEnding("withdrawn", why))

    async def lease(self, wait_s: float, disconnected: asyncio.Future[Any]) -> RemoteAttempt | None:
        """Lease the first member that is offered within ``wait_s``; returns None where none was, or the caller is
        ``disconnected``."""
        deadline_s = self.clock.now() + wait_s
        while (key := None if disconnected.done() else self.book.lease(self.clock.now())) is None:
            self._offers.clear()
            offer_task = asyncio.create_task(self._offers.wait(), name="lease")
            left_s = max(0.0, deadline_s - self.clock.now())
            await asyncio.wait((offer_task, disconnected), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            offer_task.cancel()
            if disconnected.done() or self.clock.now() >= deadline_s:
                return None
        self._update_wait()
        attempt = self._attempts[key]
        attempt.open()
        return attempt

    def renew(self, key: LeaseKey, number: int) -> None:
        """Renew a lease. Raises LeaseRefused."""
        self.book.renew(key, number, self.clock.now())

    def finish(self, key: LeaseKey, number: int, report: Finish) -> bool:
        """Finish a member with its recorded conversation, which is committed when this returns. Returns False for a
        repeated call. Raises LeaseRefused."""
        return self._end_once(key, number, report.ending, lambda attempt: attempt.finish(report))

    def fail(self, key: LeaseKey, number: int, cause: str, *, infrastructure: bool) -> bool:
        """Fail an attempt; with ``infrastructure`` the member is offered again. Returns False for a repeated call.
        Raises LeaseRefused."""
        cause = f"its worker abandoned it: {cause}"[:300]
        failure = Failure(boundary="environment", cause=cause, infrastructure=infrastructure)
        return self._end_once(key, number, LeaseEnding("failed", cause), lambda attempt: attempt.fail(failure))

    def expire(self, attempt: RemoteAttempt) -> bool:
        """End an attempt whose lease has expired; returns whether it had."""
        is_over = self.book.expire(attempt.key, self.clock.now())
        if is_over:
            self._on_event("lease_expired", f"group {attempt.key[0]}, member {attempt.member}", attempt=attempt.number)
            self._update_wait()
        return is_over

    def _end_once(
        self, key: LeaseKey, number: int, ending: LeaseEnding, end: Callable[[RemoteAttempt], object]
    ) -> bool:
        is_first = self.book.require(key, number, ending)
        if is_first:
            end(self._attempts[key])
            self._end(key, ending)
        return is_first

    def _end(self, key: LeaseKey, ending: LeaseEnding) -> None:
        self.book.end(key, ending)
        self._update_wait()

    def _update_wait(self) -> None:
        is_unattended = bool(self.book.offered) and not self.book.leased
        if is_unattended and not self._waiting:
            waiter_text = f"{self.book.offered} members, which no worker leases,"
            self._worker_wait.enter_context(self._waits.on("a lease", "outside workers", waiter_text))
        elif not is_unattended:
            self._worker_wait.close()
        self._waiting = is_unattended


class RemoteRollouts(RetryingRollouts):
    """Makes token-exact rollouts of the model calls of outside workers (`RolloutMaker`).

    A member is offered until a worker leases it, without a limit: ``rollout.timeout_s`` counts from the lease. An
    expired lease is an infrastructure failure of the attempt; a worker's own failure says itself whether it is one.
    Leases and finishes are committed before they are answered: after the death of the orchestrator a finished member is
    taken unchanged, and the others are offered again, as later attempts.
    """

    def __init__(self, host: RemoteHost, sampler: TurnSampler, keep: KeepRollout | None = None) -> None:
        """``keep``: commits leases and finished members; None: they belong to an evaluation, which restarts instead."""
        super().__init__(sampler)
        self.host = host
        self.keep = keep

    def for_evaluation(self, request_prefix: str, temperature: float | None = None) -> RemoteRollouts:
        return RemoteRollouts(self.host, self.sampler.for_evaluation(request_prefix, temperature))

    def begin(self, group: Group, member: int) -> RemoteAttempt:
        return RemoteAttempt(self, group, member)

    async def generate_member(self, group: Group, member: int, parked: PartialRollout | None = None) -> Rollout:
        former_attempts = 0 if parked is None else parked.attempts
        if parked is not None and parked.finished is not None:
            return parked.finished
        if former_attempts:
            self.host.lease_manager.book.restore(self.key(group, member), former_attempts)
        rollout = await super().generate_member(group, member)
        return msgspec.structs.replace(rollout, attempts=former_attempts + rollout.attempts)

    def key(self, group: Group, member: int) -> LeaseKey:
        """Return a member's name for workers. Those of evaluations are unique to this process: their attempts aren't
        committed, and begin at 1 in each process."""
        group_name = f"{self.sampler.request_prefix}{group.index}"
        return (group_name if self.keep is not None else f"{group_name}-{self.host.lease_manager.process}"), member

    async def _attempt(self, attempt: RolloutAttempt) -> Rollout:
        assert isinstance(attempt, RemoteAttempt)
        lease_manager, reason = self.host.lease_manager, "the run has stopped"
        attempt.number = lease_manager.offer(attempt)
        try:
            await self._stoppable(attempt, attempt.wait_leased())
            if attempt.stopped is None:
                rollout = await super()._attempt(attempt)
            else:
                stop_failure = attempt.stopped if isinstance(attempt.stopped, Failure) else None
                rollout = attempt.rollout(self.sampler.clock.now(), stop_failure)
            reason = reason if rollout.failure is None else rollout.failure.cause
            return rollout
        finally:
            lease_manager.withdraw(attempt, reason)
            attempt.close()


class RemoteAttempt(ConversationAttempt):
    """An attempt made by an outside worker: *offered* -> *leased* (its conversation is open) -> *over*."""

    def __init__(self, rollouts: RemoteRollouts, group: Group, member: int) -> None:
        super().__init__(rollouts.sampler, group, member)
        self.key = rollouts.key(group, member)
        self.number = 0  # among the member's attempts, from 1; 0: not offered yet
        self._rollouts = rollouts
        self._lease_manager = rollouts.host.lease_manager
        self._leased = asyncio.Event()
        self._changed = asyncio.Event()  # a model call or the attempt has ended
        self._committed: Rollout | None = None  # the finished rollout

    @property
    def conversation(self) -> OpenConversation:
        """The recorder of a leased attempt's model calls."""
        return self._opened[0]

    async def wait_leased(self) -> None:
        await self._leased.wait()

    def open(self) -> None:
        """Open the conversation: a worker has leased the attempt."""
        self._leased.set()  # first: from here on the lease expires, even if it can't be committed
        if self._rollouts.keep is not None:
            self._rollouts.keep(self._partial())
        conversations, constraints = self._rollouts.host.conversations, self._sampler.constraints
        self._opened.append(conversations.open(self.name, self.sampled, constraints=constraints))

    def close(self) -> None:
        """Seal the conversation, if one is open: no-op for an attempt that ran, which has sealed it."""
        for conversation in self._opened:
            conversation.seal()

    async def _play(self) -> None:
        while self._committed is None:
            self._changed.clear()
            has_open_call = self._sampling > 0  # a sign of life for as long as it is open
            if not has_open_call and self._lease_manager.expire(self):
                cause = f"the lease of attempt {self.number} expired: no heartbeat from its worker"
                raise RolloutFailed(Failure(boundary="environment", cause=cause, infrastructure=True))
            left_s = None if has_open_call else self._lease_manager.book.left_s(self.key, self._sampler.clock.now())
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changed.wait()

    async def sampled(self, request: TurnRequest, on_tokens: OnTokens, /) -> GenerationResult:
        try:
            return await super().sampled(request, on_tokens)
        finally:
            with suppress(LeaseRefused):  # the attempt has ended meanwhile
                self._lease_manager.renew(self.key, self.number)
            self._changed.set()

    def finish(self, report: Finish) -> None:
        """Seal the conversation and commit the rollout. Raises LeaseRefused for a conversation without an answer that
        its worker has received, and for one whose last call the generator failed, which fails the attempt."""
        if self.stopped is not None or self._failed.done():
            raise LeaseRefused("lease_ended", f"the run has stopped attempt {self.number}")
        if self._engine is not None:
            self.fail(self._engine)
            raise LeaseRefused("attempt_failed", f"the generator failed the last model call: {self._engine.cause}")
        if not self._opened or not self.conversation.answered:
            raise LeaseRefused("session_not_recorded", _NO_SESSION)
        solved = report.solved if report.solved is not None else report.reward is not None and report.reward >= 1
        self._recorded = msgspec.structs.replace(self.conversation.seal(), reward=report.reward, solved=solved)
        self.note(0)
        rollout = super().rollout(self._sampler.clock.now())
        rollout = msgspec.structs.replace(rollout, verdict={_FINISH: msgspec.to_builtins(report)}, attempts=self.number)
        if self._rollouts.keep is not None:
            self._rollouts.keep(self._partial(rollout))
        self._committed = rollout
        self._changed.set()

    def _partial(self, finished: Rollout | None = None) -> PartialRollout:
        return PartialRollout(
            group=self.group.index,
            member=self.member,
            response=PartialResponse(),
            resumes=0,
            attempts=self.number,
            finished=finished,
        )

    async def _park(self, parked: PartialRollout) -> Resumption:
        """Wait at the gate, which commits ``parked`` in place of this attempt's earlier record."""
        return await super()._park(msgspec.structs.replace(parked, attempts=self.number, finished=self._committed))

    def rollout(self, now: float, failure: Failure | None = None) -> Rollout:
        """Return the committed rollout of a finished member, regardless of later events, or else the recorded one."""
        return self._committed if self._committed is not None else super().rollout(now, failure)
