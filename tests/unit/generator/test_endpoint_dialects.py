"""Anthropic's messages and OpenAI's responses over the same recorder."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from endpoint_server import Served, events_of, served
from openai import AsyncOpenAI

TOOLS = [{"name": "bash", "description": "runs", "input_schema": {"type": "object", "properties": {}}}]
CALL = 'so\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
THOUGHT_CALL = f"<think>\nhm\n</think>\n\n{CALL}"
ASKED: dict[str, Any] = {"model": "headway", "max_tokens": 200, "messages": [{"role": "user", "content": "1+2?"}]}


def play(test: Callable[[Served], Awaitable[Any]], says: Any, kind: str = "qwen3", **options: Any) -> Any:
    async def main() -> Any:
        async with served(says, kind, **options) as server:
            return await test(server)

    return asyncio.run(main())


def test_anthropic_messages_with_tools_and_thoughts() -> None:
    async def test(server: Served) -> None:
        body = {**ASKED, "system": [{"type": "text", "text": "Be brief."}], "tools": TOOLS}
        status, headers, answer = await server.post(
            "/v1/messages", body, key="", headers={"x-api-key": server.session.key, "anthropic-version": "2023-06-01"}
        )
        assert (status, answer["type"], answer["role"], answer["stop_reason"]) == (
            200,
            "message",
            "assistant",
            "tool_use",
        )
        assert headers["request-id"].startswith("req_")
        thinking, text, use = answer["content"]
        assert (thinking["thinking"], text["text"], use["input"]) == ("hm", "so", {"command": "ls"})
        assert answer["usage"]["input_tokens"] == len(server.engine.asked[0].prompt_ids)
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "a"}]}
        history = [*body["messages"], {"role": "assistant", "content": answer["content"]}]
        for blocks, messages in (([result], 4), ([result, {"type": "text", "text": "go on"}], 5)):
            again = {**body, "messages": [*history, {"role": "user", "content": blocks}]}
            assert (await server.post("/v1/messages", again))[0] == 200
            assert server.session.recorder.turns[-1].messages == messages + 1
        first, second, _ = server.engine.asked
        fed = (*first.prompt_ids, *server.session.recorder.turns[0].answer.ids)
        assert second.prompt_ids[: len(fed)] == fed
        assert server.session.seal().causes["continued"] == 1

    play(test, THOUGHT_CALL)


def test_an_anthropic_stream_adds_up_to_the_answer() -> None:
    async def test(server: Served) -> None:
        body = {**ASKED, "tools": TOOLS}
        _, _, whole = await server.post("/v1/messages", body)
        _, _, text = await server.post("/v1/messages", {**body, "stream": True})
        events = events_of(text)
        assert all(name == data["type"] for name, data in events)
        assert events[0][0] == "message_start"
        assert [name for name, _ in events][-2:] == ["message_delta", "message_stop"]
        blocks: list[dict[str, Any]] = []
        parts = {"thinking_delta": "thinking", "text_delta": "text", "input_json_delta": "partial_json"}
        opened = False
        for name, data in events:
            if name == "content_block_start":
                assert (data["index"], opened) == (len(blocks), False)
                blocks.append({**data["content_block"], "partial_json": ""})
                opened = True
            elif name == "content_block_delta":
                assert data["index"] == len(blocks) - 1
                key = parts[data["delta"]["type"]]
                blocks[-1][key] += data["delta"][key]
            elif name == "content_block_stop":
                opened = False
        for block in blocks:
            written = block.pop("partial_json")
            if written:
                block["input"] = json.loads(written)
            block.pop("id", None)
        for block in whole["content"]:
            block.pop("id", None)
        assert blocks == whole["content"]
        delta = next(data for name, data in events if name == "message_delta")
        assert delta["delta"]["stop_reason"] == whole["stop_reason"]
        assert delta["usage"]["output_tokens"] == whole["usage"]["output_tokens"]

    play(test, THOUGHT_CALL)


@pytest.mark.parametrize(
    ("extra", "says", "reason", "sequence"),
    [
        ({}, "yes", "end_turn", None),
        ({"max_tokens": 2}, "yes", "max_tokens", None),
        ({"stop_sequences": ["s"]}, "yes", "stop_sequence", "s"),
    ],
)
def test_why_an_anthropic_answer_ended(extra: Any, says: str, reason: str, sequence: str | None) -> None:
    async def test(server: Served) -> None:
        _, _, answer = await server.post("/v1/messages", {**ASKED, **extra})
        assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)

    play(test, says)


@pytest.mark.parametrize(
    ("change", "status", "kind"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error"),
        ({"model": "claude"}, 404, "not_found_error"),
        ({"messages": [{"role": "system", "content": "x"}]}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error"),
        ({"tools": [{"type": "web_search", "name": "w"}]}, 400, "invalid_request_error"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, 400, "invalid_request_error"),
    ],
)
def test_anthropic_refusals(change: Any, status: int, kind: str) -> None:
    async def test(server: Served) -> None:
        found, headers, answer = await server.post("/v1/messages", {**ASKED, **change})
        assert (found, answer["type"], answer["error"]["type"]) == (status, "error", kind)
        assert answer["request_id"] == headers["request-id"]
        found, _, answer = await server.post("/v1/messages", ASKED, key="wrong")
        assert (found, answer["error"]["type"]) == (401, "authentication_error")

    play(test, "x")


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
def test_anthropic_conversations_that_the_server_is_to_keep_are_refused(thread: Any) -> None:
    """As the client's runner of tools knows it: it sends the whole conversation from then on."""

    async def test(server: Served) -> None:
        found, _, answer = await server.post("/v1/messages", {**ASKED, "thread": thread})
        assert (found, answer["error"]["details"]) == (400, {"error_code": "thread_unsupported_request"})
        found, _, answer = await server.post("/v1/messages", {**ASKED, "thread": None})
        assert found == 200

    play(test, "x")


def test_anthropic_counts_are_not_recorded() -> None:
    async def test(server: Served) -> None:
        _, _, counted = await server.post(
            "/v1/messages/count_tokens", {k: v for k, v in ASKED.items() if k != "max_tokens"}
        )
        _, _, answer = await server.post("/v1/messages", ASKED)
        assert counted["input_tokens"] == answer["usage"]["input_tokens"]
        assert server.session.seal().turns == 1

    play(test, "x")


RESPONSE_TOOLS: Any = [{"type": "function", "name": "bash", "parameters": {"type": "object"}, "strict": False}]


def test_responses_as_the_openai_client_reads_them() -> None:
    async def test(server: Served) -> None:
        async with AsyncOpenAI(
            base_url=server.base_url, api_key=server.session.key, max_retries=0, _strict_response_validation=True
        ) as client:
            items: Any = [{"role": "user", "content": "1+2?"}]
            options: Any = {"model": "headway", "instructions": "Be brief.", "tools": RESPONSE_TOOLS}
            answer = await client.responses.create(input=items, **options)
            reasoning, message, call = answer.output
            assert reasoning.type == "reasoning"
            assert answer.output_text == "so"
            assert (message.type, call.type, answer.status) == ("message", "function_call", "completed")
            items += [item.model_dump() for item in answer.output]
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": "a"})  # type: ignore[union-attr]
            await client.responses.create(input=items, **options)
            first, second = server.engine.asked
            fed = (*first.prompt_ids, *server.session.recorder.turns[0].answer.ids)
            assert second.prompt_ids[: len(fed)] == fed
            assert server.session.recorder.turns[1].messages == 5

            text, arguments, kinds, last = "", "", list[str](), None
            async for event in await client.responses.create(input="1+2?", stream=True, **options):
                kinds.append(event.type)
                assert event.sequence_number == len(kinds) - 1
                if event.type == "response.output_text.delta":
                    text += event.delta
                elif event.type == "response.function_call_arguments.done":
                    arguments = event.arguments
                elif event.type == "response.completed":
                    last = event.response
            assert (text, json.loads(arguments)) == ("so", {"command": "ls"})
            assert last is not None
            assert [item.type for item in last.output] == ["reasoning", "message", "function_call"]
            assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
            assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
            cut = await client.responses.create(model="headway", input="x", max_output_tokens=3)
            assert (cut.status, cut.incomplete_details and cut.incomplete_details.reason) == (
                "incomplete",
                "max_output_tokens",
            )

    play(test, THOUGHT_CALL)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"tools": [{"type": "no such kind"}]}, "tools[0]"),
    ],
)
def test_responses_that_are_refused(change: Any, param: str) -> None:
    async def test(server: Served) -> None:
        status, _, answer = await server.post("/v1/responses", {"model": "headway", "input": "x", **change})
        assert (status, answer["error"]["param"]) == (400, param)

    play(test, "x")
