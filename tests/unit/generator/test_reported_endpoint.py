"""Requests in the manners of other servers' clients: what isn't done is refused by name, what is neutral isn't."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import recorded_agent
from endpoint_server import CALL, TOOLS, USER, Served, chat, served

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "headway", "messages": [USER]},
    COMPLETIONS: {"model": "headway", "prompt": "1+2?", "max_tokens": 100},
    RESPONSES: {"model": "headway", "input": "1+2?"},
    MESSAGES: {"model": "headway", "messages": [USER], "max_tokens": 100},
}
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}


def play(test: Callable[[Served], Awaitable[Any]], says: Any = "hello", kind: str = "qwen2.5", **options: Any) -> Any:
    async def main() -> Any:
        async with served(says, kind, **{"context_tokens": 100_000, **options}) as server:
            return await test(server)

    return asyncio.run(main())


def posted(path: str, extra: dict[str, Any], *, fixed: bool = True, **options: Any) -> tuple[int, Any]:
    """``fixed``: the experiment's sampling holds, as in a run."""

    async def test(server: Served) -> tuple[int, Any]:
        server.session.fixed_sampling = fixed
        status, _, answer = await server.post(path, {**BODIES[path], **extra})
        return status, answer

    return play(test, **options)


def prompts(path: str, body: dict[str, Any], says: str = "hello", kind: str = "qwen2.5") -> tuple[int, Any, str]:
    """(status, answer, the text of the prompt that was sampled after)."""

    async def test(server: Served) -> tuple[int, Any, str]:
        status, _, answer = await server.post(path, body)
        ids = server.engine.asked[0].prompt_ids if server.engine.asked else ()
        return status, answer, chat(kind).tokenizer.decode(ids, keep_special=True)

    return play(test, says, kind)


# --- fields of other servers -----------------------------------------------------------------------------------------

FORM: list[tuple[str, Any]] = [
    ("guided_json", OBJECT),
    ("guided_regex", "[0-9]+"),
    ("guided_choice", ["yes", "no"]),
    ("guided_grammar", 'root ::= "a"'),
    ("structured_outputs", {"json": OBJECT}),
    ("structured_outputs", {"choice": ["a", "b"]}),
    ("stop_token_ids", [13]),
    ("bad_words", ["no"]),
    ("return_token_ids", True),
    ("echo", True),
    ("prompt_logprobs", 1),
    ("ignore_eos", True),
    ("min_tokens", 5),
    ("truncate_prompt_tokens", 10),
    ("return_tokens_as_token_ids", True),
    ("include_stop_str_in_output", True),
    ("skip_special_tokens", False),
    ("regex", "[0-9]+"),
    ("ebnf", 'root ::= "a"'),
    ("json_schema", OBJECT),
    ("grammar", 'root ::= "a"'),
    ("allowed_token_ids", [1, 2]),
    ("logits_processors", ["x"]),
    ("use_beam_search", True),
]
NEUTRAL: list[tuple[str, Any]] = [
    *((name, None) for name in ("guided_json", "guided_choice", "structured_outputs", "bad_words", "prompt_logprobs")),
    *((name, []) for name in ("stop_token_ids", "bad_words")),
    *((name, False) for name in ("echo", "return_token_ids", "ignore_eos", "use_beam_search")),
    *((name, None) for name in ("regex", "ebnf", "json_schema", "min_p", "typical_p")),
    *((name, False) for name in ("include_stop_str_in_output", "return_tokens_as_token_ids")),
    ("min_p", 0),
    ("min_p", 0.0),
    ("min_tokens", 0),
    ("skip_special_tokens", True),
    ("user", "someone"),
    ("metadata", {"a": "b"}),
    ("store", False),
    ("service_tier", "auto"),
]


@pytest.mark.parametrize(("name", "value"), FORM, ids=[f"{name}-{number}" for number, (name, _) in enumerate(FORM)])
@pytest.mark.parametrize("fixed", [True, False], ids=["run", "serve"])
def test_fields_that_change_the_answers_form_are_refused_by_name(name: str, value: Any, fixed: bool) -> None:
    status, answer = posted(CHAT, {name: value}, fixed=fixed)
    assert status == 400, answer
    assert name in answer["error"]["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    ("name", "value"), [("guided_json", OBJECT), ("stop_token_ids", [13]), ("bad_words", ["no"]), ("ignore_eos", True)]
)
def test_such_fields_are_refused_in_every_api(path: str, name: str, value: Any) -> None:
    status, answer = posted(path, {name: value})
    assert status == 400, answer
    assert name in answer["error"]["message"]


@pytest.mark.parametrize(("name", "value"), NEUTRAL, ids=[f"{name}={value}" for name, value in NEUTRAL])
def test_neutral_and_harmless_fields_are_accepted(name: str, value: Any) -> None:
    assert posted(CHAT, {name: value}, fixed=False)[0] == 200


@pytest.mark.parametrize(
    ("name", "value"), [("min_p", 0.1), ("typical_p", 0.5), ("length_penalty", 2.0), ("mirostat", 1)]
)
def test_sampling_fields_are_refused_by_serve_and_overridden_in_a_run(name: str, value: Any) -> None:
    status, answer = posted(CHAT, {name: value}, fixed=False)
    assert (status, name in str(answer)) == (400, True), answer
    assert posted(CHAT, {name: value})[0] == 200


# --- a final message of the assistant --------------------------------------------------------------------------------

BEGUN: Any = {"role": "assistant", "content": "The sum is"}
TURN = "<|im_start|>assistant\n"
CONTINUED: dict[str, tuple[str, dict[str, Any]]] = {
    "anthropic": (MESSAGES, {**BODIES[MESSAGES], "messages": [USER, BEGUN]}),
    "anthropic, blocks": (
        MESSAGES,
        {
            **BODIES[MESSAGES],
            "messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "The sum is"}]}],
        },
    ),
    "anthropic, several turns": (MESSAGES, {**BODIES[MESSAGES], "messages": [USER, BEGUN, USER, BEGUN]}),
    "anthropic, JSON": (
        MESSAGES,
        {**BODIES[MESSAGES], "messages": [USER, {"role": "assistant", "content": '{"sum": '}]},
    ),
    "continue_final_message": (
        CHAT,
        {**BODIES[CHAT], "messages": [USER, BEGUN], "continue_final_message": True, "add_generation_prompt": False},
    ),
    "continue_final_message alone": (CHAT, {**BODIES[CHAT], "messages": [USER, BEGUN], "continue_final_message": True}),
    "prefix": (CHAT, {**BODIES[CHAT], "messages": [USER, {**BEGUN, "prefix": True}]}),
    "partial": (CHAT, {**BODIES[CHAT], "messages": [USER, {**BEGUN, "partial": True}]}),
}


@pytest.mark.parametrize(("path", "body"), CONTINUED.values(), ids=CONTINUED)
def test_a_final_message_of_the_assistant_is_continued_or_refused(path: str, body: dict[str, Any]) -> None:
    status, answer, prompt = prompts(path, body, " 3")
    if status == 400:
        return
    content = body["messages"][-1]["content"]
    text = content if isinstance(content, str) else content[0]["text"]
    assert status == 200, answer
    assert prompt.rstrip().endswith(text.rstrip())
    assert prompt.count(TURN) == sum(message["role"] == "assistant" for message in body["messages"])


@pytest.mark.parametrize("extra", [{"add_generation_prompt": True}, {"continue_final_message": False}, {}])
def test_a_users_final_message_is_answered(extra: dict[str, Any]) -> None:
    status, _, prompt = prompts(CHAT, {**BODIES[CHAT], **extra})
    assert (status, prompt.endswith(TURN)) == (200, True)


# --- schemas ---------------------------------------------------------------------------------------------------------

ACCEPTED: dict[str, Any] = {
    "names that are texts": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
    "any names": {"type": "object", "propertyNames": True},
    "names of any kind": {"type": "object", "propertyNames": {}},
    "lists that may repeat": {"type": "array", "items": {"type": "string"}, "uniqueItems": False},
    "a format that nobody knows": {"type": "string", "format": "phone"},
    "another format": {"type": "integer", "format": "int64"},
    "a number's format": {"type": "number", "format": "double"},
    "a format of OpenAPI": {"type": "string", "format": "password"},
    "no least length": {"type": "string", "minLength": 0},
    "annotations": {"type": "string", "readOnly": True, "writeOnly": False, "examples": ["a"], "$comment": "x"},
    "a deprecated one": {"type": "object", "properties": {"a": {"type": "string", "deprecated": True}}},
    "a text's content": {"type": "string", "contentMediaType": "text/html"},
    "no unevaluated ones": {"type": "object", "properties": {"a": {"type": "string"}}, "unevaluatedProperties": True},
    "few properties": {"type": "object", "minProperties": 0},
    "an identity": {"$id": "https://example.com/a", "type": "object", "properties": {"a": {"type": "string"}}},
    "sets": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "decimals": {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]},
    "email by its pattern": {
        "type": "string",
        "format": "email",
        "pattern": (
            r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
        ),
    },
}


def wants(schema: Any) -> dict[str, Any]:
    whole = {"type": "object", "properties": {"it": schema}, "required": ["it"], "additionalProperties": False}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": whole, "strict": True}}}


@pytest.mark.slow
@pytest.mark.parametrize("schema", ACCEPTED.values(), ids=ACCEPTED)
def test_vacuous_and_annotating_keywords_are_accepted(schema: Any) -> None:
    status, answer = posted(CHAT, wants(schema))
    assert status == 200, answer


@pytest.mark.parametrize("schema", ACCEPTED.values(), ids=ACCEPTED)
def test_strict_tools_may_have_them(schema: Any) -> None:
    parameters = {"type": "object", "properties": {"it": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}
    status, answer = posted(CHAT, {"tools": [tool]})
    assert status == 200, answer


@pytest.mark.parametrize("schema", [{"type": "nothing"}, {"type": "string", "pattern": "("}, {"enum": []}])
def test_schemas_that_nothing_fits_are_still_refused(schema: Any) -> None:
    status, answer = posted(CHAT, wants(schema))
    assert (status, "response_format" in answer["error"]["message"]) == (400, True)


# --- small ones ------------------------------------------------------------------------------------------------------

BARE: list[dict[str, Any]] = [
    {"name": "now"},
    {"name": "now", "description": "The time."},
    {"name": "now", "parameters": None},
    {"name": "now", "parameters": {}},
    {"name": "now", "description": None},
]
READS = (
    "{%- for tool in tools or [] %}{{- tool.function.name + tool.function.description + '(' }}"
    "{%- for name, p in tool.function.parameters.properties.items() %}{{- name + ': ' + p.type }}{% endfor %}"
    "{{- ')' }}{% endfor %}"
)


@pytest.mark.parametrize("function", BARE, ids=[json.dumps(one) for one in BARE])
@pytest.mark.parametrize("api", [CHAT, RESPONSES])
def test_what_tools_leave_out_is_filled_in(function: dict[str, Any], api: str) -> None:
    recorded_agent.KINDS["reads parameters"] = ("qwen", READS + recorded_agent.QWEN25)
    tool = {"type": "function", **function} if api == RESPONSES else {"type": "function", "function": function}
    status, answer, prompt = prompts(api, {**BODIES[api], "tools": [tool]}, kind="reads parameters")
    assert (status, "now" in prompt) == (200, True), answer


WALKS = (
    "{%- macro walk(p) %}{%- if p is mapping %}{%- for name, part in p.items() %}{{- name + ':' }}"
    "{{- walk(part) }}{% endfor %}{%- elif p is iterable and p is not string %}{%- for part in p %}"
    "{{- walk(part) }}{% endfor %}{%- else %}{{- p }}{% endif %}{% endmacro %}"
    "{%- for tool in tools or [] %}{{- walk(tool.function.parameters) }}{% endfor %}"
)
DEEP: dict[str, tuple[str, str, str, int]] = {  # the schema's beginning, leaf and end, depth
    "objects": ('{"type":"object","properties":{"a":', "{}", "}}", 400),
    "lists": ('{"type":"array","items":', "{}", "}", 600),
    "alternatives": ('{"anyOf":[', "{}", "]}", 400),
    "values": ('{"default":[', "1", "]}", 400),
}


def deep_body(path: str, schema: str) -> bytes:
    tool: dict[str, Any] = {"name": "f", "parameters": {"type": "object", "properties": {"it": "@"}}}
    if path == MESSAGES:
        tool["input_schema"] = tool.pop("parameters")
    whole = {"type": "function", "function": tool} if path == CHAT else tool if path == MESSAGES else {
        "type": "function", **tool
    }  # fmt: skip
    return json.dumps({**BODIES[path], "tools": [whole]}).replace('"@"', schema).encode()


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize(("opening", "leaf", "closing", "depth"), DEEP.values(), ids=DEEP)
def test_tools_nested_too_deep_for_the_template_are_the_clients_mistake(
    opening: str, leaf: str, closing: str, depth: int, path: str
) -> None:
    recorded_agent.KINDS["walks"] = ("qwen", WALKS + recorded_agent.QWEN25)

    async def test(server: Served) -> None:
        for levels, right in ((3, 200), (depth, 400)):
            schema = opening * levels + leaf + closing * levels
            status, _, answer = await server.post(path, deep_body(path, schema))
            assert status == right, str(answer)[:300]

    play(test, kind="walks")


def test_arguments_nested_too_deep_are_the_clients_mistake() -> None:
    deep = "[" * 900 + "]" * 900
    call = {"id": "1", "type": "function", "function": {"name": "bash", "arguments": f'{{"a": {deep}}}'}}
    history = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    status, answer = posted(CHAT, {"messages": [*history, {"role": "tool", "tool_call_id": "1", "content": "x"}]})
    assert status in (200, 400), answer


PATHS: dict[str, tuple[str, dict[str, Any], str]] = {
    "anthropic tool without a name": (MESSAGES, {"tools": [{"input_schema": {"type": "object"}}]}, "tools[0]"),
    "responses tool without a name": (RESPONSES, {"tools": [{"type": "function"}]}, "tools[0]"),
    "instructions that are a number": (RESPONSES, {"instructions": 3}, "instructions"),
    "instructions that are an object": (RESPONSES, {"instructions": {"a": 1}}, "instructions"),
    "system that is a number": (MESSAGES, {"system": 3}, "system"),
    "system with an unknown block": (MESSAGES, {"system": [{"type": "image"}]}, "system"),
    "a later input's content": (
        RESPONSES,
        {"instructions": "Be brief.", "input": [{"role": "user", "content": "a"}, {"role": "user", "content": 3}]},
        "input[1]",
    ),
    "an input's role": (RESPONSES, {"instructions": "x", "input": [{"role": "nobody", "content": "a"}]}, "input[0]"),
    "an output that is a number": (
        RESPONSES,
        {
            "input": [
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": 3},
            ]
        },
        "input[1]",
    ),
    "a later message's content": (
        MESSAGES,
        {"system": "x", "messages": [USER, BEGUN, {"role": "user", "content": [{"type": "text", "text": 3}]}]},
        "messages[2]",
    ),
    "a message after tool results": (
        MESSAGES,
        {
            "messages": [
                USER,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}] * 2},
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}] * 2
                    + [{"type": "text", "text": "go"}],
                },
                BEGUN,
                {"role": "user", "content": [{"type": "document"}]},
            ]
        },
        "messages[4]",
    ),
}


@pytest.mark.parametrize(("path", "extra", "named"), PATHS.values(), ids=PATHS)
def test_errors_name_the_field_that_the_client_sent(path: str, extra: dict[str, Any], named: str) -> None:
    status, answer = posted(path, extra)
    assert status == 400, answer
    assert named in answer["error"]["message"]


def test_ids_of_calls_differ_between_sessions() -> None:
    async def test(server: Served) -> None:
        ids = list[str]()
        for number in range(4):
            session = server.open(f"9-{number}")
            for path in (CHAT, CHAT):
                _, _, answer = await server.post(path, {**BODIES[path], "tools": TOOLS}, key=session.key)
                ids += [call["id"] for call in answer["choices"][0]["message"]["tool_calls"]]
        assert len(set(ids)) == len(ids) == 8

    play(test, CALL)


@pytest.mark.parametrize(
    ("path", "places"),
    [(MESSAGES, lambda a: a["content"]), (RESPONSES, lambda a: a["output"])],
    ids=["messages", "responses"],
)
def test_ids_of_calls_differ_in_the_other_apis(path: str, places: Any) -> None:
    tool: Any = {"name": "bash", "input_schema": {"type": "object"}} if path == MESSAGES else {
        "type": "function",
        "name": "bash",
        "parameters": {"type": "object"},
    }  # fmt: skip

    async def test(server: Served) -> None:
        ids = list[str]()
        for number in range(3):
            session = server.open(f"9-{number}")
            _, _, answer = await server.post(path, {**BODIES[path], "tools": [tool]}, key=session.key)
            ids += [
                one.get("call_id", one["id"]) for one in places(answer) if one["type"] in ("tool_use", "function_call")
            ]
        assert len(set(ids)) == len(ids) == 3

    play(test, CALL)


RESULTS: dict[str, Any] = {
    "a text": "no such file",
    "blocks": [{"type": "text", "text": "no such file"}],
    "nothing": None,
    "two blocks": [{"type": "text", "text": "no such file: "}, {"type": "text", "text": "a"}],
}


@pytest.mark.parametrize("content", RESULTS.values(), ids=RESULTS)
def test_a_result_that_is_an_error_is_told_as_one(content: Any) -> None:
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "bash", "input": {}}]}

    def told(**is_error: Any) -> str:
        result = {"type": "tool_result", "tool_use_id": "a", **is_error}
        if content is not None:
            result["content"] = content
        status, answer, prompt = prompts(
            MESSAGES, {**BODIES[MESSAGES], "messages": [USER, use, {"role": "user", "content": [result]}]}
        )
        assert status == 200, answer
        return prompt

    assert "error" in told(is_error=True).lower()
    assert told(is_error=False) == told()
    assert "error" not in told().lower()
