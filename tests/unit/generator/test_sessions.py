"""Sessions under a clock: calls side by side in any order, clients that leave and come again; nothing learned twice."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from endpoint_server import chat
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_agent import TOOLS, Engine

from headway.config.endpoint import EndpointConfig
from headway.generator.recording.answer_tree import CallRequest
from headway.generator.recording.inflight_call import CallFailed
from headway.generator.recording.sessions import KeyRefused, NoSuchRollout, Sessions
from headway.records.conversations import ClientSampling, OnTokens, RecordedConversation, RequestRefused, TurnRequest
from headway.records.generation import GenerationResult, PartialResponse, VersionSpan
from headway.runtime.clock import Clock, run_virtual
from headway.tokens.messages import normal_messages
from headway.tokens.output_parsing import openai_message

KINDS = ("qwen2.5", "qwen3", "r1", "llama3.1")


class TimedEngine:
    """Answers out of tokens that no encoder would choose, some later than others; some fail."""

    def __init__(self, kind: str, chance: random.Random, clock: Clock) -> None:
        self.engine = Engine(chat(kind).tokenizer, chance)
        self.chance = chance
        self.clock = clock
        self.open: set[str] = set()
        self.handed_out: list[float] = []  # log-probabilities of answers that came to their end

    async def __call__(self, wanted: TurnRequest, told: OnTokens, /) -> GenerationResult:
        assert wanted.purpose not in self.open
        self.open.add(wanted.purpose)
        try:
            request = SimpleNamespace(stop=wanted.stop)
            call: Any = SimpleNamespace(
                number=0, prompt_ids=wanted.prompt_ids, max_tokens=wanted.max_tokens, request=request
            )
            await self.clock.sleep(self.chance.random())
            result = self.engine.answer(call)
            response = result.response
            half = len(response.ids) // 2
            if half:
                told(PartialResponse(ids=response.ids[:half], logprobs=response.logprobs[:half]))
            await self.clock.sleep(self.chance.random())
            fate = self.chance.random()
            if fate < 0.1:
                raise RuntimeError("the engine broke")
            if fate < 0.2:
                return GenerationResult(request_id="", response=response, finish_reason="error", error="no device")
            self.handed_out += response.logprobs
            return result
        finally:
            self.open.discard(wanted.purpose)


async def client(session: Any, chance: random.Random, clock: Clock, number: int) -> None:
    """Goes on from its answers, leaves now and then, and tries again what failed."""
    talk: list[dict[str, Any]] = [{"role": "user", "content": f"{number % 2}+2?"}]
    for _ in range(3):
        request = CallRequest(
            messages=normal_messages(talk),
            tools=TOOLS if number % 2 else None,
            choices=chance.choice([1, 1, 2]),
            max_tokens=chance.choice([None, 20]),
        )
        turns: Any = ()
        named = chance.random() < 0.5
        for _ in range(3):
            answering = session.call(request, ClientSampling(), f"{number} {talk}" if named else "")
            leave = answering.join(lambda: None)
            try:
                if answering.task is not None:
                    patience = 0.7 if chance.random() < 0.2 else 100.0
                    await asyncio.wait((answering.task,), timeout=patience)
            finally:
                leave()
            if answering.over and answering.error is None:
                turns = answering.call.turns
                answering.note_received()
                break
        if not turns:
            return
        entry = openai_message(chance.choice(turns).message, session.chat.written)
        talk += [entry, {"role": "user", "content": "go on"}]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**9))
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_clients_do_every_answer_is_learned_once(kind: str, seed: int) -> None:
    async def main(clock: Clock) -> tuple[RecordedConversation, TimedEngine]:
        chance = random.Random(seed)
        engine = TimedEngine(kind, chance, clock)
        session = Sessions(chat(kind), EndpointConfig(), 100_000).open("7-0", engine, constraints=True)
        clients = [client(session, chance, clock, number) for number in range(4)]
        await asyncio.gather(*clients)
        await clock.sleep(10)
        assert not session.busy
        assert not engine.open
        return session.seal(), engine

    conversation, engine = run_virtual(main)
    context = engine.engine.context
    learned: Counter[float] = Counter()
    for branch in conversation.branches:
        ids = (*branch.prompt_ids, *branch.response_ids)
        for place, (logprob, mask) in enumerate(zip(branch.response_logprobs, branch.response_mask, strict=True)):
            if mask:
                learned[logprob] += 1
                assert context[logprob] == ids[: len(branch.prompt_ids) + place + 1]
    assert set(learned.values()) <= {1}
    assert learned.keys() <= set(engine.handed_out)


ONE = PartialResponse(ids=(5, 6), logprobs=(-1.0, -1.0), versions=(VersionSpan(version=0, tokens=2),))
ASKED = CallRequest(messages=normal_messages([{"role": "user", "content": "1+2?"}]))


async def at_once(wanted: TurnRequest, told: OnTokens, /) -> GenerationResult:
    return GenerationResult(request_id="", response=ONE, finish_reason="stop")


def sessions(**settings: Any) -> Sessions:
    return Sessions(chat(), EndpointConfig(**settings), 1000)


def test_keys_are_secret_and_name_one_rollout() -> None:
    async def main(clock: Clock) -> None:
        found = sessions()
        one, other = found.open("7-0", at_once, constraints=True), found.open("7-1", at_once, constraints=True)
        assert one.key != other.key
        assert len(one.key) >= 43  # 256 bits
        assert (found.session(one.key), found.rollout(other.reward_key, "7-1")) == (one, other)
        for key in ("", "hw-", one.key[:-1], "é\udcff"):
            with pytest.raises(KeyRefused):
                found.session(key)
        with pytest.raises(NoSuchRollout):
            found.rollout(one.key, "7-1")
        with pytest.raises(RequestRefused, match="can't post a reward"):
            found.rollout(one.key, "7-0")
        one.seal()
        with pytest.raises(RequestRefused, match="has ended"):
            found.session(one.key)
        assert one.seal() is one.seal()
        assert len(found) == 1

    run_virtual(main)


def test_a_call_that_is_cancelled_before_it_began_is_closed() -> None:
    async def main(clock: Clock) -> None:
        session = sessions().open("7-0", at_once, constraints=True)
        answering = session.call(ASKED)
        answering.join(lambda: None)()
        await clock.sleep(1)
        assert isinstance(answering.error, CallFailed)
        assert not session.busy
        assert not session.recorder._open
        assert session.seal().abandoned_calls == 1

    run_virtual(main)


def test_one_choice_that_fails_ends_the_others() -> None:
    async def main(clock: Clock) -> None:
        cancelled: list[str] = []

        async def sample(wanted: TurnRequest, told: OnTokens, /) -> GenerationResult:
            if wanted.purpose.endswith(":0"):
                await clock.sleep(1)
                raise RuntimeError("broke")
            try:
                told(ONE)
                await clock.sleep(100)
            except asyncio.CancelledError:
                cancelled.append(wanted.purpose)
                raise
            raise AssertionError

        session = sessions().open("7-0", sample, constraints=True)
        answering = session.call(CallRequest(messages=ASKED.messages, choices=3))
        assert answering.task is not None
        await answering.task
        assert (str(answering.error), len(cancelled), clock.now()) == ("broke", 2, 1.0)
        conversation = session.seal()
        assert (conversation.abandoned_tokens, conversation.turns) == (4, 0)

    run_virtual(main)


def test_results_that_are_not_token_exact_answer_nothing() -> None:
    async def main(clock: Clock) -> None:
        async def sample(wanted: TurnRequest, told: OnTokens, /) -> GenerationResult:
            return GenerationResult(
                request_id="", response=PartialResponse(ids=(5,), logprobs=(-1.0,)), finish_reason="stop"
            )

        session = sessions().open("7-0", sample, constraints=True)
        answering = session.call(ASKED)
        assert answering.task is not None
        await answering.task
        assert "0 tokens in version spans" in str(answering.error)
        assert session.seal().turns == 0

    run_virtual(main)
