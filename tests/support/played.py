"""Rollouts in environments on the virtual clock: a policy that says what a test wants, environments in this process,
sandboxes that are dictionaries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from endpoint_server import chat
from fake_sandboxes import FakeBackend

from headway.config import schema
from headway.config.endpoint import EndpointConfig, EnvironmentConfig
from headway.config.sandbox import SandboxConfig
from headway.generator.recording.sessions import Sessions
from headway.records.clients import Watch
from headway.records.environment import PartialRollout
from headway.records.generation import GenerationRequest, GenerationResult, PartialResponse, VersionSpan
from headway.records.rollout import Group, Rollout
from headway.records.task import Task
from headway.rollout.environment import Environment
from headway.rollout.hosting.client import EnvironmentDied, EnvironmentPool
from headway.rollout.hosting.service import Episodes
from headway.rollout.makers.environment import EnvironmentRollouts, Environments
from headway.rollout.makers.turn_sampler import TurnSampler
from headway.rollout.tools import tools_by_name
from headway.runtime.clock import Clock, run_virtual
from headway.sandbox.pool import PoolSettings, SandboxPool

CONTEXT_TOKENS = 4000
SETTINGS = schema.RolloutConfig(max_prompt_tokens=100, max_response_tokens=100, retries=2, timeout_s=1000.0)
TASK = Task(task_id="t", prompt="1+2?", answer="3", verifier="exact", metadata={"level": 1})
GROUP = Group(index=7, task=TASK, prompt_ids=(5,), size=2, admitted_version=0, admitted_s=0.0)


@dataclass(frozen=True)
class Parts:
    """What is said in two parts: between them, weights are updated, and the request is parked."""

    before: str
    after: str


Says = Callable[[str, int], str | Parts | None]  # (the prompt's text, how many answers before); None: the engine fails
Gate = Callable[[PartialRollout], Awaitable[Any]]


@dataclass
class Policy:
    """Samples what ``says`` says, a token for each character, of the version that is applied."""

    says: Says
    clock: Clock
    version: int = 0
    answers: int = 0
    requests: list[GenerationRequest] = field(default_factory=list)
    _parts: dict[tuple[int, ...], Parts] = field(default_factory=dict)  # by prompt: parked ones

    async def __call__(self, request: GenerationRequest, watch: Watch | None = None, /) -> GenerationResult:
        self.requests.append(request)
        await self.clock.sleep(1.0)
        tokenizer = chat().tokenizer
        parts = self._parts.pop(request.prompt_ids, None)
        prompt = tokenizer.decode(list(request.prompt_ids), keep_special=True)
        said = parts.after if parts is not None else self.says(prompt, self.answers)
        if said is None:
            return GenerationResult(
                request_id=request.request_id, response=request.partial, finish_reason="error", error="no engine"
            )
        if isinstance(said, Parts):
            self._parts[request.prompt_ids] = said
            return self._result(request, said.before, "abort")
        self.answers += 1
        return self._result(request, said, "stop")

    def _result(self, request: GenerationRequest, text: str, how: str) -> GenerationResult:
        tokenizer, before = chat().tokenizer, request.partial
        ids = [i for character in text for i in tokenizer.encode(character)]
        if how == "stop":
            ids.append(tokenizer.stop_ids[0])
        most = request.sampling.max_tokens - len(before.ids)
        if len(ids) > most:
            ids, how = ids[:most], "length"
        spans = [*before.versions, VersionSpan(version=self.version, tokens=len(ids))]
        response = PartialResponse(
            ids=(*before.ids, *ids), logprobs=(*before.logprobs, *(-0.5 for _ in ids)), versions=tuple(spans)
        )
        return GenerationResult(request_id=request.request_id, response=response, finish_reason=cast("Any", how))


class InProcess:
    """Seats of an environment pool, without its processes. ``dies_at``: the so-many-th calls find it dead."""

    def __init__(self, episodes: Episodes, dies_at: Sequence[int] = ()) -> None:
        self.episodes = episodes
        self.calls: list[str] = []
        self.working_s: dict[str, float] = {}  # by rollout, in replies and scores
        self._dies_at = dies_at

    @asynccontextmanager
    async def lease(self, name: str) -> AsyncIterator[Any]:
        seat, self.working_s[name] = _Seat(self, name), 0
        try:
            yield seat
        finally:
            await self.episodes.end(name)

    async def call(self, method: str, name: str, *arguments: Any) -> Any:
        self.calls.append(method)
        if len(self.calls) in self._dies_at:
            raise EnvironmentDied("environment-0 died: killed by signal 9")
        now = asyncio.get_running_loop().time
        began_s = now()
        result = await getattr(self.episodes, method)(name, *arguments)
        self.working_s[name] += now() - began_s if method in ("reply", "score") else 0
        return result


class _Seat:
    def __init__(self, pool: InProcess, name: str) -> None:
        self._pool, self._name = pool, name

    @property
    def working_s(self) -> float:
        return self._pool.working_s[self._name]

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        return lambda *arguments: self._pool.call(method, self._name, *arguments)


@dataclass
class Played:
    rollout: Rollout
    policy: Policy
    pool: InProcess
    backend: FakeBackend
    duration_s: float


def play(
    environment: Environment,
    says: Says | Sequence[str | Parts | None],
    *,
    group: Group = GROUP,
    gate: Callable[[Policy], Gate] | None = None,
    parked: PartialRollout | None = None,
    snapshots: Mapping[str, dict[str, bytes]] = {},
    failures: Sequence[Any] = (),
    answer: Any = None,
    dies_at: Sequence[int] = (),
    pool_of: Callable[[Episodes, Sequence[int]], InProcess] = InProcess,
    max_turns: int = 16,
    context_tokens: int = CONTEXT_TOKENS,
    live: int = 4,
    meanwhile: Callable[[EnvironmentRollouts, SandboxPool, Clock], Awaitable[Any]] | None = None,
    **settings: Any,
) -> Played:
    """Member 1 of ``group``, from its beginning or from ``parked``. ``says``: a function, or the answers in turn."""
    script = says if callable(says) else lambda prompt, answers: says[answers]

    async def main(clock: Clock) -> Played:
        policy = Policy(script, clock)
        extra = {} if answer is None else {"answer": answer}
        backend = FakeBackend(clock, failures=failures, **extra)
        backend.snapshots.update(snapshots)
        boxes = SandboxPool(backend, PoolSettings(live=live, retries=0), clock)
        environment.offered = tools_by_name(environment.tools())
        played = EnvironmentConfig(name="mine:Mine", max_turns=max_turns)
        episodes = Episodes(environment, played, boxes, SandboxConfig(), SandboxConfig().spec, clock)
        pool = pool_of(episodes, dies_at)
        sessions = Sessions(chat(), EndpointConfig(call_timeout_s=1000), context_tokens)
        environments = Environments(conversations=sessions, pool=cast("EnvironmentPool", pool))
        sampler = TurnSampler(
            policy,
            chat().tokenizer,
            SETTINGS.model_copy(update=settings),
            clock,
            run_seed=3,
            resume_gate=None if gate is None else gate(policy),
        )
        rollouts = EnvironmentRollouts(environments, sampler)
        making = rollouts.generate_member(group, 1, parked)
        if meanwhile is not None:
            task = asyncio.ensure_future(making)
            await meanwhile(rollouts, boxes, clock)
            rollout = await task
        else:
            rollout = await making
        assert len(sessions) == 0
        assert backend.sandboxes == {}
        return Played(rollout, policy, pool, backend, clock.now())

    return run_virtual(main)


def text_of(played: Played) -> str:
    """The whole rollout as its model reads it."""
    rollout = played.rollout
    return chat().tokenizer.decode([*rollout.prompt_ids, *rollout.response_ids], keep_special=True)
