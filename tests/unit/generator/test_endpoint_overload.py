"""`headway serve` over the real pool with fake replicas: callers that wait or are refused, what engines refuse, and
where the next turn of a session goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from endpoint_server import chat, request, until
from fake_worker import FakeLauncher, FakeWorker
from openai import AsyncOpenAI

from headway.config.endpoint import EndpointConfig
from headway.config.load import validate_experiment
from headway.config.router import RouterConfig
from headway.generator.client import GeneratorPool
from headway.generator.fake_replica import ReplicaCosts
from headway.generator.recording.answer_tree import CallRequest
from headway.generator.recording.sessions import Session
from headway.records.errors import Overloaded
from headway.records.generation import GenerationRequest
from headway.runtime.clock import Clock, RealClock, run_virtual
from headway.services.serve import ServedSessions, sampling, served_pool
from headway.tokens.messages import normal_messages

CONTEXT = 400
USER: Any = {"role": "user", "content": "1+2?"}
BODY: Any = {"model": "headway", "messages": [USER], "max_tokens": 4}
WHOLE: Any = {"model": "headway", "messages": [USER]}  # asks for all of the context


@pytest.fixture(autouse=True)
def pings_often(monkeypatch: pytest.MonkeyPatch) -> None:
    of = EndpointConfig.of
    monkeypatch.setattr(EndpointConfig, "of", lambda section: of(section, stream_ping_s=0.02))


def pool_of(clock: Clock, router: dict[str, Any], replicas: int = 1, **costs: Any) -> tuple[GeneratorPool, Any]:
    """A pool whose replicas have KV for one whole context each, and its launcher."""
    raw = {
        "run": {"directory": "none"},
        "model": {"path": "none"},
        "tasks": {"train": {"path": "none"}},
        "rollout": {"max_prompt_tokens": CONTEXT - 1, "max_response_tokens": 1},
        "generator": {"devices": [f"cpu:{i}" for i in range(replicas)], "slots": 4, "kv_capacity_tokens": CONTEXT},
        "endpoint": {"address": "127.0.0.1:0"},
    }
    experiment = validate_experiment(raw, "test")
    costs = {"token_s": 1e-9, "slots": 4, **costs}
    launcher = FakeLauncher(clock, ReplicaCosts(**costs), length_of=lambda one: 3, start_s=0.0)
    settings = RouterConfig(**{"overcommit": 1.0, **router})
    return GeneratorPool(launcher, experiment, clock, router=settings), launcher


@dataclass
class Served:
    address: str
    pool: GeneratorPool
    worker: FakeWorker
    client: AsyncOpenAI

    async def ask(self, **more: Any) -> Any:
        return await self.client.chat.completions.create(**{**BODY, **more})


@asynccontextmanager
async def serving(**router: Any) -> AsyncIterator[Served]:
    clock = RealClock()
    pool, launcher = pool_of(clock, router)
    await pool.start()
    try:
        async with served_pool(pool._experiment, pool, chat().tokenizer, clock) as (address, _):
            client = AsyncOpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
            async with client:
                yield Served(address, pool, launcher.workers[0], client)
    finally:
        await pool.stop()


def play(test: Callable[[Served], Awaitable[None]], **router: Any) -> None:
    async def main() -> None:
        async with serving(**router) as server:
            await test(server)
            assert (server.pool.limiter.open_tokens, server.pool.limiter.waiting) == (0, 0)

    asyncio.run(main())


def test_who_finds_no_room_is_told_when_to_come_back() -> None:
    async def test(server: Served) -> None:
        go_on = server.worker.hang()
        first = asyncio.create_task(server.client.chat.completions.create(**WHOLE))
        await until(lambda: server.pool.limiter.open_tokens == CONTEXT)
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as refused:
                await server.ask(stream=stream)
            assert 1 <= int(refused.value.response.headers["retry-after"]) <= 60
            assert refused.value.code == "rate_limit_exceeded"
            assert "the router has no capacity left, and no request may wait" in str(refused.value)
        status, headers, body = await request(
            server.address, "POST", "/v1/messages", b'{"model":"headway","max_tokens":4,"messages":[%s]}'
            % b'{"role":"user","content":"a"}', {"x-api-key": "any"},
        )  # fmt: skip
        assert (status, b'"rate_limit_error"' in body, "retry-after" in headers) == (429, True, True)
        assert server.pool.routing().refusals == 3
        go_on()
        assert (await first).choices[0].finish_reason == "stop"
        assert (await server.ask()).usage.completion_tokens == 3

    play(test, queue_requests=0)


def test_who_waits_for_a_place_is_answered_in_turn() -> None:
    async def test(server: Served) -> None:
        go_on = server.worker.hang()
        first = asyncio.create_task(server.client.chat.completions.create(**WHOLE))
        await until(lambda: server.pool.limiter.open_tokens)
        second = asyncio.create_task(server.ask(n=2))
        await until(lambda: server.pool.limiter.waiting == 2)
        go_on()
        assert len((await second).choices) == 2
        await first

    play(test)


def test_a_stream_that_waits_for_its_place_can_still_be_refused() -> None:
    """It waits longer than the silence after which streams say that they live."""

    async def test(server: Served) -> None:
        go_on = server.worker.hang()
        first = asyncio.create_task(server.client.chat.completions.create(**WHOLE))
        await until(lambda: server.pool.limiter.open_tokens)
        with pytest.raises(openai.RateLimitError):
            await server.ask(stream=True)
        go_on()
        await first
        pieces = [chunk async for chunk in await server.ask(stream=True)]
        assert pieces[-1].choices[0].finish_reason == "stop"

    play(test, queue_s=0.2)


def test_a_stream_with_a_place_says_that_it_lives() -> None:
    async def test(server: Served) -> None:
        go_on = server.worker.hang()
        async with server.client.chat.completions.with_streaming_response.create(**BODY, stream=True) as raw:
            asyncio.get_running_loop().call_later(0.15, go_on)
            text = (await raw.read()).decode()
        assert text.count(": keepalive\n") > 1

    play(test)


def test_a_caller_that_leaves_gives_its_place_back() -> None:
    async def test(server: Served) -> None:
        server.worker.hang()
        for waiting in (0, 1):
            calls = [asyncio.create_task(server.client.chat.completions.create(**WHOLE)) for _ in range(1 + waiting)]
            await until(lambda: server.pool.limiter.waiting == waiting)  # noqa: B023 - awaited in this pass
            await until(lambda: server.pool.limiter.open_tokens)
            for call in calls:
                call.cancel()
            await until(lambda: not server.pool.limiter.open_tokens)

    play(test)


def test_what_was_not_sampled_is_given_back() -> None:
    """Of 400 tokens at once and 1 a second, calls that ask for 250 and take few leave the rest."""

    async def test(server: Served) -> None:
        for _ in range(3):
            assert (await server.ask(max_tokens=250)).usage.total_tokens < 40

    play(test, tokens_per_s=1.0, burst_s=float(CONTEXT), queue_requests=0)


def test_what_every_engine_would_refuse_is_the_requests_own_fault() -> None:
    """A text that is no Unicode can't be sent to any."""

    async def test(server: Served) -> None:
        for path, prompt in (("chat/completions", b'"messages":[{"role":"user","content":"a"}]'), ("completions", b'"prompt":"a"')):  # fmt: skip  # noqa: E501
            for stream in (b"false", b"true"):
                body = b'{"model":"headway","stop":["\\ud800"],"max_tokens":4,"stream":%s,%s}' % (stream, prompt)
                status, _, answer = await request(server.address, "POST", f"/v1/{path}", body, {})
                assert (status, b'"invalid_request_error"' in answer) == (400, True), answer
        assert server.worker.engine.core.finished == 0

    play(test)


def test_rollouts_of_a_run_are_never_refused() -> None:
    async def main(clock: Clock) -> None:
        pool, _ = pool_of(clock, {"queue_requests": 0, "requests_per_s": 1e-3, "burst_s": 1000.0})
        await pool.start()
        sample = sampling(pool.generate, chat().tokenizer, pool.limiter.permit)("")
        access = ServedSessions(chat(), pool._experiment, lambda name: sample, clock)
        ours = [asyncio.create_task(pool.generate(_request(i))) for i in range(50)]
        foreign = [access.session("").call(_asked("a")) for _ in range(2)]
        assert {result.finish_reason for result in await asyncio.gather(*ours)} == {"stop"}
        await asyncio.wait([call.task for call in foreign if call.task is not None])
        assert foreign[0].error is None
        assert isinstance(foreign[1].error, Overloaded)
        await pool.stop()

    run_virtual(main)


def _request(number: int) -> GenerationRequest:
    from headway.records.generation import SamplingParameters

    sampling = SamplingParameters(max_tokens=100, seed=number)
    return GenerationRequest(request_id=f"rollout-{number}", prompt_ids=(9,) * 300, sampling=sampling)


def _asked(*texts: str) -> CallRequest:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return CallRequest(messages=normal_messages(messages), max_tokens=300)


@pytest.mark.parametrize("named", [True, False])
def test_the_next_turn_of_a_session_goes_where_its_answer_is(named: bool) -> None:
    """The replica that sampled the answer has more to do than the other, by less than the answer's tokens: what is
    known of the prompt alone would not send the next turn there."""

    async def main(clock: Clock) -> list[int]:
        pool, launcher = pool_of(clock, {"prefix_block_tokens": 1, "overcommit": 100}, replicas=2, token_s=0.01)
        launcher.length_of = lambda one: 200
        await pool.start()
        access = ServedSessions(
            chat(), pool._experiment, sampling(pool.generate, chat().tokenizer, pool.limiter.permit), clock
        )

        async def turn(session: Session, *texts: str) -> str:
            answering = session.call(_asked(*texts))
            assert answering.task is not None
            await answering.task
            assert answering.error is None
            [answer] = answering.call.turns
            assert answer is not None
            return answer.message.content

        session = access.session("", "mine" if named else "")
        said = await turn(session, "1+2?")
        before = [worker.engine.core.finished for worker in launcher.workers]
        assert before == [1, 0]
        launcher.length_of = lambda one: 3 if len(one.prompt_ids) > 150 else 10_000
        busy = asyncio.create_task(pool.generate(_long(len(chat().tokenizer.encode(said)))))
        await asyncio.sleep(0)
        await turn(access.session("", "mine") if named else session, "1+2?", said, "more")
        found = [worker.engine.core.finished - were for worker, were in zip(launcher.workers, before, strict=True)]
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
        await pool.stop()
        return found

    assert run_virtual(main) == ([1, 0] if named else [0, 1])


def _long(answer_tokens: int) -> GenerationRequest:
    """It takes the first replica, which is free, and holds it with half as many tokens as the answer has."""
    from headway.records.generation import SamplingParameters

    sampling = SamplingParameters(max_tokens=90, seed=1)
    return GenerationRequest(request_id="busy", prompt_ids=(9,) * 10, sampling=sampling)
