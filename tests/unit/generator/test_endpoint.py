"""The endpoint over real HTTP: what the `openai` client gets, strictly validated, and what is recorded of it."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from endpoint_server import (
    BODY,
    CALL,
    CONTEXT_TOKENS,
    THOUGHT,
    TOOLS,
    USER,
    Served,
    events_of,
    play,
    recorded,
    request,
    talk,
)
from openai import AsyncOpenAI


def test_a_chat_completion() -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        answer = await client.chat.completions.create(model="headway", messages=[USER])
        [choice] = answer.choices
        assert (choice.message.content, choice.finish_reason, answer.object) == ("hello", "stop", "chat.completion")
        assert (answer.model, answer.created) == ("headway", 1_800_000_000)
        assert answer.usage is not None
        [wanted] = server.engine.asked
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(wanted.prompt_ids), 6)
        assert wanted.prompt_ids == server.engine.chat.tokenizer.render([USER], "chat")
        assert wanted.max_tokens == CONTEXT_TOKENS - len(wanted.prompt_ids)
        [branch] = recorded(server).branches
        assert (branch.prompt_ids, sum(branch.response_mask)) == (wanted.prompt_ids, 6)

    play(test)


def test_turns_with_tools_are_one_sequence_of_tokens() -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        messages = talk(USER)
        for _ in range(3):
            answer = await client.chat.completions.create(model="gpt-4o", messages=messages, tools=TOOLS)
            message, reason = answer.choices[0].message, answer.choices[0].finish_reason
            messages.append(message.model_dump())
            if not message.tool_calls:
                break
            assert (message.content, reason) == ("so", "tool_calls")
            [call] = message.tool_calls
            assert call.type == "function"
            assert (call.function.name, json.loads(call.function.arguments)) == ("bash", {"command": "ls"})
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "a"})
        assert [wanted.prompt_ids for wanted in server.engine.asked] == sorted(
            (wanted.prompt_ids for wanted in server.engine.asked), key=len
        )
        conversation = recorded(server)
        assert conversation.causes == {"start": 1, "continued": 2}
        [branch] = conversation.branches
        assert (conversation.turns, len(branch.turn_ends)) == (3, 3)

    turns = iter([CALL, CALL, "done"])
    play(test, says=lambda wanted: next(turns))


@pytest.mark.parametrize(
    ("kind", "says", "tools"),
    [
        ("qwen2.5", "hello\n there é 你好", False),
        ("qwen2.5", CALL, True),
        ("qwen2.5", "x<tool_call>{not json</tool_call>", True),
        ("qwen3", THOUGHT, False),
        ("qwen3", "<think>\nhm", False),
        ("llama3.1", '{"name": "bash", "parameters": {}}', True),
        ("chatml", THOUGHT, False),
    ],
)
def test_a_stream_adds_up_to_the_answer(kind: str, says: str, tools: bool) -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        options: Any = {"model": "headway", "messages": [USER], "n": 2, **({"tools": TOOLS} if tools else {})}
        whole = await client.chat.completions.create(**options)
        found = [{"content": "", "reasoning_content": ""} for _ in range(2)]
        reasons: dict[int, str] = {}
        usage = None
        chunks = 0
        stream = await client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
        async for chunk in stream:
            chunks += 1
            assert chunk.object == "chat.completion.chunk"
            usage = chunk.usage or usage
            for choice in chunk.choices:
                delta = choice.delta.model_dump(exclude_none=True)
                found[choice.index]["content"] += delta.get("content", "")
                found[choice.index]["reasoning_content"] += delta.get("reasoning_content", "")
                if "tool_calls" in delta:
                    calls = [{**call} for call in delta["tool_calls"]]
                    assert [call.pop("index") for call in calls] == list(range(len(calls)))
                    found[choice.index]["tool_calls"] = calls  # type: ignore[assignment]
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
        assert chunks > 5
        assert usage == whole.usage
        for choice, parts in zip(whole.choices, found, strict=True):
            message = choice.message.model_dump(exclude_none=True)
            assert parts["content"] == message.get("content", "")
            assert parts["reasoning_content"] == message.get("reasoning_content", "")
            assert reasons[choice.index] == choice.finish_reason
            got, wanted = parts.get("tool_calls", []), message.get("tool_calls", [])
            assert [call["function"] for call in got] == [call["function"] for call in wanted]  # type: ignore[index]
        conversation = recorded(server)
        assert (conversation.turns, conversation.calls, len(conversation.branches)) == (4, 2, 4)
        assert len({wanted.purpose for wanted in server.engine.asked}) == 4

    play(test, says=says, kind=kind)


def test_log_probabilities_are_those_of_the_tokens() -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        answer = await client.chat.completions.create(model="headway", messages=[USER], logprobs=True)
        content = answer.choices[0].logprobs and answer.choices[0].logprobs.content
        assert content is not None
        assert [entry.logprob for entry in content] == [-0.25 - place / 64 for place in range(6)]
        assert "".join(entry.token for entry in content) == "hello<|im_end|>"
        assert bytes(content[1].bytes or []) == b"e"
        parts: list[float] = []
        async for chunk in await client.chat.completions.create(
            model="headway", messages=[USER], logprobs=True, stream=True
        ):
            for choice in chunk.choices:
                if choice.logprobs is not None and choice.logprobs.content:
                    parts += [entry.logprob for entry in choice.logprobs.content]
        assert parts == [entry.logprob for entry in content]
        text = await client.completions.create(model="headway", prompt="1+2=", logprobs=0)
        found = text.choices[0].logprobs
        assert found is not None
        assert (found.tokens, found.text_offset) == (["h", "e", "l", "l", "o", "<|im_end|>"], [0, 1, 2, 3, 4, 5])

    play(test)


def test_limits_of_an_answer() -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        options: Any = {"model": "headway", "messages": [USER]}
        cut = await client.chat.completions.create(**options, max_completion_tokens=3)
        assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("one", "length")
        stop = await client.chat.completions.create(**options, stop=[" two", "x"], seed=42)
        assert (stop.choices[0].message.content, stop.choices[0].finish_reason) == ("one", "stop")
        text = ""
        async for chunk in await client.chat.completions.create(**options, stop=" three", stream=True):
            text += chunk.choices[0].delta.content or ""
        assert text == "one two"
        assert [wanted.stop for wanted in server.engine.asked] == [(), (" two", "x"), (" three",)]
        assert "42" in server.engine.asked[1].purpose

    play(test, says="one two three")


def test_raw_completions_of_texts_and_of_tokens() -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        first = await client.completions.create(model="headway", prompt="def f(", max_tokens=4)
        assert (first.choices[0].text, first.choices[0].finish_reason) == ("x): ", "length")
        begun = server.engine.asked[0].prompt_ids
        [turn] = server.session.recorder.turns
        ids = [*begun, *turn.answer.ids, 5]
        second = await client.completions.create(model="headway", prompt=ids, max_tokens=100)
        assert second.choices[0].text == "x): return"
        assert server.engine.asked[1].prompt_ids == tuple(ids)
        text = ""
        status, _, raw = await server.post("/v1/completions", {"model": "headway", "prompt": "a", "stream": True})
        assert status == 200
        for _, data in events_of(raw)[:-1]:
            text += data["choices"][0]["text"]
        assert text == "x): return"
        assert (await client.completions.create(model="headway", prompt="b")).choices[0].finish_reason == "stop"
        assert recorded(server).causes["continued"] == 1

    play(test, says="x): return")


def test_the_model_is_listed() -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        models = [model async for model in client.models.list()]
        assert [model.id for model in models] == ["headway"]
        assert models[0].model_dump()["max_model_len"] == CONTEXT_TOKENS
        assert (await client.models.retrieve("tiny")).id == "tiny"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")

    play(test)


def test_adapters_answer_by_name_in_every_api() -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": talk({"role": "user", "content": "a"})},
        "/v1/completions": {"prompt": "a"},
        "/v1/messages": {"messages": talk({"role": "user", "content": "a"}), "max_tokens": 9},
        "/v1/responses": {"input": "a"},
    }

    async def test(server: Served, client: AsyncOpenAI) -> None:
        assert [model.id async for model in client.models.list()] == ["headway", "poet"]
        assert (await client.models.retrieve("poet")).model_dump()["parent"] == "headway"
        for path, body in bodies.items():
            for stream in (False, True):
                status, _, answer = await server.post(path, {**body, "model": "poet", "stream": stream})
                assert status == 200
                assert stream or answer["model"] == "poet"
                assert server.engine.asked[-1].adapter == "poet"
            status, _, answer = await server.post(path, {**body, "model": "critic"})
            assert (status, "valid: headway, gpt-4o, poet" in str(answer)) == (404, True)
            assert (await server.post(path, {**body, "model": "headway"}))[0] == 200
            assert server.engine.asked[-1].adapter == ""
        counted = {**bodies["/v1/messages"], "model": "critic"}
        assert (await server.post("/v1/messages/count_tokens", counted))[0] == 404

    play(test, adapters=("poet",))


def test_what_another_adapter_answered_is_a_prompt_and_not_learned() -> None:
    """A conversation that changes its model: tokens of a branch are all one adapter's."""

    async def test(server: Served, client: AsyncOpenAI) -> None:
        messages: list[Any] = talk({"role": "user", "content": "a"})
        for name in ("headway", "poet", "poet"):
            answer = await client.chat.completions.create(model=name, messages=messages)
            messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
        for name in ("headway", "poet", "headway"):
            await client.completions.create(model=name, prompt=[5, 6, 7])
        conversation = recorded(server)
        assert conversation.causes == {"start": 1, "branched": 3, "continued": 1, "sibling": 1}
        assert sorted(len(branch.turn_ends) for branch in conversation.branches) == [1, 1, 1, 1, 2]

    play(test, adapters=("poet",))


@pytest.mark.parametrize(
    ("change", "error", "param", "says"),
    [
        ({"model": "gpt-5"}, openai.NotFoundError, "model", "the model 'gpt-5' does not exist; valid: headway, gpt-4o"),
        ({"messages": []}, openai.BadRequestError, "messages", "one or more messages"),
        ({"messages": [{"role": "robot"}]}, openai.BadRequestError, "messages[0].role", "'robot': valid:"),
        ({"messages": [{"role": ["user"]}]}, openai.BadRequestError, "messages[0].role", "['user']: valid:"),
        ({"n": 17}, openai.BadRequestError, "n", "n = 17: valid: an integer from 1 to 16"),
        ({"temperature": "hot"}, openai.BadRequestError, "temperature", "a number from 0 to 2"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens", "an integer from 1"),
        ({"stop": [""]}, openai.BadRequestError, "stop", "texts"),
        ({"tools": [{"type": "web"}]}, openai.BadRequestError, "tools[0]", "a function that has a name"),
        ({"top_logprobs": 5}, openai.BadRequestError, "top_logprobs", "valid: 0"),
        ({"logit_bias": {"5": 1}}, openai.BadRequestError, "logit_bias", "isn't supported"),
        (
            {"chat_template_kwargs": {"messages": []}},
            openai.BadRequestError,
            "chat_template_kwargs",
            "only the template",
        ),
        (
            {"messages": [{"role": "user", "content": "x" * 3000}]},
            openai.BadRequestError,
            "messages",
            "This model's maximum context length is 1500 tokens.",
        ),
    ],
)
def test_bad_requests_in_the_apis_own_shape(change: Any, error: Any, param: str, says: str) -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        with pytest.raises(error) as raised:
            await client.post("/chat/completions", body={**BODY, **change}, cast_to=object)
        assert raised.value.param == param
        assert says in raised.value.message
        assert raised.value.request_id.startswith("req_")
        assert not server.engine.asked
        if "maximum context" in says:
            assert raised.value.body["message"].startswith(says)
            assert raised.value.code == "context_length_exceeded"

    play(test)


def test_what_is_no_request_at_all() -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        chat, key = "/v1/chat/completions", server.session.key
        for body, says in ((b"{", "not valid JSON"), (b"[1]", "must be a JSON object"), (b'{"a": "\xff"}', "JSON")):
            status, _, answer = await server.post(chat, body)
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
            assert says in answer["error"]["message"]
        deep = b'{"messages": ' + b"[" * 1500 + b"]" * 1500 + b"}"
        assert (await server.post(chat, deep))[0] == 400
        assert (await server.post(chat, {"messages": [USER]}))[2]["error"]["param"] == "model"
        status, _, answer = await server.post("/v1/nothing", {})
        assert (status, answer["error"]["code"]) == (404, "unknown_url")
        status, headers, _ = await server.post(chat, None, method="GET")
        assert (status, headers["allow"]) == (405, "POST")
        status, headers, answer = await server.post(chat, b"x" * 30000)
        assert (status, answer["error"]["code"], headers["connection"]) == (413, "request_too_large", "close")
        long = {"authorization": f"Bearer {key}", "x-long": "x" * 70_000}
        assert (await request(server.address, "POST", chat, b"{}", long))[0] == 431
        endless = {"authorization": f"Bearer {key}", "x-long": "x" * 30_000, "x-longer": "x" * 40_000}
        assert (await request(server.address, "POST", chat, b"{}", endless))[0] == 431
        assert (await server.post("/health", None, method="GET", key=""))[2] == {"status": "ok"}
        assert not server.session.recorder.turns

    play(test, max_body_bytes=4000)
