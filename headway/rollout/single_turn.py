"""The life of a single-turn rollout: one prompt, one response, survived parkings and engine errors."""

from __future__ import annotations

import asyncio
import copy
import traceback
from collections.abc import Awaitable, Callable
from typing import Literal, Protocol, TypeVar

import msgspec

from headway.config import schema
from headway.records.clients import TextCodec, Watch
from headway.records.counted import all_finite, sampled_mask
from headway.records.environment import Parked, SavedEpisode
from headway.records.generation import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    PartialResponse,
    SamplingParameters,
)
from headway.records.rollout import Failure, Group, Pruned, Rollout, Verdict
from headway.rollout.seeds import rollout_seed
from headway.runtime.backoff import backoff_s
from headway.runtime.clock import Clock

Resumption = Literal["continue", "restart", "fail"]
ResumeGate = Callable[[Parked], Awaitable[Resumption]]  # returns when a parked member may go on, and how
BeginGate = Callable[[int], Awaitable[None] | None]  # what a request of this group must wait for; None: nothing
WatchOf = Callable[[Group, int], Watch | None]  # who is told of a member's tokens while they come
Stop = Pruned | Failure | Literal["park"]
_Passed = TypeVar("_Passed")

TOO_STALE = "its environment holds what a policy older than queue.max_environment_staleness did"
_LONGEST_DETAIL = 4000  # characters of a traceback that are kept
_RETRY_S = 0.25  # before the first retry of an engine error; doubled for each further one


class Generate(Protocol):
    """How a rollout reaches the generator."""

    def __call__(self, request: GenerationRequest, watch: Watch | None = None, /) -> Awaitable[GenerationResult]: ...


class OpenRequests(Protocol):
    """What a rollout may ask of the generator beside that: of a request that it has open."""

    def cancel(self, request_id: str) -> None: ...

    def tokens_so_far(self, request_id: str) -> int: ...


class SingleTurn:
    """Produces un-verified rollouts through an injected ``generate``.

    A member is *generating* until its request comes back: finished; or parked by a weight update or by ``stop``
    ("abort"), then it waits at ``resume_gate`` and goes on from its tokens; or stopped for good by ``stop``, then it
    ends with the tokens it has; or failed in the engine ("error"), then it is retried from its tokens up to
    ``settings.retries`` times (never where the request is at fault) and ends failed, never with a reward.

    Example: ``rollout = await single_turn.generate_member(group, 0)``, then
    ``[verdict] = await verifier.verify(group.task, [single_turn.text(rollout)])`` unless ``rollout.failure`` is set,
    then ``apply_verdict(rollout, verdict, clock.now())``.
    """

    def __init__(
        self,
        generate: Generate,
        tokenizer: TextCodec,
        settings: schema.Rollout,
        clock: Clock,
        *,
        run_seed: int,
        temperature: float | None = None,
        request_prefix: str = "",
        max_resumes: int | None = None,
        resume_gate: ResumeGate | None = None,
        begin_gate: BeginGate | None = None,
        requests: OpenRequests | None = None,
        watch_of: WatchOf | None = None,
    ) -> None:
        """``temperature`` overrides the settings' (an evaluation's); ``request_prefix`` keeps its requests and its
        random numbers apart.

        A member parked ``max_resumes`` times runs uninterrupted by updates and parkings from then on (None: never).
        ``begin_gate`` is asked before every request, whatever turn it is of. ``requests``: the generator, where
        members are to be stopped or asked how far they are. ``watch_of`` is asked once for each member.
        """
        self._generate = generate
        self._requests = requests
        self._watch_of = watch_of
        self._lives: dict[tuple[int, int], list[_Life]] = {}  # of a member: one for each request that it has open
        self._environment_version = -1  # of the oldest turn whose effect its rollouts' environment holds; -1: none
        self._session = ""  # of its rollouts' turns: each goes where the KV of the one before is
        self._tokenizer = tokenizer
        self._settings = settings
        self._clock = clock
        self._run_seed = run_seed
        self._prefix = request_prefix
        self._max_resumes = max_resumes
        self._resume_gate = resume_gate
        self._begin_gate = begin_gate
        self._sampling = SamplingParameters(
            temperature=settings.temperature if temperature is None else temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            max_tokens=settings.max_response_tokens,
            stop_token_ids=tokenizer.stop_ids,
            stop=settings.stop,
        )

    def prefixed(self, request_prefix: str) -> SingleTurn:
        """The same with another ``request_prefix``."""
        twin = copy.copy(self)
        twin._prefix = request_prefix
        twin._lives = {}
        return twin

    def text(self, rollout: Rollout) -> str:
        """The response as the verifier sees it: decoded, special tokens left out."""
        return self._tokenizer.decode(rollout.judged_ids)

    def stop(self, group: int, member: int, why: Stop) -> None:
        """Stop a member of the group with this admission index, as soon as the generator hands out its tokens.

        Pruned: it ends with them, to be verified as it stands. Failure: it ends failed. "park": it waits at the gate
        and goes on from them, unless it was parked often enough. No-op for one that isn't generating or was stopped.
        """
        for life in self._lives.get((group, member), ()):
            self._stop(life, why)

    def _stop(self, life: _Life, why: Stop) -> None:
        if life.stopped not in (None, "park"):
            return
        if why == "park" and (life.stopped == "park" or life.waiting or self._uninterrupted(life)):
            return  # parked already, or protected
        life.stopped = why
        life.stopping.set()
        if life.request_id and self._requests is not None:
            self._requests.cancel(life.request_id)

    def reached(self, group: int, member: int) -> int:
        """Response tokens of a member that is generating or parked, as far as they are known here; else 0."""
        return sum(map(self._reached, self._lives.get((group, member), ())))

    def _reached(self, life: _Life) -> int:
        streamed = self._requests.tokens_so_far(life.request_id) if self._requests is not None else 0
        return max(len(life.response.ids), streamed)

    async def generate_member(
        self,
        group: Group,
        member: int,
        partial: PartialResponse = PartialResponse(),
        resumes: int = 0,
        saved: SavedEpisode | None = None,
    ) -> Rollout:
        """Member ``member`` of ``group``, finished or failed but not verified; raises nothing but cancellation.

        ``partial``, ``resumes`` and ``saved`` continue a member that a former process had begun.
        """
        life = _Life(opened_s=group.admitted_s, response=partial, resumes=resumes)
        longest = self._settings.max_prompt_tokens
        if not 0 < len(group.prompt_ids) <= longest:
            cause = f"the prompt has {len(group.prompt_ids)} tokens; valid: 1 to rollout.max_prompt_tokens = {longest}"
            failure = Failure(boundary="environment", cause=cause, infrastructure=False)
            return life.rollout(group, member, self._clock.now(), failure)
        failure = None
        lives = self._lives.setdefault((group.index, member), [])
        lives.append(life)
        try:
            async with asyncio.timeout(self._settings.timeout_s) as limit:
                failure = await self._generate_response(group, member, life)
        except TimeoutError:
            if not limit.expired():
                raise
            cause = f"not finished after rollout.timeout_s = {self._settings.timeout_s:g} s"
            failure = Failure(boundary="engine", cause=cause, infrastructure=True)
        finally:
            lives.remove(life)
            if not lives:
                del self._lives[group.index, member]
        return life.rollout(group, member, self._clock.now(), failure)

    async def _generate_response(self, group: Group, member: int, life: _Life) -> Failure | None:
        """Submit until the response is complete; returns why it never will be."""
        seed = rollout_seed(self._run_seed, group.index, member, self._prefix)
        sampling = msgspec.structs.replace(self._sampling, seed=seed)
        watch = None if self._watch_of is None else self._watch_of(group, member)
        errors = 0
        while not life.complete(sampling):
            if life.stopped == "park":
                await self._wait_parked(group, member, life)
                continue
            if isinstance(life.stopped, Failure):
                return life.stopped
            if life.stopped is not None:
                life.finish_reason = "abort"
                return None
            if self._begin_gate is not None and (opening := self._begin_gate(group.index)) is not None:
                await _at_gate(opening, life)
                continue  # it may have been stopped meanwhile, or the gate closed again
            request = GenerationRequest(
                # a number per submission: late tokens of a failed one can't be taken for those of the next
                request_id=f"{self._prefix}{group.index}-{member}.{life.resumes}.{errors}",
                prompt_ids=group.prompt_ids,
                sampling=sampling,
                priority=group.index,
                partial=life.response,
                interruptible=not self._uninterrupted(life),
                session=self._session,
            )
            failure = await self._submit(request, life, watch)
            if failure is not None:
                if errors == self._settings.retries or not failure.infrastructure:
                    return failure
                errors += 1
                await self._clock.sleep(backoff_s(errors, _RETRY_S))
            elif life.finish_reason != "abort":
                return None
            elif life.stopped is None:  # by an update
                await self._wait_parked(group, member, life)
        return None

    def _uninterrupted(self, life: _Life) -> bool:
        return self._max_resumes is not None and life.resumes >= self._max_resumes

    async def _submit(self, request: GenerationRequest, life: _Life, watch: Watch | None) -> Failure | None:
        """One submission; its tokens go into ``life``. Returns a Failure when the engine failed it."""
        life.request_id = request.request_id
        try:
            result = await self._generate(request, watch)
        except Exception as error:  # the engine boundary's one capture point
            detail = "".join(traceback.format_exception(error))[-_LONGEST_DETAIL:]
            cause = f"the generator raised {type(error).__name__}: {error}"
            return Failure(boundary="engine", cause=cause[:300], infrastructure=True, detail=detail)
        finally:
            life.request_id = ""
        fault = _fault(result.response)
        if not fault:
            life.take(result, self._clock.now())
        if result.finish_reason == "error" or fault:
            cause = result.error or fault or "the engine gave no cause"
            return Failure(boundary="engine", cause=cause, infrastructure=not result.refused)
        return None

    async def _wait_parked(self, group: Group, member: int, life: _Life) -> None:
        """At the gate, until it opens or the member is stopped for good."""
        if life.stopped == "park":
            life.stopped = None
            life.stopping.clear()
        if self._resume_gate is not None:
            parked = Parked(
                group=group.index,
                member=member,
                response=life.response,
                resumes=life.resumes,
                environment_version=self._environment_version,
            )
            resumption = await _at_gate(self._resume_gate(parked), life)
            if resumption is not None:
                life.go_on(resumption, in_environment=self._environment_version >= 0)
        life.resumes += 1


async def _at_gate(gate: Awaitable[_Passed], life: _Life) -> _Passed | None:
    """Wait there: what it says when it opens. None: the member was stopped for good before."""
    life.waiting = True
    opened = asyncio.ensure_future(gate)
    stopped = asyncio.ensure_future(life.stopping.wait())
    try:
        await asyncio.wait((opened, stopped), return_when=asyncio.FIRST_COMPLETED)
        return opened.result() if opened.done() else None
    finally:
        life.waiting = False
        opened.cancel()
        stopped.cancel()


class _Life:
    """What a member has so far."""

    def __init__(self, opened_s: float, response: PartialResponse, resumes: int) -> None:
        self.opened_s = opened_s
        self.response = response
        self.resumes = resumes
        self.reprefills = 0
        self.first_token_s = 0.0
        self.finish_reason: FinishReason = "error"
        self.request_id = ""  # of the request it has open
        self.waiting = False  # at the gate
        self.stopped: Stop | None = None
        self.stopping = asyncio.Event()

    def take(self, result: GenerationResult, now: float) -> None:
        self.finish_reason = result.finish_reason
        self.reprefills += result.reprefills
        if len(result.response.ids) >= len(self.response.ids):  # a failed request may come back empty-handed
            self.response = result.response
        if self.first_token_s == 0.0 and result.response.ids:
            self.first_token_s = result.first_token_s or now

    def go_on(self, how: Resumption, *, in_environment: bool) -> None:
        """As the gate decided. A turn that is not the first can't begin anew by itself: its whole rollout does."""
        if how == "restart" and not in_environment:
            self.response = PartialResponse()
        elif how != "continue":
            self.stopped = Failure(boundary="environment", cause=TOO_STALE, infrastructure=how == "restart")

    def complete(self, sampling: SamplingParameters) -> bool:
        """Whether a continued response needs no further token; sets the finish reason then."""
        ids = self.response.ids
        if ids and ids[-1] in sampling.stop_token_ids:
            self.finish_reason = "stop"
        elif len(ids) >= sampling.max_tokens:
            self.finish_reason = "length"
        else:
            return False
        return True

    def rollout(self, group: Group, member: int, now: float, failure: Failure | None) -> Rollout:
        return Rollout(
            group=group.index,
            member=member,
            prompt_ids=group.prompt_ids,
            response_ids=self.response.ids,
            response_logprobs=self.response.logprobs,
            response_mask=sampled_mask(self.response.ids),
            versions=self.response.versions,
            finish_reason="error" if failure is not None else self.finish_reason,
            failure=failure,
            pruned=self.stopped if isinstance(self.stopped, Pruned) and self.finish_reason == "abort" else None,
            opened_s=self.opened_s,
            first_token_s=self.first_token_s,
            generated_s=now,
            finished_s=now if failure is not None else 0.0,
            resumes=self.resumes,
            reprefills=self.reprefills,
        )


def _fault(response: PartialResponse) -> str:
    """Why a response can't be trained on or continued; "" when it can."""
    tokens = len(response.ids)
    spanned = sum(span.tokens for span in response.versions)
    if len(response.logprobs) != tokens or spanned != tokens:
        return f"the engine returned {tokens} tokens, {len(response.logprobs)} log-probabilities, {spanned} versions"
    if not all_finite(response.logprobs):
        return "the engine returned a log-probability that is not finite"
    return ""


def apply_verdict(rollout: Rollout, verdict: Verdict, now: float) -> Rollout:
    """``rollout`` verified at ``now`` (clock seconds). A rollout that had failed before keeps its failure.

    Rewards by turn are the verdict's, one for each turn; of a rollout that brought its own, the verdict's reward is
    added to the last."""
    if rollout.failure is not None:
        return msgspec.structs.replace(rollout, finished_s=now)
    ends = rollout.turn_ends or (len(rollout.response_ids),)
    turns = verdict.turn_rewards
    if not turns and rollout.turn_rewards and verdict.failure is None:
        turns = (*rollout.turn_rewards[:-1], rollout.turn_rewards[-1] + float(verdict.reward))
    if turns and (len(turns) != len(ends) or rollout.branches):
        cause = f"the verifier gave rewards of {len(turns)} turns to a response of {len(ends)}"
        if rollout.branches:
            cause = "the verifier gave rewards by turn to a rollout with branches, whose turns have no one order"
        failure = Failure(boundary="reward", cause=cause, infrastructure=False)
        verdict, turns = msgspec.structs.replace(verdict, failure=failure), ()
    return msgspec.structs.replace(
        rollout,
        reward=float(verdict.reward) if verdict.failure is None else 0.0,
        solved=verdict.solved and verdict.failure is None,
        turn_ends=ends if turns else rollout.turn_ends,
        turn_rewards=turns,
        verdict=verdict.detail,
        failure=verdict.failure,
        verify_s=verdict.verify_s,
        judge_tokens=verdict.judge_tokens,
        judge_cost=verdict.judge_cost,
        finished_s=now,
    )
