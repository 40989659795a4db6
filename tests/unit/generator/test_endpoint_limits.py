"""The endpoint over real HTTP: keys, retries, clients that leave, failures, and what one may ask for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from typing import Any

import openai
import pytest
from endpoint_server import (
    BODY,
    TOOLS,
    USER,
    ScriptedEngine,
    Served,
    events_of,
    play,
    recorded,
    request,
    talk,
    until,
)
from openai import AsyncOpenAI
from tokenizers import Tokenizer as Backend

from headway.records.conversations import OnTokens, TurnRequest
from headway.records.errors import Overloaded
from headway.records.generation import GenerationResult, PartialResponse


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        headers = {"authorization": f"Bearer {server.session.key}", "content-length": "10"}
        status, _, body = await request(server.address, "POST", "/v1/chat/completions", b"{", headers)
        assert (status, json.loads(body)["error"]["code"]) == (408, "timeout")

    play(test, body_timeout_s=0.05)


def test_keys() -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        other = server.open("8-0")
        for key in ("", "hw-wrong"):
            status, _, answer = await server.post("/v1/chat/completions", BODY, key=key)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            assert (await server.post("/v1/models", None, method="GET", key=key))[0] == 401
        assert (await server.post("/v1/chat/completions", BODY, key="", headers={"x-api-key": other.key}))[0] == 200
        assert (len(other.recorder.turns), len(server.session.recorder.turns)) == (1, 0)
        reward = {"reward": 1}
        for key in (server.session.key, server.session.reward_key):
            assert (await server.post("/v1/rollouts/8-0/reward", reward, key=key))[0] == 404
            assert (await server.post("/v1/rollouts/none/reward", reward, key=key))[0] == 404
        status, _, answer = await server.post("/v1/rollouts/8-0/reward", reward, key=other.key)
        assert (status, answer["error"]["code"]) == (403, "reward_refused")
        assert (await server.post("/v1/rollouts/8-0/reward", reward, key=other.reward_key))[0] == 200
        assert (await server.post("/v1/chat/completions", BODY, key=other.reward_key))[0] == 401
        assert (other.seal().reward, server.session.seal().reward) == (1.0, None)
        status, headers, answer = await server.post("/v1/chat/completions", BODY)
        assert (status, answer["error"]["code"], headers["x-should-retry"]) == (409, "rollout_closed", "false")
        assert len(server.sessions) == 0

    play(test)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"reward": 0.5}, 200),
        ({"reward": 0.5, "solved": True}, 200),
        ({"reward": "1"}, 400),
        ({"reward": True}, 400),
        (b'{"reward": NaN}', 400),
        (b'{"reward": 1e999}', 400),
        (b'{"reward": 1' + 400 * b"0" + b"}", 400),
        ({"reward": 1, "solved": 1}, 400),
        ({}, 400),
    ],
)
def test_rewards(body: Any, status: int) -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        key = server.session.reward_key
        await server.post("/v1/rollouts/7-0/reward", {"reward": 0.25}, key=key)
        assert (await server.post("/v1/rollouts/7-0/reward", body, key=key))[0] == status
        await server.post("/v1/chat/completions", BODY)
        conversation = recorded(server)
        taken = status == 200
        assert conversation.reward == (0.5 if taken else 0.25)
        assert conversation.solved == (taken and "solved" in body)
        assert (await server.post("/v1/rollouts/7-0/reward", {"reward": 1}, key=key))[0] == 409

    play(test)


def test_a_retry_joins_the_call_or_gets_its_answer_again() -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        server.engine.gate = asyncio.Event()
        chat, again = "/v1/chat/completions", {"idempotency-key": "k"}
        first = asyncio.create_task(server.post(chat, BODY, headers=again))
        await until(lambda: server.engine.asked)
        second = asyncio.create_task(server.post(chat, BODY, headers=again))
        streamed = asyncio.create_task(server.post(chat, {**BODY, "stream": True}, headers=again))  # another request
        await until(lambda: len(server.engine.asked) == 2)
        server.engine.gate.set()
        answers = [(await task)[2] for task in (first, second)]
        await streamed
        assert answers[0]["choices"] == answers[1]["choices"]
        third = (await server.post(chat, BODY, headers=again))[2]
        assert third["choices"] == answers[0]["choices"]
        repeated = (await server.post(chat, {**BODY, "stream": True}, headers=again))[2]
        pieces = [data["choices"][0]["delta"].get("content", "") for _, data in events_of(repeated)[:-1]]
        assert "".join(pieces) == "hello"
        assert len(server.engine.asked) == 2
        await server.post(chat, BODY)  # no retry: a sample of its own
        assert len({wanted.purpose for wanted in server.engine.asked}) == 3
        assert recorded(server).turns == 3

    play(test)


@pytest.mark.parametrize("answered", [False, True])
def test_a_retry_of_an_equal_request_takes_no_others_sample(answered: bool) -> None:
    """Of two equal requests side by side, one loses its connection and comes again, counting its retries as clients of
    both APIs do: whether the other is open still or answered, each has a sample of its own."""

    async def test(server: Served, client: AsyncOpenAI) -> None:
        server.engine.gate = asyncio.Event()
        asking = client.chat.completions.create
        broken, twin = [asyncio.create_task(asking(**BODY)) for _ in range(2)]  # type: ignore[call-overload]
        await until(lambda: len(server.engine.asked) == 2)
        broken.cancel()
        await until(lambda: server.engine.cancelled)
        if answered:
            server.engine.gate.set()
            await twin
        again = asyncio.create_task(asking(**BODY, extra_headers={"x-stainless-retry-count": "1"}))  # type: ignore[call-overload]
        if not answered:
            await until(lambda: len(server.engine.asked) == 3)
            server.engine.gate.set()
        await asyncio.gather(again, twin)
        assert len({wanted.purpose for wanted in server.engine.asked}) == 3
        conversation = recorded(server)
        assert (conversation.turns, conversation.abandoned_calls) == (2, 1)

    play(test)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_client_that_leaves_ends_its_call(streaming: bool) -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        server.engine.gate = asyncio.Event()
        call = asyncio.create_task(
            client.chat.completions.create(model="headway", messages=[USER], stream=streaming)  # type: ignore[call-overload]
        )
        if streaming:
            await (await call).close()
        else:
            await until(lambda: server.engine.asked)
            call.cancel()
        await until(lambda: server.engine.cancelled and not server.session.busy)
        conversation = recorded(server)
        assert (conversation.turns, conversation.calls, conversation.abandoned_calls) == (0, 0, 1)
        assert conversation.abandoned_tokens == 3
        assert not conversation.branches

    play(test)


def test_a_rollout_that_ends_leaves_no_call_open() -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        server.engine.gate = asyncio.Event()
        call = asyncio.create_task(server.post("/v1/chat/completions", {**BODY, "n": 2}))
        await until(lambda: len(server.engine.asked) == 2)
        conversation = server.session.seal()
        assert (conversation.abandoned_calls, conversation.turns) == (1, 0)
        assert (await call)[0] == 409
        assert server.engine.cancelled == 2

    play(test)


def test_failures_of_the_generator() -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        server.engine.error = Overloaded("300 requests wait already", 7)
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as busy:
                await client.chat.completions.create(**BODY, stream=stream)  # type: ignore[call-overload]
            assert busy.value.response.headers["retry-after"] == "7"
        server.engine.error = None
        server.engine.finish_reason = "error"
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(**BODY, n=2)  # type: ignore[call-overload]
        conversation = recorded(server)
        assert (conversation.abandoned_calls, conversation.abandoned_tokens, conversation.turns) == (3, 12, 0)

    play(test)


def test_a_failure_inside_a_stream_is_told_in_it() -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        server.engine.finish_reason, server.engine.gate = "error", asyncio.Event()
        stream = await client.chat.completions.create(**BODY, stream=True)  # type: ignore[call-overload]
        server.engine.gate.set()
        with pytest.raises(openai.APIError, match="the generator ended it"):
            async for _ in stream:
                pass

    play(test, says="hello there")


def test_a_call_that_takes_too_long_ends() -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        server.engine.gate = asyncio.Event()
        status, headers, answer = await server.post("/v1/chat/completions", BODY)
        assert (status, answer["error"]["code"], headers["x-should-retry"]) == (504, "timeout", "false")
        assert recorded(server).abandoned_calls == 1

    play(test, call_timeout_s=0.05)


def test_a_stream_without_news_says_that_it_lives() -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        server.engine.gate = asyncio.Event()
        asyncio.get_running_loop().call_later(0.2, server.engine.gate.set)
        _, _, text = await server.post("/v1/chat/completions", {**BODY, "stream": True})
        assert text.count(": keepalive\n") > 2
        assert "\n\n\n" not in text
        assert "".join(d["choices"][0]["delta"].get("content", "") for _, d in events_of(text)[:-1]) == "hello"

    play(test, stream_ping_s=0.03)


@pytest.mark.parametrize(
    ("limits", "status", "code", "headers"),
    [
        ({"open_calls": 1}, 429, "rate_limit_exceeded", {"retry-after": "1"}),
        ({"calls": 1}, 403, "rollout_limit_exceeded", {"x-should-retry": "false"}),
    ],
)
def test_limits_of_a_rollout(limits: Any, status: int, code: str, headers: dict[str, str]) -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        server.engine.gate = asyncio.Event()
        first = asyncio.create_task(server.post("/v1/chat/completions", BODY))
        await until(lambda: server.engine.asked)
        found, got, answer = await server.post("/v1/chat/completions", BODY)
        assert (found, answer["error"]["code"]) == (status, code)
        assert headers.items() <= got.items()
        server.engine.gate.set()
        assert (await first)[0] == 200

    play(test, **limits)


def test_other_sampling_than_the_experiments_is_told_once() -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        for temperature in (0.0, 0.5):
            await client.chat.completions.create(**BODY, temperature=temperature, presence_penalty=1, seed=1)  # type: ignore[call-overload]
        [(name, detail)] = server.events
        assert (name, "temperature = 0.0" in detail) == ("client_sampling", True)

    play(test)


def test_reasoning_comes_back_in_whatever_form() -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        messages = talk(USER)
        answer = await client.chat.completions.create(model="headway", messages=messages, tools=TOOLS)
        dumped = answer.choices[0].message.model_dump()
        assert (dumped["content"], dumped["reasoning_content"]) == (None, "hm")
        [call] = dumped["tool_calls"]
        reply = {"role": "tool", "tool_call_id": call["id"], "content": "a"}
        inline = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n", "tool_calls": dumped["tool_calls"]}
        for form in (dumped, inline):
            await client.chat.completions.create(model="headway", messages=[USER, form, reply], tools=TOOLS)  # type: ignore[list-item]
        first, *others = server.engine.asked
        fed = (*first.prompt_ids, *server.session.recorder.turns[0].answer.ids)
        assert all(other.prompt_ids[: len(fed)] == fed for other in others)
        assert recorded(server).causes == {"start": 1, "continued": 1, "sibling": 1}

    text = '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call>'
    play(test, says=text, kind="qwen3")


def test_large_bodies_are_read() -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        for size in (100_000, 1_000_000):
            body = {**BODY, "metadata": {"notes": "x" * size}}
            assert (await server.post("/v1/chat/completions", body))[0] == 200

    play(test)


@pytest.mark.slow
def test_a_large_prompt_is_not_encoded_where_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor much more of it than the context holds."""
    encoded: list[tuple[bool, int]] = []
    encode = Backend.encode

    class Counted:
        def __init__(self, backend: Backend) -> None:
            self.backend = backend

        def encode(self, text: str, **options: Any) -> Any:
            encoded.append((threading.current_thread() is threading.main_thread(), len(text)))
            return encode(self.backend, text, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.backend, name)

    async def test(server: Served, client: AsyncOpenAI) -> None:
        tokenizer = server.engine.chat.tokenizer
        monkeypatch.setattr(tokenizer, "_backend", Counted(tokenizer._backend))
        long: Any = {"role": "user", "content": "12 + 34? " * 100_000}
        with pytest.raises(openai.BadRequestError, match="more than 3000 prompt tokens") as refused:
            await client.chat.completions.create(model="headway", messages=[long])
        assert refused.value.code == "context_length_exceeded"
        assert sum(length for _, length in encoded) < 100_000
        with pytest.raises(openai.BadRequestError, match="more than 3000 prompt tokens"):
            await client.completions.create(model="headway", prompt=[5] * 100_000)
        some = {"role": "user", "content": "1+2?", "notes": "x" * 30_000}
        answer = await client.chat.completions.create(model="headway", messages=[some])  # type: ignore[list-item]
        counting = {"model": "headway", "messages": [long], "max_tokens": 1}
        status, _, counted = await server.post("/v1/messages/count_tokens", counting)
        assert (status, counted["input_tokens"] > 250_000) == (200, True)
        assert answer.choices[0].message.content == "hello"
        own = [length for main, length in encoded if main]
        assert own == [1] * len("hello")  # the engine of this test
        assert recorded(server).cut is False  # the last call was answered

    play(test)


def test_a_request_that_is_refused_for_its_length_cuts_its_rollout() -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        await client.chat.completions.create(**BODY)  # type: ignore[call-overload]
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model="headway", prompt=[5] * 100_000)
        assert recorded(server).cut

    play(test)


def test_a_head_that_never_ends_is_refused() -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        host, _, port = server.address.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nx-long: ")
        for _ in range(8):
            writer.write(b"x" * 8192)
            await writer.drain()
            await asyncio.sleep(0.002)
        async with asyncio.timeout(5):
            assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
        writer.close()

    play(test)


@pytest.mark.parametrize(
    ("sent", "key", "told"),
    [
        (b"", "", b""),
        (b"POST /v1/chat/completions HTTP/1.1\r\nx-slow: ", "", b"HTTP/1.1 408 "),
        (b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 99\r\n\r\n{", "hw-wrong", b"HTTP/1.1 401 "),
        (b"GET /health HTTP/1.1\r\n\r\nGET /hea", "", b"HTTP/1.1 200 "),
    ],
)
def test_a_request_that_comes_drop_by_drop_is_not_waited_for(sent: bytes, key: str, told: bytes) -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        host, _, port = server.address.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        answered = asyncio.create_task(reader.read())
        async with asyncio.timeout(10):
            while not answered.done():
                if sent:
                    writer.write(b"x")
                await asyncio.wait((answered,), timeout=0.01)
        with contextlib.suppress(ConnectionResetError):
            assert (await answered).startswith(told)
        writer.close()

    play(test, body_timeout_s=0.05)


def test_who_sends_the_next_request_too_early_has_the_first_answered() -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        server.engine.gate = asyncio.Event()
        host, _, port = server.address.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        data = json.dumps(BODY).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nx-api-key: {server.session.key}\r\n"
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        await until(lambda: server.engine.asked)
        writer.write(b"GET /hea")
        await asyncio.sleep(0.2)
        server.engine.gate.set()
        async with asyncio.timeout(10):
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()

    play(test, body_timeout_s=0.05)


def test_more_connections_than_allowed_are_closed() -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        host, _, port = server.address.removeprefix("http://").rpartition(":")
        held = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(5):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        for _, other in [*held, (reader, writer)]:
            other.close()
        await asyncio.sleep(0.01)
        assert (await server.post("/health", None, method="GET"))[0] == 200

    play(test, connections=2)


@pytest.mark.parametrize("told_again", [True, False])
def test_what_was_streamed_and_turns_out_void_is_never_recorded(told_again: bool) -> None:
    """The engine begins anew where a client has read already: the client is told, and asks again."""

    async def test(server: Served, client: AsyncOpenAI) -> None:
        plain = server.engine.__class__.__call__
        read = asyncio.Event()

        async def sample(wanted: TurnRequest, told: OnTokens, /) -> GenerationResult:
            if len(server.engine.asked) > 0:
                return await plain(server.engine, wanted, told)
            other = ScriptedEngine(server.engine.chat, lambda wanted: "17, I am sure.")
            first: list[PartialResponse] = []
            await other(wanted, lambda partial: first.append(partial))
            told(first[2])
            await read.wait()
            return await plain(server.engine, wanted, told if told_again else lambda partial: None)

        session = server.sessions.open("9-0", sample, constraints=True)
        asking = client.with_options(api_key=session.key, max_retries=0)
        stream = await asking.chat.completions.create(model="headway", messages=[USER], stream=True)
        text = ""

        async def listen() -> None:
            nonlocal text
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
                if text:
                    read.set()

        with pytest.raises(openai.APIError, match="another version"):
            await listen()
        assert "17, I am sure.".startswith(text)
        answer = await asking.chat.completions.create(model="headway", messages=[USER])
        assert answer.choices[0].message.content == "hello"
        conversation = session.seal()
        assert (conversation.turns, conversation.abandoned_calls) == (1, 1)

    play(test)
