"""Model calls of a rollout: requested, parked and resumed around weight updates, retried after engine errors."""

from __future__ import annotations

import asyncio
import dataclasses
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal, Protocol, TypeVar

import msgspec
import numpy as np

from headway.config import schema
from headway.records.clients import Stop, TextCodec, Watch
from headway.records.counted import all_finite, sampled_mask
from headway.records.environment import PartialRollout
from headway.records.generation import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    PartialResponse,
    SamplingParameters,
)
from headway.records.rollout import CallTimes, Failure, Group, Pruned, Rollout
from headway.records.tokens import EXPERTS, KEPT, ExpertRouting, TokenIds, outside_kept, pixel_rows
from headway.rollout.seeds import rollout_seed
from headway.runtime.clock import Clock
from headway.runtime.retries import backoff_s
from headway.runtime.shared_timeout import SharedTimeout

Resumption = Literal["continue", "restart"]
ResumeGate = Callable[[PartialRollout], Awaitable[Resumption]]  # returns when a parked member may resume, and how
BeginGate = Callable[[int], Awaitable[None] | None]  # of a group: the wait before its next request; None: no wait
WatchOf = Callable[[Group, int], Watch | None]  # observer of a member's tokens while they are sampled
_Passed = TypeVar("_Passed")

TOO_STALE = "its environment's state is older than queue.max_environment_staleness"
_LONGEST_DETAIL = 4000  # characters of a traceback that are kept
_RETRY_S = 0.25  # before the first retry of an engine error; doubled for each further one


class Generate(Protocol):
    """The callable by which a rollout reaches the generator."""

    def __call__(self, request: GenerationRequest, watch: Watch | None = None, /) -> Awaitable[GenerationResult]: ...


class RequestControl(Protocol):
    """Controls open requests of the generator by their ids."""

    def cancel(self, request_id: str) -> None: ...

    def tokens_so_far(self, request_id: str) -> int: ...


class ModelCall(msgspec.Struct, frozen=True, kw_only=True):
    """A response to sample for a member of a group. The group's index is the priority of its requests."""

    group: Group
    member: int
    prompt_ids: Sequence[int]  # all tokens before the response
    partial: PartialResponse = PartialResponse()  # the part of the response that was sampled before
    resumes: int = 0  # parkings of the member so far: they count towards max_resumes
    purpose: str = ""  # separates request ids and random numbers from those of the member's other calls
    rows_known: int = 0  # as in GenerationRequest
    grammar: str = ""  # as in SamplingParameters
    session: str = ""  # calls with the same one are routed to the replica that holds the KV of the call before
    max_tokens: int | None = None  # of the response; None: rollout.max_response_tokens
    stop: tuple[str, ...] | None = None  # strings that end the response; None: rollout.stop
    environment_version: int = -1  # of the oldest turn whose effect the rollout's environment holds; -1: none
    resume_gate: ResumeGate | None = None  # None: the sampler's
    watch: Watch | None = None  # None: as the sampler's watch_of says

    @classmethod
    def first(cls, group: Group, member: int, parked: PartialRollout | None = None) -> ModelCall:
        """Return the call for a response to the group's own prompt, continued from where it was ``parked``."""
        response, resumes = (_empty_response(group), 0) if parked is None else (parked.response, parked.resumes + 1)
        return cls(group=group, member=member, prompt_ids=group.prompt_ids, partial=response, resumes=resumes)


@dataclass(eq=False)
class TurnSampler:
    """Samples responses through ``generate``; all makers of rollouts reach the generator through it.

    A call is *generating* until its request returns. It may be finished; parked by a weight update or by ``stop``
    ("abort"), then it waits at the resume gate and continues from its tokens; stopped for good by ``stop``, then it
    ends with the tokens it has; or failed in the engine ("error"), then it is retried from its tokens up to
    ``settings.retries`` times (never where the request is at fault) and ends failed, never with a reward.

    Example: ``rollout = await sampler.sample(ModelCall(group=group, member=0, prompt_ids=group.prompt_ids))``.
    """

    generate: Generate
    tokenizer: TextCodec
    settings: schema.RolloutConfig
    clock: Clock
    _: KW_ONLY
    run_seed: int
    temperature: float | None = None  # None: the settings'
    request_prefix: str = ""  # separates its request ids and random numbers from those of other samplers
    max_resumes: int | None = None  # a member parked this often isn't interrupted any more; None: no limit
    resume_gate: ResumeGate | None = None
    begin_gate: BeginGate | None = None  # asked before every request
    requests: RequestControl | None = None  # the generator, where members are stopped or their lengths read
    watch_of: WatchOf | None = None  # asked once for each call
    routing: ExpertRouting | None = None  # the shape of the experts that engines return; None: they return none
    kept_sets: int | None = None  # as in SamplingParameters, 0: no grammars either; None: nothing trains on its samples
    _open: dict[tuple[int, int], list[MemberProgress]] = field(init=False, default_factory=dict)  # calls by member

    def __post_init__(self) -> None:
        settings = self.settings
        self._limits = SharedTimeout(settings.timeout_s)
        self._sampling = SamplingParameters(
            temperature=settings.temperature if self.temperature is None else self.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            max_tokens=settings.max_response_tokens,
            stop_token_ids=self.tokenizer.stop_ids,
            stop=settings.stop,
        )

    def for_evaluation(self, request_prefix: str, temperature: float | None = None) -> TurnSampler:
        """Return a sampler at ``temperature`` (None: the settings') that shares this one's generator and gates. Its
        calls aren't watched and request no kept sets."""
        return dataclasses.replace(
            self, request_prefix=request_prefix, temperature=temperature, watch_of=None, kept_sets=None
        )

    def name(self, group: Group, member: int) -> str:
        """Return the name of a member's rollout, unique among all samplers of a run: ``GROUP-MEMBER`` after the
        prefix."""
        return f"{self.request_prefix}{group.index}-{member}"

    def text(self, rollout: Rollout) -> str:
        """Return the response as a verifier sees it: decoded, without special tokens."""
        return self.tokenizer.decode(rollout.judged_ids)

    def generating(self, group: int, member: int) -> bool:
        """Return whether a call of this member is open, parked ones included."""
        return (group, member) in self._open

    def stop(self, group: int, member: int, why: Stop) -> None:
        """Stop a member's open calls as soon as the generator returns their tokens (`RolloutMaker.stop`)."""
        for progress in self._open.get((group, member), ()):
            self._stop(progress, why)

    def _stop(self, progress: MemberProgress, why: Stop) -> None:
        if progress.stopped not in (None, "park"):
            return
        is_parked = progress.stopped == "park" or progress.waiting
        if (why == "park" and (is_parked or self._uninterrupted(progress))) or (why == "leave" and is_parked):
            return  # parked already, or protected
        progress.stopped = "park" if why == "leave" else why
        progress.stopping.set()
        if progress.request_id and self.requests is not None:
            self.requests.cancel(progress.request_id)

    def reached(self, group: int, member: int) -> int:
        """Return the response tokens of a member's open calls as far as they are known here; 0 where none is open."""
        return sum(map(self._reached, self._open.get((group, member), ())))

    def _reached(self, progress: MemberProgress) -> int:
        streamed_tokens = self.requests.tokens_so_far(progress.request_id) if self.requests is not None else 0
        return max(len(progress.response.ids), streamed_tokens)

    def refused(self, call: ModelCall) -> Rollout | None:
        """Return the failed rollout of a call whose prompt is empty, is longer than ``rollout.max_prompt_tokens``, or
        has pictures that can't be shown; None where the call can be sampled."""
        token_count, max_tokens, cause = len(call.prompt_ids), self.settings.max_prompt_tokens, call.group.task.unshown
        if not (cause or 0 < token_count <= max_tokens):
            cause = f"the prompt has {token_count} tokens; valid: 1 to rollout.max_prompt_tokens = {max_tokens}"
        failure = Failure(boundary="environment", cause=cause, infrastructure=False)
        return MemberProgress(call).rollout(self.clock.now(), failure) if cause else None

    @property
    def constraints(self) -> bool:
        """Whether answers may be constrained by grammars."""
        return self.kept_sets != 0

    async def sample(self, call: ModelCall) -> Rollout:
        """Sample the response to ``call`` as a rollout, finished or failed but not verified; raises nothing but
        cancellation. A call that takes longer than ``rollout.timeout_s`` fails with the tokens it has."""
        progress, failure = MemberProgress(call, self.clock.now()), None
        key = call.group.index, call.member
        open_calls = self._open.setdefault(key, [])
        open_calls.append(progress)
        try:
            with self._limits.block() as limit:
                failure = await self._generate_response(progress)
        except TimeoutError:
            if not limit.expired:
                raise
            failure = timed_out(self.settings)
        finally:
            open_calls.remove(progress)
            if not open_calls:
                del self._open[key]
        return progress.rollout(self.clock.now(), failure)

    async def _generate_response(self, progress: MemberProgress) -> Failure | None:
        """Submit until the response is complete or has failed; returns the failure."""
        call, prefix = progress.call, self.request_prefix + progress.call.purpose
        if call.grammar and not self.constraints:
            cause = "an answer within a grammar can't be trained on without algorithm.allow_truncated_sampling"
            return Failure(boundary="environment", cause=cause, infrastructure=False)
        group, member = call.group, call.member
        sampling = msgspec.structs.replace(
            self._sampling,
            seed=rollout_seed(self.run_seed, group.index, member, prefix),
            max_tokens=self._sampling.max_tokens if call.max_tokens is None else call.max_tokens,
            stop=self._sampling.stop if call.stop is None else call.stop,
            grammar=call.grammar,
            kept_sets=(self.kept_sets or 0) if call.grammar or self.settings.truncates else 0,
        )
        watch = call.watch
        if watch is None and self.watch_of is not None:
            watch = self.watch_of(group, member)
        error_count = 0
        while not progress.complete(sampling):
            if progress.stopped == "park":
                await self._wait_parked(progress)
                continue
            if isinstance(progress.stopped, Failure):
                return progress.stopped
            if progress.stopped is not None:
                progress.finish_reason = "abort"
                return None
            if self.begin_gate is not None and (gate_wait := self.begin_gate(group.index)) is not None:
                await _at_gate(gate_wait, progress)
                continue  # it may have been stopped meanwhile, or the gate closed again
            request = GenerationRequest(
                # a number per submission: late tokens of a failed one can't be taken for those of the next
                request_id=f"{prefix}{group.index}-{member}.{progress.resumes}.{error_count}",
                prompt_ids=call.prompt_ids,
                sampling=sampling,
                priority=group.index,
                partial=progress.response,
                interruptible=not self._uninterrupted(progress),
                session=call.session,
                oldest_version=group.admitted_version,
                rows_known=call.rows_known,
            )
            failure = await self._submit(request, progress, watch)
            if failure is not None:
                if error_count == self.settings.retries or not failure.infrastructure:
                    return failure
                error_count += 1
                await self.clock.sleep(backoff_s(error_count, _RETRY_S))
            elif progress.finish_reason != "abort":
                return None
            elif progress.stopped is None:  # by an update
                await self._wait_parked(progress)
        return None

    def _uninterrupted(self, progress: MemberProgress) -> bool:
        return self.max_resumes is not None and progress.resumes >= self.max_resumes

    async def _submit(
        self, request: GenerationRequest, progress: MemberProgress, watch: Watch | None
    ) -> Failure | None:
        """Submit once and keep the tokens in ``progress``. Returns a Failure when the engine failed the request."""
        progress.request_id = request.request_id
        try:
            outcome = await self.generate(request, watch)
        except Exception as error:  # the engine boundary's one capture point
            detail = "".join(traceback.format_exception(error))[-_LONGEST_DETAIL:]
            cause = f"the generator raised {type(error).__name__}: {error}"
            return Failure(boundary="engine", cause=cause[:300], infrastructure=True, detail=detail)
        finally:
            progress.request_id = ""
        fault = _fault(outcome.response) or self._misrouted(outcome.response) or _kept_fault(request, outcome.response)
        if not fault:
            progress.take(outcome, self.clock.now())
        if outcome.finish_reason == "error" or fault:
            cause = outcome.error or fault or "the engine gave no cause"
            return Failure(boundary="engine", cause=cause, infrastructure=not outcome.refused)
        return None

    def _misrouted(self, response: PartialResponse) -> str:
        """Return why the experts of a response can't be the model's; "" when they can, or there are none."""
        expert_rows = response.token_rows.get(EXPERTS)
        fault = "" if expert_rows is None or self.routing is None else self.routing.fault(expert_rows)
        return fault and f"the engine returned experts that the model doesn't have: {fault}"

    async def _wait_parked(self, progress: MemberProgress) -> None:
        """Wait at the gate until it opens or the member is stopped for good."""
        call = progress.call
        if progress.stopped == "park":
            progress.stopped = None
            progress.stopping.clear()
        gate = call.resume_gate or self.resume_gate
        if gate is not None:
            parked = PartialRollout(
                group=call.group.index,
                member=call.member,
                response=progress.response,
                resumes=progress.resumes,
                environment_version=call.environment_version,
            )
            resumption = await _at_gate(gate(parked), progress)
            if resumption is not None:
                progress.resume(resumption)
        progress.resumes += 1


async def _at_gate(gate: Awaitable[_Passed], progress: MemberProgress) -> _Passed | None:
    """Wait until ``gate`` opens and return its result; None where the member was stopped for good before."""
    progress.waiting = True
    gate_future = asyncio.ensure_future(gate)
    stop_future = asyncio.ensure_future(progress.stopping.wait())
    try:
        await asyncio.wait((gate_future, stop_future), return_when=asyncio.FIRST_COMPLETED)
        return gate_future.result() if gate_future.done() else None
    finally:
        progress.waiting = False
        gate_future.cancel()
        stop_future.cancel()


class MemberProgress:
    """Tokens and state of a member's open call: *generating* or *waiting* at a gate, until complete or stopped."""

    def __init__(self, call: ModelCall, started_s: float | None = None) -> None:
        """``started_s``: clock time of the call; None: it is never submitted."""
        self.call = call
        self.started_s = started_s
        self.response = call.partial
        self.resumes = call.resumes
        self.reprefills = 0
        self.first_token_s = 0.0
        self.finish_reason: FinishReason = "error"
        self.request_id = ""  # of its open request; "": none
        self.waiting = False  # at a gate
        self.stopped: Stop | None = None
        self.stopping = asyncio.Event()

    def take(self, result: GenerationResult, now: float) -> None:
        """Keep the tokens of a submission that came back."""
        self.finish_reason = result.finish_reason
        self.reprefills += result.reprefills
        token_count = len(result.response.ids)
        if token_count >= len(self.response.ids):  # a failed request may return without tokens
            self.response = result.response
        if self.first_token_s == 0.0 and token_count:
            self.first_token_s = result.first_token_s or now

    def resume(self, how: Resumption) -> None:
        """Resume as the gate decided. A later turn can't restart alone: its whole rollout restarts."""
        if how == "restart" and self.call.environment_version < 0:
            self.response = _empty_response(self.call.group)
        elif how == "restart":
            self.stopped = Failure(boundary="environment", cause=TOO_STALE, infrastructure=True)

    def complete(self, sampling: SamplingParameters) -> bool:
        """Return whether a continued response needs no further token, and set the finish reason then."""
        token_count = len(self.response.ids)
        if token_count and self.response.ids[-1] in sampling.stop_token_ids:
            self.finish_reason = "stop"
        elif token_count >= sampling.max_tokens:
            self.finish_reason = "length"
        else:
            return False
        return True

    def rollout(self, now: float, failure: Failure | None) -> Rollout:
        """Return the member as a rollout that ended at ``now`` (clock seconds)."""
        token_count, call_times = len(self.response.ids), ()
        if (start_s := self.started_s) is not None:
            call_times = (CallTimes(start_s=start_s, first_token_s=self.first_token_s, end_s=now, tokens=token_count),)
        return Rollout(
            group=self.call.group.index,
            member=self.call.member,
            prompt_ids=self.call.prompt_ids,
            response_ids=self.response.ids,
            response_logprobs=self.response.logprobs,
            response_mask=sampled_mask(self.response.ids),
            versions=self.response.versions,
            finish_reason="error" if failure is not None else self.finish_reason,
            failure=failure,
            pruned=self.stopped if isinstance(self.stopped, Pruned) and self.finish_reason == "abort" else None,
            opened_s=self.call.group.admitted_s,
            first_token_s=self.first_token_s,
            generated_s=now,
            finished_s=now if failure is not None else 0.0,
            resumes=self.resumes,
            reprefills=self.reprefills,
            call_times=call_times,
            token_rows=self.response.token_rows,
            grammars={grammar: ((0, token_count),)} if (grammar := self.call.grammar) and token_count else {},
        )


def _empty_response(group: Group) -> PartialResponse:
    """Return an empty response to the group's own prompt; it names the prompt's pictures."""
    return PartialResponse(token_rows=pixel_rows(group.task.pixels))


def timed_out(settings: schema.RolloutConfig) -> Failure:
    """Return the failure of a rollout or call that took longer than ``rollout.timeout_s``."""
    cause = f"not finished after rollout.timeout_s = {settings.timeout_s:g} s"
    return Failure(boundary="engine", cause=cause, infrastructure=True)


def _fault(response: PartialResponse) -> str:
    """Return why a response can't be trained on or continued; "" when it can."""
    id_count = len(response.ids)
    spanned = sum([span.tokens for span in response.versions])
    if len(response.logprobs) != id_count or spanned != id_count:
        return f"the engine returned {id_count} tokens, {len(response.logprobs)} log-probabilities, {spanned} versions"
    if not all_finite(response.logprobs):
        return "the engine returned a log-probability that is not finite"
    return ""


def _kept_fault(request: GenerationRequest, response: PartialResponse) -> str:
    """Return an error for the first token of a response that isn't in its recorded kept set; "" where there is none."""
    kept_rows = response.token_rows.get(KEPT)
    if kept_rows is None or not request.sampling.kept_sets:
        return ""
    token_ids = TokenIds.joined((request.prompt_ids, response.ids)).array[request.rows_known :][: len(kept_rows)]
    misfits = outside_kept(*kept_rows[: len(token_ids)].take(np.arange(len(token_ids))), token_ids)
    return f"the engine returned token {token_ids[misfits[0]]}, and a kept set without it" if len(misfits) else ""
