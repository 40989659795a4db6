"""Constrained answers in every API: what reaches the generator, what clients get, what is refused and where."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import cache
from typing import Any

import jsonschema_rs
import pytest
from endpoint_server import CALL, TOOLS, USER, Served, chat, events_of, recorded, served
from grammar_walk import allowed_text, is_allowed
from openai import AsyncOpenAI
from pydantic import BaseModel

from headway.generator.endpoint import app
from headway.records.conversations import TurnRequest
from headway.records.generation import RouterStatistics
from headway.services.serve_metrics import ServeMetrics
from headway.tokens.grammar import GrammarRefused, Grammars


class Person(BaseModel):
    name: str
    age: int


PERSON: Any = Person.model_json_schema()
# a reference from the schema's root, as pydantic writes them
NESTED: Any = {
    "type": "object",
    "properties": {"who": {"$ref": "#/$defs/Person"}},
    "required": ["who"],
    "additionalProperties": False,
    "$defs": {"Person": {**PERSON, "additionalProperties": False}},
}
FUNCTION = {"name": "save", "parameters": NESTED, "strict": True}
BASH = TOOLS[0]
CHAT_TOOLS: Any = [BASH, {"type": "function", "function": FUNCTION}]
RESPONSE_TOOLS: Any = [{"type": "function", **tool["function"]} for tool in CHAT_TOOLS]
MESSAGE_TOOLS: Any = [
    {"name": tool["name"], "input_schema": tool["parameters"], "strict": tool.get("strict")} for tool in RESPONSE_TOOLS
]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
FLAT = {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}
ASKED: dict[str, Any] = {
    "/v1/chat/completions": {"model": "headway", "messages": [USER]},
    "/v1/completions": {"model": "headway", "prompt": "1+2?", "max_tokens": 1000},
    "/v1/responses": {"model": "headway", "input": "1+2?"},
    "/v1/messages": {"model": "headway", "messages": [USER], "max_tokens": 1000},
}


@cache
def grammars(kind: str) -> Grammars:
    return Grammars(chat(kind).tokenizer)


def sampling(kind: str = "qwen2.5", seed: int = 3) -> Callable[[TurnRequest], str]:
    """An engine that samples anything that its grammar allows."""
    chance = random.Random(seed)
    return lambda wanted: allowed_text(grammars(kind), chat(kind).tokenizer, wanted.grammar, chance)


def play(test: Callable[[Served], Awaitable[Any]], says: Any = None, kind: str = "qwen2.5", **options: Any) -> Any:
    async def main() -> Any:
        async with served(sampling(kind) if says is None else says, kind, context_tokens=8000, **options) as server:
            return await test(server)

    return asyncio.run(main())


def text_of(path: str, answer: Any) -> str:
    """The text of an answer that has nothing else."""
    if path == "/v1/chat/completions":
        [choice] = answer["choices"]
        assert (choice["finish_reason"], choice["message"]["refusal"]) == ("stop", None)
        assert "tool_calls" not in choice["message"]
        return choice["message"]["content"]
    if path == "/v1/completions":
        return answer["choices"][0]["text"]
    [part] = answer["content"] if path == "/v1/messages" else answer["output"][0]["content"]
    return part["text"]


def calls_of(path: str, answer: Any) -> list[tuple[str, Any]]:
    """Name and arguments of each call of an answer that has nothing else."""
    if path == "/v1/chat/completions":
        [choice] = answer["choices"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        functions = [call["function"] for call in choice["message"]["tool_calls"]]
        return [(function["name"], json.loads(function["arguments"])) for function in functions]
    if path == "/v1/messages":
        assert answer["stop_reason"] == "tool_use"
        assert {block["type"] for block in answer["content"]} == {"tool_use"}
        return [(block["name"], block["input"]) for block in answer["content"]]
    assert {item["type"] for item in answer["output"]} == {"function_call"}
    return [(item["name"], json.loads(item["arguments"])) for item in answer["output"]]


def streamed_text(path: str, text: str) -> str:
    """What the pieces of a stream add up to."""
    found = ""
    for _, data in events_of(text):
        if data != "[DONE]" and "choices" in data:
            found += "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in data["choices"])
        elif data != "[DONE]" and data["type"] in ("response.output_text.delta", "content_block_delta"):
            found += data["delta"] if isinstance(data["delta"], str) else data["delta"]["text"]
    return found


@pytest.mark.parametrize(
    ("path", "extra", "schema"),
    [
        ("/v1/chat/completions", {"response_format": SCHEMA}, PERSON),
        ("/v1/chat/completions", {"response_format": {"type": "json_object"}}, {"type": "object"}),
        ("/v1/chat/completions", {"response_format": SCHEMA, "tools": CHAT_TOOLS, "tool_choice": "none"}, PERSON),
        ("/v1/responses", {"text": {"format": FLAT}}, PERSON),
        ("/v1/responses", {"text": {"format": {"type": "json_object"}}}, {"type": "object"}),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": PERSON}}}, PERSON),
        ("/v1/completions", {"response_format": SCHEMA}, PERSON),
    ],
)
def test_texts_are_json_of_the_schema_whole_and_streamed(path: str, extra: Any, schema: Any) -> None:
    async def test(server: Served) -> None:
        for _ in range(4):
            status, _, answer = await server.post(path, {**ASKED[path], **extra})
            assert status == 200, answer
            jsonschema_rs.validate(schema, json.loads(text_of(path, answer)))
        said: dict[str, str] = {}
        server.engine.says = lambda wanted: said.setdefault("", sampling()(wanted))
        _, _, stream = await server.post(path, {**ASKED[path], **extra, "stream": True})
        assert streamed_text(path, stream) == said[""]
        assert all(wanted.grammar for wanted in server.engine.asked)
        assert len({wanted.grammar for wanted in server.engine.asked}) == 1
        assert recorded(server).turns == 5

    play(test)


FORCED: list[tuple[str, Any, set[str], bool]] = [
    ("/v1/chat/completions", {"tool_choice": "required"}, {"bash", "save"}, False),
    ("/v1/chat/completions", {"tool_choice": "required", "parallel_tool_calls": False}, {"bash", "save"}, True),
    ("/v1/chat/completions", {"tool_choice": {"type": "function", "function": {"name": "save"}}}, {"save"}, True),
    (
        "/v1/chat/completions",
        {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "save"}}]},
            }
        },
        {"save"},
        False,
    ),
    ("/v1/responses", {"tool_choice": "required"}, {"bash", "save"}, False),
    ("/v1/responses", {"tool_choice": {"type": "function", "name": "save"}}, {"save"}, True),
    (
        "/v1/responses",
        {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "bash"}]}},
        {"bash"},
        False,
    ),
    ("/v1/messages", {"tool_choice": {"type": "any"}}, {"bash", "save"}, False),
    ("/v1/messages", {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}, {"bash", "save"}, True),
    ("/v1/messages", {"tool_choice": {"type": "tool", "name": "save"}}, {"save"}, True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "extra", "names", "single"), FORCED)
@pytest.mark.parametrize("kind", ["qwen2.5", "llama3.1"])
def test_forced_calls_are_of_the_tools_that_may_be_called(
    kind: str, path: str, extra: Any, names: set[str], single: bool
) -> None:
    tools = {"/v1/responses": RESPONSE_TOOLS, "/v1/messages": MESSAGE_TOOLS}.get(path, CHAT_TOOLS)

    async def test(server: Served) -> None:
        found: list[list[tuple[str, Any]]] = []
        for _ in range(12):
            status, _, answer = await server.post(path, {**ASKED[path], "tools": tools, **extra})
            assert status == 200, answer
            found.append(calls_of(path, answer))
        for name, arguments in [call for calls in found for call in calls]:
            jsonschema_rs.validate({"bash": {"type": "object"}, "save": NESTED}[name], arguments)
        assert {name for calls in found for name, _ in calls} == names
        [grammar] = {wanted.grammar for wanted in server.engine.asked}
        tokenizer = chat(kind).tokenizer
        text = tokenizer.decode(server.session.recorder.turns[0].answer.ids[:-1])
        assert is_allowed(grammars(kind), tokenizer, grammar, text)
        assert is_allowed(grammars(kind), tokenizer, grammar, f"{text}\n{text}") == (not single and kind == "qwen2.5")

    play(test, kind=kind)


STRICT: dict[str, Any] = {
    "/v1/chat/completions": CHAT_TOOLS,
    "/v1/responses": RESPONSE_TOOLS,
    "/v1/messages": MESSAGE_TOOLS,
}


@pytest.mark.parametrize("path", STRICT)
def test_strict_tools_bind_arguments_and_leave_texts_free(path: str) -> None:
    async def test(server: Served) -> None:
        body = {**ASKED[path], "tools": STRICT[path]}
        status, _, answer = await server.post(path, body)
        assert (status, text_of(path, answer)) == (200, "hello")
        [wanted] = server.engine.asked
        save = '<tool_call>\n{"name": "save", "arguments": {"who": {"name": "Ada", "age": %s}}}\n</tool_call>'
        kept = (grammars("qwen2.5"), chat().tokenizer, wanted.grammar)
        assert is_allowed(*kept, "so " + save % "36")
        assert is_allowed(*kept, CALL.replace('":  "', '": "'))  # of a tool that isn't strict
        assert not is_allowed(*kept, "so " + save % '"36"')
        loose = [{key: value for key, value in tool.items() if key != "strict"} for tool in STRICT[path]]
        if path == "/v1/chat/completions":
            loose = [BASH]
        await server.post(path, {**body, "tools": loose})
        await server.post(path, {**body, "tool_choice": {"type": "none"} if path == "/v1/messages" else "none"})
        assert [bool(wanted.grammar) for wanted in server.engine.asked] == [True, False, False]

    play(test, "hello")


def test_a_tool_among_allowed_ones_may_be_left_out() -> None:
    async def test(server: Served) -> None:
        allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "bash"}}]}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
        body = {**ASKED["/v1/chat/completions"], "tools": [BASH, {"type": "function", "function": {"name": "other"}}]}
        await server.post("/v1/chat/completions", {**body, "tool_choice": choice})
        [wanted] = server.engine.asked
        kept = (grammars("qwen2.5"), chat().tokenizer, wanted.grammar)
        assert is_allowed(*kept, "hello")
        assert is_allowed(*kept, CALL.replace('":  "', '": "'))
        assert not is_allowed(*kept, CALL.replace("bash", "other"))

    play(test)


def test_an_answer_may_be_json_or_a_call() -> None:
    """As agents with a type of output ask."""

    async def test(server: Served) -> None:
        body = {**ASKED["/v1/chat/completions"], "response_format": SCHEMA, "tools": CHAT_TOOLS}
        kinds = set[str]()
        for _ in range(12):
            _, _, answer = await server.post("/v1/chat/completions", body)
            message = answer["choices"][0]["message"]
            kinds.add("call" if message.get("tool_calls") else "text")
            if message["content"] is not None:
                jsonschema_rs.validate(PERSON, json.loads(message["content"]))
        assert kinds == {"call", "text"}

    play(test)


@pytest.mark.parametrize("kind", ["qwen3", "r1"])
def test_reasoning_comes_before_what_is_constrained(kind: str) -> None:
    """The chat template opens the block itself (r1), or leaves it to the model."""

    async def test(server: Served) -> None:
        thought = "hm {\n</think>\n\n" if kind == "r1" else "<think>\nhm {\n</think>\n\n"
        said = '{"name": "Ada", "age": 36}'
        server.engine.says = lambda wanted: thought + said
        body = {**ASKED["/v1/chat/completions"], "response_format": SCHEMA}
        _, _, answer = await server.post("/v1/chat/completions", body)
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm {", said)
        [wanted] = server.engine.asked
        allowed = {
            text: is_allowed(grammars(kind), chat(kind).tokenizer, wanted.grammar, text)
            for text in (thought + said, said)
        }
        assert allowed == {thought + said: True, said: kind == "qwen3"}

    play(test, kind=kind)


def test_the_openai_client_parses_both_apis() -> None:
    async def test(server: Served) -> None:
        async with AsyncOpenAI(base_url=server.base_url, api_key=server.session.key, max_retries=0) as client:
            asked = await client.chat.completions.parse(model="headway", messages=[USER], response_format=Person)
            assert isinstance(asked.choices[0].message.parsed, Person)
            answer = await client.responses.parse(model="headway", input="1+2?", text_format=Person)
            assert isinstance(answer.output_parsed, Person)

    play(test)


ANY = {"type": "json_schema", "json_schema": {"name": "x"}}


@pytest.mark.parametrize(
    ("path", "extra", "param", "says"),
    [
        ("/v1/chat/completions", {"response_format": {"type": "xml"}}, "response_format", "valid: {'type': 'text'}"),
        ("/v1/chat/completions", {"response_format": "json"}, "response_format", "valid: {'type': 'text'}"),
        ("/v1/chat/completions", {"response_format": ANY}, "response_format.json_schema.schema", "valid: a JSON"),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"items": {"type": "number?"}}}}},
            "response_format.json_schema.schema",
            "JSON schema at /items: Invalid type: number?",
        ),
        (
            "/v1/responses",
            {"text": {"format": {**FLAT, "schema": {"properties": {"a": {"not": {}}}}}}},
            "text.format.schema",
            'JSON schema at /properties/a: Unimplemented keys: ["not"]',
        ),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": {"enum": []}}}},
            "output_config.format.schema",
            "Unsatisfiable",
        ),
        (
            "/v1/completions",
            {"response_format": {**SCHEMA, "json_schema": {"schema": {"x": "y" * 200_000}}}},
            "response_format.json_schema.schema",
            "at most 131072 are valid",
        ),
        ("/v1/chat/completions", {"tool_choice": "required"}, "tool_choice", "the names of tools are: none"),
        (
            "/v1/chat/completions",
            {"tool_choice": "any", "tools": CHAT_TOOLS},
            "tool_choice",
            "valid: 'none', 'auto'",
        ),
        (
            "/v1/chat/completions",
            {"tool_choice": {"type": "function", "function": {"name": "rm"}}, "tools": CHAT_TOOLS},
            "tool_choice",
            "'rm', and the names of tools are: 'bash', 'save'",
        ),
        (
            "/v1/chat/completions",
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "some"}}, "tools": CHAT_TOOLS},
            "tool_choice.allowed_tools.mode",
            "valid: 'auto' or 'required'",
        ),
        (
            "/v1/responses",
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}, "tools": RESPONSE_TOOLS},
            "tool_choice.tools",
            "one or more tools",
        ),
        ("/v1/messages", {"tool_choice": {"type": "tool"}, "tools": MESSAGE_TOOLS}, "tool_choice.name", "of a tool"),
        ("/v1/messages", {"tool_choice": {"type": "all"}, "tools": MESSAGE_TOOLS}, "tool_choice", "'any', 'tool'"),
        (
            "/v1/chat/completions",
            {"tools": [BASH, {"type": "function", "function": {**FUNCTION, "strict": "yes"}}]},
            "tools[1].function.strict",
            "valid: true or false",
        ),
        (
            "/v1/chat/completions",
            {"tools": [BASH, {"type": "function", "function": {**FUNCTION, "parameters": {"uniqueItems": True}}}]},
            "tools[1].function.parameters",
            'Unimplemented keys: ["uniqueItems"]',
        ),
    ],
)
def test_refusals_name_the_field_and_the_place(path: str, extra: Any, param: str, says: str) -> None:
    async def test(server: Served) -> None:
        status, _, answer = await server.post(path, {**ASKED[path], **extra})
        assert status == 400
        assert param in answer["error"]["message"]
        assert says in answer["error"]["message"]
        if path != "/v1/messages":
            assert answer["error"]["param"] == param
        assert not server.engine.asked
        assert (await server.post(path, ASKED[path]))[0] == 200

    play(test, "hello")


def test_what_a_tool_that_is_not_strict_has_beyond_grammars_is_ignored() -> None:
    async def test(server: Served) -> None:
        loose = {"name": "save", "parameters": {"type": "object", "properties": {"a": {"type": "integer", "not": {}}}}}
        body = {**ASKED["/v1/chat/completions"], "tools": [{"type": "function", "function": loose}]}
        status, _, answer = await server.post("/v1/chat/completions", {**body, "tool_choice": "required"})
        assert status == 200
        assert all(isinstance(arguments.get("a", 0), int) for _, arguments in calls_of("/v1/chat/completions", answer))

    play(test)


def test_rollouts_that_are_trained_refuse_constraints_and_report_strict_tools_once() -> None:
    async def test(server: Served) -> None:
        session = server.sessions.open("9-0", server.engine, constraints=False)
        asked = ASKED["/v1/chat/completions"]
        for extra, param in (
            ({"response_format": SCHEMA}, "response_format.json_schema.schema"),
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"tools": CHAT_TOOLS, "tool_choice": "required"}, "tool_choice"),
        ):
            status, _, answer = await server.post("/v1/chat/completions", {**asked, **extra}, key=session.key)
            assert (status, answer["error"]["param"]) == (400, param)
            assert "algorithm.allow_truncated_sampling = true" in answer["error"]["message"]
        for _ in range(2):
            assert (await server.post("/v1/chat/completions", {**asked, "tools": CHAT_TOOLS}, key=session.key))[
                0
            ] == 200
        assert [wanted.grammar for wanted in server.engine.asked] == ["", ""]
        [(name, detail)] = server.events
        assert name == "client_sampling"
        assert "strict_tools = True" in detail

    play(test, "hello")


def test_a_grammar_that_waits_too_long_for_others_is_refused_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(server: Served) -> None:
        monkeypatch.setattr(app, "_GRAMMAR_S", 0.0)
        body = {**ASKED["/v1/chat/completions"], "response_format": {"type": "json_object"}}
        status, headers, _ = await server.post("/v1/chat/completions", body)
        assert (status, headers["retry-after"]) == (429, "5")
        assert (await server.post("/v1/chat/completions", ASKED["/v1/chat/completions"]))[0] == 200

    play(test, "hello")


def test_the_search_for_the_schema_at_fault_has_one_time_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request stays at fault, though which schema is isn't said; others' grammars don't wait for it."""
    body = {**ASKED["/v1/chat/completions"], "tools": CHAT_TOOLS, "tool_choice": "required"}
    gauge, begun = list[int](), 0

    def start(self: Grammars, text: str) -> Future[Any]:
        nonlocal begun
        future: Future[Any] = Future()
        if not begun:
            future.set_exception(GrammarRefused("it can't be compiled"))
        begun += 1
        return future

    monkeypatch.setattr(Grammars, "start", start)
    monkeypatch.setattr(app, "_FAULT_S", 0.05)
    compiled = app.App._compiled

    async def counted(self: app.App, grammar: str) -> None:
        asking = asyncio.ensure_future(compiled(self, grammar))
        await asyncio.sleep(0)
        gauge.append(self.compiling)
        try:
            await asking
        finally:
            gauge.append(self.compiling)

    monkeypatch.setattr(app.App, "_compiled", counted)

    async def test(server: Served) -> None:
        status, _, answer = await server.post("/v1/chat/completions", body)
        assert (status, answer["error"]["param"]) == (400, "tool_choice")
        assert answer["error"]["message"] == "tool_choice: it can't be compiled"

    play(test, "hello")
    assert begun == 2
    assert gauge[-2:] == [1, 0]
    metrics = ServeMetrics({}, RouterStatistics(), (), 0, 0, compiling=3).text().decode()
    assert "headway_serve_compiling 3.0" in metrics
