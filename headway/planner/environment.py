"""Rollouts of several turns in a simulation: alternating model and sandbox calls behind the generator's interface."""

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
from headway.records.generation import FinishReason, GenerationRequest, GenerationResult, PartialResponse, VersionSpan
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
    waiting_s: float = 0.0  # for a free slot among those that start
    tool_s: float = 0.0
    live_s: float = 0.0
    live_peak: int = 0
    resumed_states: int = 0  # parked rollouts resumed in the sandbox they had
    restarted_states: int = 0  # parked rollouts restarted from the beginning, beyond queue.max_environment_staleness
    state_staleness_sum: int = 0  # versions between the oldest turn that a resumed sandbox holds and the resume
    state_staleness_max: int = 0
    lost_tokens: int = 0  # response tokens lost with a sandbox


@dataclass
class _RolloutState:
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
        self._states: dict[int, _RolloutState] = {}  # by sampling seed
        self._open: dict[str, _RolloutState] = {}  # by request
        starting = scenario.environment.starting_at_once
        self._starting = asyncio.Semaphore(starting) if starting is not None else None
        self._live = 0
        # The rest of the Generator protocol is the engine's own.
        self.start, self.stop = engine.start, engine.stop
        self.routing, self.statistics = engine.routing, engine.statistics
        self.update_weights, self.applied_version = engine.update_weights, engine.applied_version
        self.take_voided = engine.take_voided
        self.score, self.idle_replicas = engine.score, engine.idle_replicas
        self.pause_replicas, self.resume_replicas = engine.pause_replicas, engine.resume_replicas

    # --- the Generator protocol -----------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest, watch: Watch | None = None) -> GenerationResult:
        """See :class:`headway.records.clients.Generator`."""
        seed = request.sampling.seed
        state = self._states.get(seed)
        if state is None:
            state = self._states[seed] = _RolloutState(plan=self._workload.plan(request))
        state.cut = False
        self._open[request.request_id] = state
        try:
            return await _Turns(self, request, state, watch).run()
        finally:
            del self._open[request.request_id]

    def forget(self, seed: int) -> EpisodeCounts:
        """Drop the rollout with this sampling seed, which is over; returns its counts."""
        state = self._states.pop(seed, None)
        if state is None:
            return EpisodeCounts()
        self.end_sandbox(state)
        self.engine.forget_session(str(seed))
        return EpisodeCounts(state.turns, state.resumed_version, state.environment_s)

    def cancel(self, request_id: str) -> None:
        """End a rollout with reason "abort" and its tokens so far. Unknown ids: no-op."""
        state = self._open.get(request_id)
        if state is not None:
            state.cut = True
            if state.waking is not None:
                _wake(state.waking)
            if state.request_id:
                self.engine.cancel(state.request_id)

    def tokens_so_far(self, request_id: str) -> int:
        """See :class:`headway.records.clients.Generator`."""
        state = self._open.get(request_id)
        if state is None:
            return 0
        return len(state.so_far.ids) + (self.engine.tokens_so_far(state.request_id) if state.request_id else 0)

    # --- sandboxes ------------------------------------------------------------------------------------------

    def state_version(self, seed: int) -> int:
        """Version of the oldest turn whose effect the rollout's sandbox holds; -1 without such a turn."""
        state = self._states.get(seed)
        return -1 if state is None else state.oldest_version

    def resume(self, seed: int, *, restart: bool) -> None:
        """Resume a parked rollout: in the sandbox it has, or (``restart``) from its beginning in a fresh one."""
        state = self._states.get(seed)
        if state is None or state.oldest_version < 0:
            return  # no tool was called yet: nothing can be stale
        if restart:
            self.counts.restarted_states += 1
            self.restart_rollout(state)
            return
        staleness = self.engine.version - state.oldest_version
        state.resumed_version = state.oldest_version
        self.counts.resumed_states += 1
        self.counts.state_staleness_sum += staleness
        self.counts.state_staleness_max = max(self.counts.state_staleness_max, staleness)

    def restart_rollout(self, state: _RolloutState) -> None:
        """Restart a rollout whose sandbox is lost, and with it the effect of its turns."""
        self.end_sandbox(state)
        self.counts.lost_tokens += len(state.so_far.ids)
        state.so_far = PartialResponse()
        state.oldest_version = state.resumed_version = -1

    def end_sandbox(self, state: _RolloutState) -> None:
        if state.live_since_s is not None:
            self.counts.live_s += self.clock.now() - state.live_since_s
            state.live_since_s = None
            self._live -= 1

    async def start_sandbox(self, state: _RolloutState, key: int) -> str:
        """Start the rollout's sandbox; returns why that failed, or "". Over the account's limit it fails at once."""
        counts, environment = self.counts, self.environment
        if environment.live_at_once is not None and self._live >= environment.live_at_once:
            counts.start_failures += 1
            return f"{SANDBOX}environment.live_at_once = {environment.live_at_once} sandboxes are live"
        self._live += 1  # one that starts counts: a provider's limit does so too
        counts.live_peak = max(counts.live_peak, self._live)
        state.live_since_s = asked_s = self.clock.now()
        async with self._starting or contextlib.nullcontext():
            began_s = self.clock.now()
            counts.waiting_s += began_s - asked_s
            version = self.engine.version
            start_s = environment.start_s.draw(mix(key, _START), version)
            start_s *= self._scenario.drifted("environment.start_s", version)
            await self.clock.sleep(max(0.0, start_s))
            counts.starting_s += self.clock.now() - began_s
        if environment.start_failure and uniform(mix(key, _START, 1)) < environment.start_failure:
            counts.start_failures += 1
            self.end_sandbox(state)
            return f"{SANDBOX}it didn't start"
        counts.started += 1
        return ""

    async def call_tool(self, state: _RolloutState, turn: TurnProfile, key: int) -> str:
        """Run a turn's tool call; returns why it failed, or "". Returns early when the rollout is cut."""
        self.counts.tool_calls += 1
        began_s = self.clock.now()
        loop = asyncio.get_running_loop()
        state.waking = reply_future = loop.create_future()
        timer = loop.call_later(turn.tool_s, _wake, reply_future)  # the loop's time is the clock's
        try:
            await reply_future
        finally:
            timer.cancel()
            state.waking = None
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
    _state: _RolloutState
    _watch: Watch | None
    _reprefills: int = 0
    _first_token_s: float = 0.0

    async def run(self) -> GenerationResult:
        """Run the rollout from its present turn to its end."""
        reason, error = await self._run_turns()
        if reason == "error":
            self._owner.restart_rollout(self._state)
        return GenerationResult(
            request_id=self._request.request_id,
            response=self._state.so_far,
            finish_reason=reason,
            error=error,
            reprefills=self._reprefills,
            first_token_s=self._first_token_s,
        )

    async def _run_turns(self) -> tuple[FinishReason, str]:
        state, environment = self._state, self._owner.environment
        planned_tokens, done_tokens = 0, len(state.so_far.ids)
        if environment.start == "rollout" and state.live_since_s is None:
            error = await self._start_sandbox()
            if error:
                return "error", error
        for turn_index, turn in enumerate(state.plan.turns):
            is_last = turn_index == len(state.plan.turns) - 1
            if done_tokens < planned_tokens + turn.tokens:
                reason = await self._model_call(planned_tokens + turn.tokens - done_tokens, is_last)
                if reason != "stop":
                    return reason, "the engine failed"
                done_tokens = planned_tokens + turn.tokens
            if is_last:
                return "stop", ""
            planned_tokens += turn.tokens + turn.reply_tokens
            if done_tokens < planned_tokens:
                began_s = self._owner.clock.now()
                try:
                    reason, error = await self._tool_call(turn)
                finally:
                    state.environment_s += self._owner.clock.now() - began_s
                if reason != "stop":
                    return reason, error
                done_tokens = planned_tokens
            if len(state.so_far.ids) >= self._request.sampling.max_tokens:
                return "length", ""
        raise AssertionError("a plan has a last turn")

    async def _model_call(self, tokens: int, last: bool) -> FinishReason:
        state, request = self._state, self._request
        if state.cut:
            return "abort"
        remaining_tokens = request.sampling.max_tokens - len(state.so_far.ids)
        requested_tokens = min(tokens, remaining_tokens)
        sampling = msgspec.structs.replace(
            request.sampling,
            max_tokens=requested_tokens,
            stop_token_ids=request.sampling.stop_token_ids if last and requested_tokens == tokens else (),
        )
        seed = request.sampling.seed
        call_request = GenerationRequest(
            request_id=f"{request.request_id}/{state.turns}",
            prompt_ids=CountedTokens.of(len(request.prompt_ids) + len(state.so_far.ids), seed=seed),
            sampling=sampling,
            priority=request.priority,
            interruptible=request.interruptible,
            session=str(seed) if self._owner.environment.keep_kv else "",
        )
        state.turns += 1
        state.request_id = call_request.request_id
        try:
            generation = await self._owner.engine.generate(call_request, self._watch_of_call())
        finally:
            state.request_id = ""
        self._reprefills += generation.reprefills
        self._first_token_s = self._first_token_s or generation.first_token_s
        state.so_far = _extended(state.so_far, generation.response)
        if generation.finish_reason == "stop" and requested_tokens < tokens:
            return "length"
        return generation.finish_reason

    async def _tool_call(self, turn: TurnProfile) -> tuple[FinishReason, str]:
        """Wait for the sandbox's reply; "abort" when the rollout was cancelled meanwhile, even if a reply came."""
        state = self._state
        if state.cut:
            return "abort", ""
        if state.live_since_s is None:
            error = await self._start_sandbox()
            if error:
                return "error", error
        if state.oldest_version < 0:
            state.oldest_version = state.so_far.versions[0].version
        state.calls += 1
        error = await self._owner.call_tool(state, turn, mix(self._request.sampling.seed, state.calls))
        if state.cut:
            return "abort", ""
        if error:
            return "error", error
        remaining_tokens = self._request.sampling.max_tokens - len(state.so_far.ids)
        state.so_far = _with_reply(state.so_far, min(remaining_tokens, turn.reply_tokens), self._request.sampling.seed)
        return "stop", ""

    async def _start_sandbox(self) -> str:
        self._state.calls += 1
        return await self._owner.start_sandbox(self._state, mix(self._request.sampling.seed, self._state.calls))

    def _watch_of_call(self) -> Watch | None:
        """The rollout's watch, adapted to a single model call; None without one."""
        watch, prefix = self._watch, self._state.so_far
        if watch is None:
            return None
        return Watch(watch.every_tokens, lambda partial: watch.on_tokens(_extended(prefix, partial)))


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


def _extended(prefix: PartialResponse, addition: PartialResponse) -> PartialResponse:
    return PartialResponse(
        ids=joined(prefix.ids, addition.ids),
        logprobs=joined(prefix.logprobs, addition.logprobs),
        versions=_merged_spans(prefix.versions, addition.versions),
    )


def _with_reply(prefix: PartialResponse, tokens: int, seed: int) -> PartialResponse:
    """``prefix`` with an environment's reply appended, whose tokens get the version of the token before them."""
    if not tokens:
        return prefix
    span = VersionSpan(version=prefix.versions[-1].version, tokens=tokens)
    return PartialResponse(
        ids=joined(prefix.ids, CountedTokens.of(tokens, seed, sampled=0)),
        logprobs=joined(prefix.logprobs, Repeated.of(prefix.logprobs[-1], tokens)),
        versions=_merged_spans(prefix.versions, (span,)),
    )


def _merged_spans(spans: tuple[VersionSpan, ...], added: tuple[VersionSpan, ...]) -> tuple[VersionSpan, ...]:
    if spans and added and spans[-1].version == added[0].version:
        merged = VersionSpan(version=added[0].version, tokens=spans[-1].tokens + added[0].tokens)
        return (*spans[:-1], merged, *added[1:])
    return spans + added
