"""Rollouts of several turns in a simulation: model and sandbox calls in turn, behind the generator's interface."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

import msgspec

from headway.generator.fake import FakeGenerator
from headway.planner.quantities import mix, uniform
from headway.planner.scenario import Scenario
from headway.planner.workload import Plan, TurnProfile, WorkloadModel
from headway.records.clients import Watch
from headway.records.counted import CountedTokens, Repeated, joined
from headway.records.generation import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    PartialResponse,
    VersionSpan,
)
from headway.rollout.fake import SANDBOX, EpisodeCounts
from headway.runtime.clock import Clock

_START, _TOOL = 101, 102  # purposes of random numbers
_NOTHING = PartialResponse()


@dataclass
class EnvironmentCounts:
    """Counts and times of simulated sandboxes. Seconds are summed over sandboxes."""

    started: int = 0
    start_failures: int = 0
    tool_calls: int = 0
    tool_failures: int = 0
    starting_s: float = 0.0
    waiting_s: float = 0.0  # for a place among those that start
    tool_s: float = 0.0
    live_s: float = 0.0
    live_peak: int = 0
    resumed_states: int = 0  # parked rollouts resumed in the sandbox they had
    restarted_states: int = 0  # parked rollouts restarted from the beginning, beyond queue.max_environment_staleness
    state_staleness_sum: int = 0  # versions between the oldest turn that a resumed sandbox holds and the resume
    state_staleness_max: int = 0
    tokens_begun_anew: int = 0  # response tokens lost with a sandbox


@dataclass
class _Life:
    """A rollout's state: its plan, its sandbox, and whether it has been cancelled."""

    plan: Plan
    calls: int = 0  # random numbers used
    turns: int = 0  # model calls made
    environment_s: float = 0.0  # spent between model calls
    live_since_s: float | None = None  # when its sandbox became ready; None: it has none
    oldest_version: int = -1  # version of the oldest turn whose effect the sandbox holds
    resumed_version: int = -1  # version when it was last resumed in that sandbox
    cut: bool = False  # cancelled
    waking: asyncio.Future[None] | None = None  # ends its wait for a reply
    request_id: str = ""  # of the model call it has open
    so_far: PartialResponse = _NOTHING


class EnvironmentGenerator:
    """A simulated generator for rollouts of several turns: a request is a whole rollout.

    Each turn is a request to ``engine`` whose prompt is everything before it; after the sandbox's latency its reply
    is added to the response as tokens that weren't sampled. A rollout that ends with "abort" was cut in a model call
    (by an update) or anywhere (by ``cancel``); resubmitted, it continues where it was. A failure of the sandbox ends
    the request with "error"; the next request starts from the beginning. The sandbox lives until the submitter calls
    ``forget``.
    """

    def __init__(self, engine: FakeGenerator, workload: WorkloadModel, scenario: Scenario, clock: Clock) -> None:
        self.engine = engine
        self.counts = EnvironmentCounts()
        self._workload = workload
        self.environment = scenario.environment
        self._scenario = scenario
        self.clock = clock
        self._lives: dict[int, _Life] = {}  # by sampling seed
        self._open: dict[str, _Life] = {}  # by request
        starting = scenario.environment.starting_at_once
        self._starting = asyncio.Semaphore(starting) if starting is not None else None
        self._live = 0
        # The rest of the Generator protocol is the engine's own.
        self.start, self.stop = engine.start, engine.stop
        self.routing, self.statistics = engine.routing, engine.statistics
        self.update_weights, self.applied_version = engine.update_weights, engine.applied_version
        self.score, self.rest_replicas = engine.score, engine.rest_replicas
        self.pause_replicas, self.resume_replicas = engine.pause_replicas, engine.resume_replicas

    # --- the Generator protocol -----------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest, watch: Watch | None = None) -> GenerationResult:
        """See :class:`headway.records.clients.Generator`."""
        key = request.sampling.seed
        life = self._lives.get(key)
        if life is None:
            life = self._lives[key] = _Life(plan=self._workload.plan(request))
        life.cut = False
        self._open[request.request_id] = life
        try:
            return await _Turns(self, request, life, watch).run()
        finally:
            del self._open[request.request_id]

    def forget(self, seed: int) -> EpisodeCounts:
        """Drop the rollout with this sampling seed, which is over; returns what it did."""
        life = self._lives.pop(seed, None)
        if life is None:
            return EpisodeCounts()
        self.end_sandbox(life)
        self.engine.forget_session(str(seed))
        return EpisodeCounts(life.turns, life.resumed_version, life.environment_s)

    def cancel(self, request_id: str) -> None:
        """End a rollout with reason "abort" and its tokens so far. Unknown ids: no-op."""
        life = self._open.get(request_id)
        if life is not None:
            life.cut = True
            if life.waking is not None:
                _wake(life.waking)
            if life.request_id:
                self.engine.cancel(life.request_id)

    def tokens_so_far(self, request_id: str) -> int:
        """See :class:`headway.records.clients.Generator`."""
        life = self._open.get(request_id)
        if life is None:
            return 0
        return len(life.so_far.ids) + (self.engine.tokens_so_far(life.request_id) if life.request_id else 0)

    # --- sandboxes ------------------------------------------------------------------------------------------

    def state_version(self, seed: int) -> int:
        """Version of the oldest turn whose effect the rollout's sandbox holds; -1 without such a turn."""
        life = self._lives.get(seed)
        return -1 if life is None else life.oldest_version

    def resume(self, seed: int, *, anew: bool) -> None:
        """Resume a parked rollout: in the sandbox it has, or (``anew``) from its beginning in a fresh one."""
        life = self._lives.get(seed)
        if life is None or life.oldest_version < 0:
            return  # no tool was called yet: nothing can be stale
        if anew:
            self.counts.restarted_states += 1
            self.begin_anew(life)
            return
        staleness = self.engine.version - life.oldest_version
        life.resumed_version = life.oldest_version
        self.counts.resumed_states += 1
        self.counts.state_staleness_sum += staleness
        self.counts.state_staleness_max = max(self.counts.state_staleness_max, staleness)

    def begin_anew(self, life: _Life) -> None:
        """Restart a rollout whose sandbox is lost, and with it the effect of its turns."""
        self.end_sandbox(life)
        self.counts.tokens_begun_anew += len(life.so_far.ids)
        life.so_far = PartialResponse()
        life.oldest_version = life.resumed_version = -1

    def end_sandbox(self, life: _Life) -> None:
        if life.live_since_s is not None:
            self.counts.live_s += self.clock.now() - life.live_since_s
            life.live_since_s = None
            self._live -= 1

    async def start_sandbox(self, life: _Life, key: int) -> str:
        """Start the rollout's sandbox; returns why that failed, or "". Over the account's limit it fails at once."""
        counts, environment = self.counts, self.environment
        if environment.live_at_once is not None and self._live >= environment.live_at_once:
            counts.start_failures += 1
            return f"{SANDBOX}environment.live_at_once = {environment.live_at_once} sandboxes are live"
        self._live += 1  # one that starts counts: a provider's limit does so too
        counts.live_peak = max(counts.live_peak, self._live)
        life.live_since_s = asked_s = self.clock.now()
        async with self._starting or contextlib.nullcontext():
            began_s = self.clock.now()
            counts.waiting_s += began_s - asked_s
            step = self.engine.version
            seconds = environment.start_s.draw(mix(key, _START), step)
            seconds *= self._scenario.drifted("environment.start_s", step)
            await self.clock.sleep(max(0.0, seconds))
            counts.starting_s += self.clock.now() - began_s
        if environment.start_failure and uniform(mix(key, _START, 1)) < environment.start_failure:
            counts.start_failures += 1
            self.end_sandbox(life)
            return f"{SANDBOX}it didn't start"
        counts.started += 1
        return ""

    async def call_tool(self, life: _Life, turn: TurnProfile, key: int) -> str:
        """Run a turn's tool call; returns why it failed, or "". Returns early when the rollout is cut."""
        self.counts.tool_calls += 1
        began_s = self.clock.now()
        loop = asyncio.get_running_loop()
        life.waking = replied = loop.create_future()
        timer = loop.call_later(turn.tool_s, _wake, replied)  # the loop's time is the clock's
        try:
            await replied
        finally:
            timer.cancel()
            life.waking = None
        self.counts.tool_s += self.clock.now() - began_s
        if self.environment.tool_failure and uniform(mix(key, _TOOL)) < self.environment.tool_failure:
            self.counts.tool_failures += 1
            return f"{SANDBOX}it was lost in a tool call"
        return ""


@dataclass
class _Turns:
    """A submission of a rollout: runs turn after turn until it ends or is cut."""

    _owner: EnvironmentGenerator
    _request: GenerationRequest
    _life: _Life
    _watch: Watch | None
    _reprefills: int = 0
    _first_token_s: float = 0.0

    async def run(self) -> GenerationResult:
        """Run the rollout from its present turn to its end."""
        reason, error = await self._go_on()
        if reason == "error":
            self._owner.begin_anew(self._life)
        return GenerationResult(
            request_id=self._request.request_id,
            response=self._life.so_far,
            finish_reason=reason,
            error=error,
            reprefills=self._reprefills,
            first_token_s=self._first_token_s,
        )

    async def _go_on(self) -> tuple[FinishReason, str]:
        life, environment = self._life, self._owner.environment
        position, done = 0, len(life.so_far.ids)
        if environment.start == "rollout" and life.live_since_s is None:
            error = await self._started()
            if error:
                return "error", error
        for number, turn in enumerate(life.plan.turns):
            last = number == len(life.plan.turns) - 1
            if done < position + turn.tokens:
                reason = await self._model_call(position + turn.tokens - done, last)
                if reason != "stop":
                    return reason, "the engine failed"
                done = position + turn.tokens
            if last:
                return "stop", ""
            position += turn.tokens + turn.reply_tokens
            if done < position:
                began_s = self._owner.clock.now()
                try:
                    reason, error = await self._tool_call(turn)
                finally:
                    life.environment_s += self._owner.clock.now() - began_s
                if reason != "stop":
                    return reason, error
                done = position
            if len(life.so_far.ids) >= self._request.sampling.max_tokens:
                return "length", ""
        raise AssertionError("a plan has a last turn")

    async def _model_call(self, tokens: int, last: bool) -> FinishReason:
        life, request = self._life, self._request
        if life.cut:
            return "abort"
        left = request.sampling.max_tokens - len(life.so_far.ids)
        wanted = min(tokens, left)
        how = msgspec.structs.replace(
            request.sampling,
            max_tokens=wanted,
            stop_token_ids=request.sampling.stop_token_ids if last and wanted == tokens else (),
        )
        key = request.sampling.seed
        call = GenerationRequest(
            request_id=f"{request.request_id}/{life.turns}",
            prompt_ids=CountedTokens.of(len(request.prompt_ids) + len(life.so_far.ids), seed=key),
            sampling=how,
            priority=request.priority,
            interruptible=request.interruptible,
            session=str(key) if self._owner.environment.keep_kv else "",
        )
        life.turns += 1
        life.request_id = call.request_id
        try:
            result = await self._owner.engine.generate(call, self._watched())
        finally:
            life.request_id = ""
        self._reprefills += result.reprefills
        self._first_token_s = self._first_token_s or result.first_token_s
        life.so_far = _joined(life.so_far, result.response)
        if result.finish_reason == "stop" and wanted < tokens:
            return "length"
        return result.finish_reason

    async def _tool_call(self, turn: TurnProfile) -> tuple[FinishReason, str]:
        """Wait for the sandbox's reply; "abort" when the rollout was cancelled meanwhile, even if a reply came."""
        life = self._life
        if life.cut:
            return "abort", ""
        if life.live_since_s is None:
            error = await self._started()
            if error:
                return "error", error
        if life.oldest_version < 0:
            life.oldest_version = life.so_far.versions[0].version
        life.calls += 1
        error = await self._owner.call_tool(life, turn, mix(self._request.sampling.seed, life.calls))
        if life.cut:
            return "abort", ""
        if error:
            return "error", error
        room = self._request.sampling.max_tokens - len(life.so_far.ids)
        life.so_far = _replied(life.so_far, min(room, turn.reply_tokens), self._request.sampling.seed)
        return "stop", ""

    async def _started(self) -> str:
        self._life.calls += 1
        return await self._owner.start_sandbox(self._life, mix(self._request.sampling.seed, self._life.calls))

    def _watched(self) -> Watch | None:
        """The rollout's watch, adapted to a single model call; None without one."""
        watch, before = self._watch, self._life.so_far
        if watch is None:
            return None
        return Watch(watch.every_tokens, lambda partial: watch.told(_joined(before, partial)))


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _joined(before: PartialResponse, new: PartialResponse) -> PartialResponse:
    return PartialResponse(
        ids=joined(before.ids, new.ids),
        logprobs=joined(before.logprobs, new.logprobs),
        versions=_appended(before.versions, new.versions),
    )


def _replied(before: PartialResponse, tokens: int, seed: int) -> PartialResponse:
    """``before`` with an environment's reply appended, whose tokens get the version of the token before them."""
    if not tokens:
        return before
    span = VersionSpan(version=before.versions[-1].version, tokens=tokens)
    return PartialResponse(
        ids=joined(before.ids, CountedTokens.of(tokens, seed, sampled=0)),
        logprobs=joined(before.logprobs, Repeated.of(before.logprobs[-1], tokens)),
        versions=_appended(before.versions, (span,)),
    )


def _appended(before: tuple[VersionSpan, ...], new: tuple[VersionSpan, ...]) -> tuple[VersionSpan, ...]:
    if before and new and before[-1].version == new[0].version:
        joined = VersionSpan(version=new[0].version, tokens=before[-1].tokens + new[0].tokens)
        return (*before[:-1], joined, *new[1:])
    return before + new
