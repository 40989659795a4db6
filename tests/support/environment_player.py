"""Plays environments: turn by turn by their service alone, or as whole rollouts, recorded, over an engine that says
what a test wants."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from endpoint_server import chat

from headway.config import schema
from headway.config.endpoint import EndpointConfig, EnvironmentConfig
from headway.config.sandbox import SandboxConfig
from headway.generator.recording.sessions import Sessions
from headway.orchestrator.actors.environments import SANDBOXES
from headway.records.environment import EnvironmentState, NextTurn, Reply
from headway.records.generation import GenerationRequest, GenerationResult, PartialResponse, VersionSpan
from headway.records.rollout import Group, Rollout
from headway.records.task import Task
from headway.rollout.hosting.client import EnvironmentPool
from headway.rollout.hosting.service import Episodes, load_environment
from headway.rollout.makers.environment import EnvironmentRollouts, Environments
from headway.rollout.makers.turn_sampler import TurnSampler
from headway.runtime.clock import RealClock
from headway.runtime.workers import LocalLauncher
from headway.sandbox.backends import backend_of
from headway.sandbox.pool import PoolSettings, SandboxPool

TASK = Task(task_id="t", prompt="Play.")


def call(name: str, arguments: str, call_id: str = "1") -> dict[str, Any]:
    """An answer that calls a tool."""
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def service(sandbox: Mapping[str, Any] = {}, **settings: Any) -> Episodes:
    """What a worker has, in this process."""
    section = EnvironmentConfig.model_validate(settings)
    boxes, clock = SandboxConfig.model_validate(sandbox), RealClock()
    pool = SandboxPool(backend_of(boxes), PoolSettings(), clock)
    return Episodes(load_environment(section), section, pool, boxes, boxes.spec, clock)


class Player:
    """One rollout by the service alone; it remembers what was said."""

    def __init__(self, episodes: Episodes, task: Task = TASK, name: str = "7-0") -> None:
        self.episodes = episodes
        self.task = task
        self.name = name
        self.messages: dict[str, list[dict[str, Any]]] = {}
        self.last = Reply(over="not begun")
        self.rewards: list[float | None] = []

    async def begin(self, seed: int = 0) -> str:
        """What was said last."""
        return self._heard(await self.episodes.begin(self.name, self.task, seed))

    async def begin_reply(self) -> Reply:
        await self.begin()
        return self.last

    async def answer(self, said: str | dict[str, Any], cut: bool = False) -> str:
        assert self.last.asked is not None, self.last
        message = {"role": "assistant", "content": said} if isinstance(said, str) else said
        speaker = self.last.asked.speaker
        self.messages[speaker].append(message)
        reply = await self.episodes.reply(self.name, message, speaker, cut)
        self.rewards.append(reply.reward)
        return self._heard(reply)

    async def play(self, answers: Iterable[str | dict[str, Any]]) -> Reply:
        await self.begin()
        for said in answers:
            await self.answer(said)
        return self.last

    async def parked(self) -> EnvironmentState:
        """As it is stored."""
        state = await self.episodes.park(self.name)
        assert isinstance(state, EnvironmentState), state
        return msgspec.json.decode(msgspec.json.encode(state), type=EnvironmentState)

    async def moved(self, to: Episodes) -> Any:
        """Parked, and gone on with in another process; the failure, if it can't be."""
        state, asked = await self.parked(), self.last.asked
        assert asked is not None
        self.episodes = to
        return await to.restore(self.name, self.task, state, asked, self.messages)

    def _heard(self, reply: Reply) -> str:
        self.last = reply
        if reply.asked is None:
            return ""
        said = self.messages.setdefault(reply.asked.speaker, [])
        said.extend(reply.asked.messages)
        return said[-1]["content"] if said else ""


def played(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(main(), 60))


class _Pool:
    """The pool of workers, without any: rollouts are played in this process."""

    def __init__(self, episodes: Episodes) -> None:
        self.episodes = episodes

    @asynccontextmanager
    async def lease(self, name: str) -> AsyncIterator[Any]:
        try:
            yield _Seated(self.episodes, name)
        finally:
            await self.episodes.end(name)


class _Seated:
    working_s = 0.0

    def __init__(self, episodes: Episodes, name: str) -> None:
        for method in ("begin", "restore", "reply", "score", "park", "unpark"):
            setattr(self, method, functools.partial(getattr(episodes, method), name))


def spelled(text: str, *, ended: bool = True) -> list[int]:
    """A token for every character: as no encoder would have it."""
    tokenizer = chat().tokenizer
    return [i for character in text for i in tokenizer.encode(character)] + [tokenizer.eos_id] * ended


Says = Callable[[str], str]  # the prompt's text -> an answer


@asynccontextmanager
async def workers(
    sandbox: Mapping[str, Any] = {}, snapshots: Path | None = None, **settings: Any
) -> AsyncIterator[EnvironmentPool]:
    """Real ones."""
    clock = RealClock()
    section = EnvironmentConfig.model_validate(settings)
    pool = EnvironmentPool(
        LocalLauncher(clock),
        section,
        SandboxConfig.model_validate(sandbox),
        clock,
        sandboxes=SANDBOXES,
        snapshots=snapshots,
    )
    try:
        await pool.start()
        yield pool
    finally:
        await pool.stop()


async def rollout(
    players: Episodes | EnvironmentPool,
    says: Says,
    task: Task = TASK,
    requests: list[GenerationRequest] | None = None,
    **settings: Any,
) -> Rollout:
    """A whole one."""
    pool: Any = _Pool(players) if isinstance(players, Episodes) else players

    async def generate(request: GenerationRequest, watch: Any = None, /) -> GenerationResult:
        if requests is not None:
            requests.append(request)
        ids = spelled(says(chat().tokenizer.decode(request.prompt_ids)))
        cut = len(ids) > request.sampling.max_tokens
        ids = ids[: request.sampling.max_tokens]
        number = len(requests or ())
        response = PartialResponse(
            ids=tuple(ids),
            logprobs=tuple(-1.0 - number - place / 1024 for place in range(len(ids))),
            versions=(VersionSpan(version=3, tokens=len(ids)),),
        )
        reason: Any = "length" if cut else "stop"
        return GenerationResult(request_id=request.request_id, response=response, finish_reason=reason)

    section = schema.RolloutConfig.model_validate(
        {"max_prompt_tokens": 2000, "max_response_tokens": 4000, "retries": 0, **settings}
    )
    conversations = Sessions(chat(), EndpointConfig(), 6000)
    environments = Environments(conversations=conversations, pool=pool)
    sampler = TurnSampler(generate, chat().tokenizer, section, RealClock(), run_seed=3)
    maker = EnvironmentRollouts(environments, sampler)
    group = Group(index=7, task=task, prompt_ids=(5,), size=1, admitted_version=0, admitted_s=0.0)
    made = await maker.generate_member(group, 0)
    assert len(conversations) == 0
    return made


def asked_tools(asked: NextTurn | None) -> Sequence[str]:
    return [] if asked is None else [tool["function"]["name"] for tool in asked.tools]


def spelled_call(name: str, arguments: str) -> str:
    """A call of a tool as the model writes it."""
    return f'\n<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
