"""Rollouts of outside workers: programs in any language, on any machine, that lease members and finish them."""

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

_FINISH = "finish"  # in the verdict of a rollout that a worker has finished
KeepRollout = Callable[[PartialRollout], None]  # commits it
_NO_SESSION = (
    "no answered model call is recorded under this lease's API key, and text can't be trained on: its tokens aren't "
    "known. Call the model at base_url with api_key; or write messages without a uid: they are kept for headway sft"
)


class Finish(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's report of a member that it has finished."""

    reward: float | None = None  # finite; None: the run's verifier scores the last answer
    solved: bool | None = None  # None: reward >= 1
    metadata: dict[str, Any] = {}  # of the worker's own, JSON types
    extra: dict[str, Any] = {}  # likewise

    @property
    def ending(self) -> LeaseEnding:
        """The end of the attempt: equal for equal reports, in whatever order the keys of their objects are."""
        encoded = msgspec.msgpack.encode(self, order="deterministic")
        digest = hashlib.blake2b(encoded, digest_size=8).hexdigest()
        return LeaseEnding("finished", f"reward = {self.reward} ({digest})")

    @classmethod
    def of(cls, rollout: Rollout) -> Finish | None:
        """The report of the worker that has finished a stored rollout; None: none has."""
        said = rollout.verdict.get(_FINISH)
        return None if said is None else msgspec.convert(said, cls)


@dataclass(frozen=True, kw_only=True)
class RemoteHost:
    """An orchestrator's side of outside workers: the endpoint they call the model at, and the desk for their leases."""

    environment: EnvironmentConfig
    endpoint: EndpointConfig
    conversations: Conversations
    desk: LeaseDesk


class LeaseDesk:
    """Where members that wait for workers and workers that wait for members meet.

    While members wait and no worker has any, a wait for "outside workers" is open, so that the watch over stalls names
    it.
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
        self.process = secrets.token_hex(4)  # a name that no other process of the run has
        self._waits = waits or Waits(clock.now)
        self._on_event = on_event
        self._attempts: dict[LeaseKey, RemoteAttempt] = {}  # offered or leased
        self._offers = asyncio.Event()
        self._unattended = ExitStack()  # of the wait that is open while no worker has a member
        self._waiting = False

    def offer(self, attempt: RemoteAttempt) -> int:
        """Offer an attempt to workers; returns its number."""
        number = self.book.offer(attempt.key, (attempt.group.index, attempt.member))
        self._attempts[attempt.key] = attempt
        self._offers.set()
        self._attend()
        return number

    def withdraw(self, attempt: RemoteAttempt, why: str) -> None:
        """Take an attempt back that has ended, if no worker ended it."""
        del self._attempts[attempt.key]
        self._end(attempt.key, LeaseEnding("withdrawn", why))

    async def lease(self, wait_s: float, gone: asyncio.Future[Any]) -> RemoteAttempt | None:
        """Lease the first member that is offered within ``wait_s``; None: none was, or its caller is ``gone``."""
        until_s = self.clock.now() + wait_s
        while (key := None if gone.done() else self.book.lease(self.clock.now())) is None:
            self._offers.clear()
            offered = asyncio.create_task(self._offers.wait(), name="lease")
            left_s = max(0.0, until_s - self.clock.now())
            await asyncio.wait((offered, gone), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            offered.cancel()
            if gone.done() or self.clock.now() >= until_s:
                return None
        self._attend()
        attempt = self._attempts[key]
        attempt.open()
        return attempt

    def renew(self, key: LeaseKey, number: int) -> None:
        """Renew a lease. Raises LeaseRefused."""
        self.book.renew(key, number, self.clock.now())

    def finish(self, key: LeaseKey, number: int, said: Finish) -> bool:
        """Finish a member with its recorded conversation: it is committed when this returns. Returns False where it was
        finished so before. Raises LeaseRefused."""
        return self._end_once(key, number, said.ending, lambda attempt: attempt.finish(said))

    def fail(self, key: LeaseKey, number: int, cause: str, *, infrastructure: bool) -> bool:
        """Fail an attempt; with ``infrastructure`` the member is offered again. Returns False where it was failed so
        before. Raises LeaseRefused."""
        cause = f"its worker gave it up: {cause}"[:300]
        failure = Failure(boundary="environment", cause=cause, infrastructure=infrastructure)
        return self._end_once(key, number, LeaseEnding("failed", cause), lambda attempt: attempt.fail(failure))

    def expire(self, attempt: RemoteAttempt) -> bool:
        """End an attempt whose lease has expired; returns whether it has."""
        over = self.book.expire(attempt.key, self.clock.now())
        if over:
            self._on_event("lease_expired", f"group {attempt.key[0]}, member {attempt.member}", attempt=attempt.number)
            self._attend()
        return over

    def _end_once(
        self, key: LeaseKey, number: int, ending: LeaseEnding, end: Callable[[RemoteAttempt], object]
    ) -> bool:
        first = self.book.require(key, number, ending)
        if first:
            end(self._attempts[key])
            self._end(key, ending)
        return first

    def _end(self, key: LeaseKey, ending: LeaseEnding) -> None:
        self.book.end(key, ending)
        self._attend()

    def _attend(self) -> None:
        unattended = bool(self.book.offered) and not self.book.leased
        if unattended and not self._waiting:
            what = f"{self.book.offered} members, which nobody leases,"
            self._unattended.enter_context(self._waits.on("a lease", "outside workers", what))
        elif not unattended:
            self._unattended.close()
        self._waiting = unattended


class RemoteRollouts(RetryingRollouts):
    """Makes rollouts out of the model calls of outside workers, token-exact (`RolloutMaker`).

    A member is offered until a worker leases it, however long that takes: ``rollout.timeout_s`` counts from the lease.
    A lease that expires, or that its worker fails, is an infrastructure failure of the attempt. Leases and finishes are
    committed before they are answered: after the death of the orchestrator a finished member is taken as it was, and
    the others are offered again, as later attempts.
    """

    def __init__(self, host: RemoteHost, sampler: TurnSampler, keep: KeepRollout | None = None) -> None:
        """``keep``: commits leases and finished members; None: they are an evaluation's, which is made anew."""
        super().__init__(sampler)
        self.host = host
        self.keep = keep

    def for_evaluation(self, request_prefix: str, temperature: float | None = None) -> RemoteRollouts:
        return RemoteRollouts(self.host, self.sampler.for_evaluation(request_prefix, temperature))

    def begin(self, group: Group, member: int) -> RemoteAttempt:
        return RemoteAttempt(self, group, member)

    async def generate_member(self, group: Group, member: int, parked: PartialRollout | None = None) -> Rollout:
        before = 0 if parked is None else parked.attempts
        if parked is not None and parked.finished is not None:
            return parked.finished
        if before:
            self.host.desk.book.restore(self.key(group, member), before)
        rollout = await super().generate_member(group, member)
        return msgspec.structs.replace(rollout, attempts=before + rollout.attempts)

    def key(self, group: Group, member: int) -> LeaseKey:
        """A member's name for workers. Those of evaluations are another process's never: their attempts are not in the
        books, and begin at 1 in each."""
        name = f"{self.sampler.request_prefix}{group.index}"
        return (name if self.keep is not None else f"{name}-{self.host.desk.process}"), member

    async def _attempt(self, attempt: RolloutAttempt) -> Rollout:
        assert isinstance(attempt, RemoteAttempt)
        desk, why = self.host.desk, "the run has stopped"
        attempt.number = desk.offer(attempt)
        try:
            await self._stoppable(attempt, attempt.wait_leased())
            if attempt.stopped is None:
                rollout = await super()._attempt(attempt)
            else:
                stopped = attempt.stopped if isinstance(attempt.stopped, Failure) else None
                rollout = attempt.rollout(self.sampler.clock.now(), stopped)
            why = why if rollout.failure is None else rollout.failure.cause
            return rollout
        finally:
            desk.withdraw(attempt, why)
            attempt.close()


class RemoteAttempt(ConversationAttempt):
    """An attempt played by an outside worker: *offered* -> *leased* (its conversation open) -> *over*."""

    def __init__(self, rollouts: RemoteRollouts, group: Group, member: int) -> None:
        super().__init__(rollouts.sampler, group, member)
        self.key = rollouts.key(group, member)
        self.number = 0  # among the member's attempts, from 1; 0: not offered yet
        self._rollouts = rollouts
        self._desk = rollouts.host.desk
        self._leased = asyncio.Event()
        self._changed = asyncio.Event()  # a model call or the attempt has ended
        self._kept: Rollout | None = None  # once it is finished

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
        """Seal the conversation of an attempt that was stopped before it ran."""
        for conversation in self._opened:
            conversation.seal()

    async def _play(self) -> None:
        while self._kept is None:
            self._changed.clear()
            open_call = self._sampling > 0  # a sign of life for as long as it is open
            if not open_call and self._desk.expire(self):
                cause = f"the lease of attempt {self.number} expired: no sign of life from its worker"
                raise RolloutFailed(Failure(boundary="environment", cause=cause, infrastructure=True))
            left_s = None if open_call else self._desk.book.left_s(self.key, self._sampler.clock.now())
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changed.wait()

    async def sampled(self, wanted: TurnRequest, told: OnTokens, /) -> GenerationResult:
        try:
            return await super().sampled(wanted, told)
        finally:
            with suppress(LeaseRefused):  # the attempt has ended meanwhile
                self._desk.renew(self.key, self.number)
            self._changed.set()

    def finish(self, said: Finish) -> None:
        """Seal the conversation and commit the rollout. Raises LeaseRefused for one without an answer that its worker
        has received, and for one whose last call the generator failed, which fails the attempt."""
        if self.stopped is not None or self._failed.done():
            raise LeaseRefused("lease_ended", f"the run has stopped attempt {self.number}")
        if self._engine is not None:
            self.fail(self._engine)
            raise LeaseRefused("attempt_failed", f"the generator failed the last model call: {self._engine.cause}")
        if not self._opened or not self.conversation.answered:
            raise LeaseRefused("session_not_recorded", _NO_SESSION)
        solved = said.solved if said.solved is not None else said.reward is not None and said.reward >= 1
        self._recorded = msgspec.structs.replace(self.conversation.seal(), reward=said.reward, solved=solved)
        self.note(0)
        rollout = super().rollout(self._sampler.clock.now())
        rollout = msgspec.structs.replace(rollout, verdict={_FINISH: msgspec.to_builtins(said)}, attempts=self.number)
        if self._rollouts.keep is not None:
            self._rollouts.keep(self._partial(rollout))
        self._kept = rollout
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
        """Wait at the gate, which commits ``parked`` in place of what was committed of this attempt before."""
        return await super()._park(msgspec.structs.replace(parked, attempts=self.number, finished=self._kept))

    def rollout(self, now: float, failure: Failure | None = None) -> Rollout:
        """A finished member is what was committed, whatever has happened since."""
        return self._kept if self._kept is not None else super().rollout(now, failure)
