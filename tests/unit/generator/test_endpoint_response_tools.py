"""Tools of the Responses API that aren't functions, and paths of fields in errors."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from endpoint_server import CONTEXT_TOKENS, Served, events_of, play
from openai import AsyncOpenAI

ADD = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
SPAWN = {**ADD, "name": "spawn"}
NAMESPACES = [
    {"type": "namespace", "name": "agents", "description": "Helpers.", "tools": [SPAWN, ADD]},
    {"type": "namespace", "name": "mcp__files__", "tools": [ADD]},
]
PATCH = {"type": "custom", "name": "patch", "description": "Edits."}
HOSTED = [{"type": "web_search", "external_web_access": True}, {"type": "image_generation"}, {"type": "local_shell"}]


def written(name: str, arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


async def asked(server: Served, tools: Any, **further: Any) -> tuple[int, Any]:
    body = {"model": "headway", "input": "Go.", "tools": tools, **further}
    status, _, answer = await server.post("/v1/responses", body)
    return status, events_of(answer) if further.get("stream") else answer


def prompt_of(server: Served, number: int = -1) -> str:
    return server.engine.chat.tokenizer.decode(server.engine.asked[number].prompt_ids, keep_special=True)


@pytest.mark.parametrize(
    ("model_name", "named"),
    [
        ("agents__spawn", {"namespace": "agents", "name": "spawn"}),
        ("agents__add", {"namespace": "agents", "name": "add"}),
        ("mcp__files__add", {"namespace": "mcp__files__", "name": "add"}),
        ("add", {"name": "add"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_namespaces_go_to_the_model_and_back(model_name: str, named: dict[str, str], stream: bool) -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        status, answer = await asked(server, [ADD, *NAMESPACES, *HOSTED], stream=stream)
        assert status == 200, answer
        [call] = (answer[-1][1]["response"] if stream else answer)["output"]
        assert {key: call[key] for key in ("type", "name", "namespace") if key in call} == {
            "type": "function_call",
            **named,
        }
        assert f'"name": "{model_name}"' in prompt_of(server)
        assert "web_search" not in prompt_of(server)
        if stream:
            items = [data["item"] for name, data in answer if name == "response.output_item.done"]
            assert items == [call]
        history = [{"role": "user", "content": "Go."}, call]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
        status, answer = await asked(server, [ADD, *NAMESPACES], input=[*history, output])
        assert status == 200, answer
        assert f'"name": "{model_name}", "arguments": {{"a": 2}}' in prompt_of(server)
        recorded = server.session.seal()
        assert len(recorded.branches) == 1
        assert recorded.turns == 2

    play(test, written(model_name, {"a": 2}), context_tokens=20_000)


def test_names_stay_unique() -> None:
    last = {"type": "namespace", "name": "agents_", "tools": [ADD]}
    tools = [*NAMESPACES, {**ADD, "name": "agents__add"}, last]

    async def test(server: Served, client: AsyncOpenAI) -> None:
        status, answer = await asked(server, tools)
        assert status == 200, answer
        names = re.findall(r'"name": "(agents\w*)"', prompt_of(server))
        assert len(names) == len(set(names)) == 4, names
        assert answer["output"][0]["namespace"] == "agents"

    play(test, written("agents__add_", {}), context_tokens=20_000)


@pytest.mark.parametrize("stream", [False, True])
def test_custom_tools_take_a_text(stream: bool) -> None:
    text = 'a "b"\n\\c é'

    async def test(server: Served, client: AsyncOpenAI) -> None:
        status, answer = await asked(server, [PATCH, ADD], stream=stream)
        assert status == 200, answer
        [call] = (answer[-1][1]["response"] if stream else answer)["output"]
        assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "patch", text)
        if stream:
            deltas = [data["delta"] for name, data in answer if name == "response.custom_tool_call_input.delta"]
            assert "".join(deltas) == text
        output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}
        status, answer = await asked(server, [PATCH, ADD], input=[{"role": "user", "content": "Go."}, call, output])
        assert status == 200, answer
        assert len(server.session.seal().branches) == 1

    play(test, written("patch", {"input": text}), context_tokens=20_000)


def test_hosted_tools_are_left_out_and_said_once() -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        for _ in range(2):
            status, answer = await asked(server, [ADD, *HOSTED, {"type": "web_search_2025_08_26"}])
            assert status == 200, answer
        said = [detail for name, detail in server.events if name == "hosted_tool"]
        assert len(said) == 4
        assert all(any(f"'{tool['type']}'" in line for line in said) for tool in HOSTED)

    play(test, context_tokens=20_000)


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{**ADD, "type": "functoin"}], "tools[0]"),
        ([{"type": "function"}], "tools[0]"),
        ([ADD, {"type": "namespace", "name": "n"}], "tools[1].tools"),
        ([{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}], "tools[0].tools[0]"),
        ([{"type": "namespace", "name": "n", "tools": NAMESPACES}], "tools[0].tools[0]"),
        ([{**PATCH, "format": {"type": "grammar", "syntax": "yacc", "definition": "x"}}], "tools[0].format"),
        ("all", "tools"),
    ],
)
def test_other_tools_are_refused_by_their_place(tools: Any, param: str) -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        status, answer = await asked(server, tools)
        assert status == 400
        assert answer["error"]["param"] == param
        assert answer["error"]["message"].startswith(param)

    play(test)


@pytest.mark.parametrize(
    ("choice", "model_name"),
    [
        ({"type": "function", "name": "spawn", "namespace": "agents"}, "agents__spawn"),
        ({"type": "custom", "name": "patch"}, "patch"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "patch"}]}, "patch"),
    ],
)
def test_a_chosen_tool_constrains_the_call(choice: Any, model_name: str) -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        status, answer = await asked(server, [ADD, PATCH, *NAMESPACES], tool_choice=choice)
        assert status == 200, answer
        assert f'\\"{model_name}\\"' in server.engine.asked[0].grammar
        assert '\\"add\\"' not in server.engine.asked[0].grammar
        status, answer = await asked(server, [ADD], tool_choice=choice)
        assert status == 400

    play(test, written(model_name, {"input": "x"}), context_tokens=20_000)


LONG = "x" * (3 * CONTEXT_TOKENS)
PATHS: list[tuple[str, dict[str, Any], str]] = [
    (
        "responses",
        {"input": [{"role": "user", "content": "a"}, {"role": "nobody", "content": "b"}], "instructions": "c"},
        "input[1].role",
    ),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ("responses", {"input": "a", "instructions": 7}, "instructions"),
    (
        "responses",
        {"input": [{"role": "user", "content": "a"}, {"type": "function_call", "name": 3, "call_id": "c"}]},
        "input[1]",
    ),
    (
        "responses",
        {"input": [{"role": "user", "content": "a"}, {"type": "function_call_output", "call_id": "c", "output": "a"}]},
        "input[1].call_id",
    ),
    (
        "responses",
        {
            "input": [
                {"role": "user", "content": "a"},
                {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
                {"type": "function_call_output", "call_id": "c", "output": 7},
            ]
        },
        "input[2].output",
    ),
    ("responses", {"input": LONG}, "input"),
    (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "image"}]}], "system": "s"},
        "messages[0].content[0]",
    ),
    ("messages", {"messages": [{"role": "user", "content": LONG}], "system": "s"}, ""),
    ("messages", {"messages": [{"role": "user", "content": "a"}], "system": 7}, "system"),
    (
        "messages",
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]},
            ],
            "system": "s",
        },
        "messages[1].content[0].tool_use_id",
    ),
    (
        "messages",
        {
            "messages": [
                {"role": "user", "content": "a"},
                {
                    "role": "assistant",
                    "content": [{"type": "text", "text": "b"}, {"type": "tool_use", "name": 3, "input": {}}],
                },
                {"role": "user", "content": "a"},
            ]
        },
        "messages[1].content[1]",
    ),
    (
        "messages",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "a"},
                        {"type": "tool_result", "tool_use_id": "x", "is_error": "yes"},
                    ],
                }
            ]
        },
        "messages[0].content[1].is_error",
    ),
    (
        "messages",
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]},
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "x", "content": 5, "is_error": True}],
                },
            ]
        },
        "messages[2].content[0].content",
    ),
    *(
        (
            "responses",
            {
                "input": [
                    {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}", "namespace": namespace},
                    {"type": "function_call_output", "call_id": "c", "output": "5"},
                ]
            },
            "input[0]",
        )
        for namespace in (5, ["a"], True)
    ),
]


@pytest.mark.parametrize(("route", "body", "param"), PATHS)
def test_errors_name_the_clients_own_field(route: str, body: dict[str, Any], param: str) -> None:
    async def test(server: Served, client: AsyncOpenAI) -> None:
        status, _, answer = await server.post(f"/v1/{route}", {"model": "headway", "max_tokens": 5, **body})
        assert status == 400
        assert param == "input" or answer["error"]["message"].startswith(param), answer
        assert route == "messages" or answer["error"]["param"] == param

    play(test)


@pytest.mark.parametrize("content", ["no such file", [{"type": "text", "text": "no such file"}], None])
def test_failed_tool_results_are_told_as_failed(content: Any) -> None:
    use = {"type": "tool_use", "id": "c", "name": "read", "input": {}}

    async def test(server: Served, client: AsyncOpenAI) -> None:
        for failed in (None, False, True):
            result = {"type": "tool_result", "tool_use_id": "c", "content": content, "is_error": failed}
            messages = [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": [use]},
                {"role": "user", "content": [result]},
            ]
            status, _, answer = await server.post(
                "/v1/messages", {"model": "headway", "max_tokens": 5, "messages": messages}
            )
            assert status == 200, answer
            assert ("error:" in prompt_of(server)) is (failed is True)

    play(test)
