"""One member of a group against an engine that answers as it is told, under a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headway.config import schema
from headway.records.clients import Watch
from headway.records.environment import PartialRollout
from headway.records.generation import GenerationRequest, GenerationResult, PartialResponse, VersionSpan
from headway.records.rollout import Group, Rollout
from headway.records.task import Task
from headway.rollout.makers.single_turn import SingleTurn
from headway.rollout.makers.turn_sampler import TurnSampler
from headway.runtime.clock import Clock, run_virtual

EOS, END_OF_TURN = 2, 3


class Letters:
    """A tokenizer of one letter a token; ids under 10 are special."""

    stop_ids = (EOS, END_OF_TURN)

    def decode(self, ids: Any) -> str:
        return "".join(chr(i) for i in ids if i >= 10)


def group(index: int = 5, prompt: int = 3, admitted_s: float = 0.0) -> Group:
    return Group(
        index=index,
        task=Task(task_id="t", prompt="abc"),
        prompt_ids=tuple(range(65, 65 + prompt)),
        size=4,
        admitted_version=7,
        admitted_s=admitted_s,
    )


def response(text: str, *versions: tuple[int, int], eos: bool = False) -> PartialResponse:
    ids = tuple(map(ord, text)) + ((EOS,) if eos else ())
    spans = versions or ((7, len(ids)),)
    return PartialResponse(
        ids=ids,
        logprobs=tuple(-0.5 for _ in ids),
        versions=tuple(VersionSpan(version=v, tokens=n) for v, n in spans if n),
    )


def answer(request: GenerationRequest, reason: Any, partial: PartialResponse, **more: Any) -> GenerationResult:
    return GenerationResult(request_id=request.request_id, response=partial, finish_reason=reason, **more)


Reply = Callable[[GenerationRequest], GenerationResult] | Exception


class Engine:
    """Answers submission i with ``replies[i]`` after a second; keeps the requests."""

    def __init__(self, clock: Clock, *replies: Reply) -> None:
        self.clock = clock
        self.replies = replies
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest, watch: Watch | None = None, /) -> GenerationResult:
        self.requests.append(request)
        await self.clock.sleep(1.0)
        reply = self.replies[len(self.requests) - 1]
        if isinstance(reply, Exception):
            raise reply
        return reply(request)


def play(
    *replies: Reply, member: int = 1, a_group: Group | None = None, parked: PartialRollout | None = None, **options: Any
) -> tuple[Rollout, Engine]:
    """One member against an engine that answers with ``replies``."""
    rollout_settings = schema.RolloutConfig(
        max_prompt_tokens=4, max_response_tokens=6, temperature=0.7, stop=("#",), **options.pop("settings", {})
    )

    async def main(clock: Clock) -> tuple[Rollout, Engine]:
        engine = Engine(clock, *replies)
        single = SingleTurn(TurnSampler(engine.generate, Letters(), rollout_settings, clock, run_seed=11, **options))
        return await single.generate_member(a_group or group(), member, parked), engine

    return run_virtual(main, limit_s=10_000)


def finish(partial: PartialResponse, reason: Any = "stop", **more: Any) -> Reply:
    return lambda request: answer(request, reason, partial, **more)
