"""Tools of the Responses API that aren't functions: namespaces, hosted ones, custom ones with their grammars."""

from __future__ import annotations

import json
from typing import Any

import pytest
from endpoint_server import Served, chat, events_of
from test_reported_endpoint import BODIES, OBJECT, RESPONSES, play, posted, prompts

FILES: Any = {
    "type": "namespace",
    "name": "files",
    "description": "Files.",
    "tools": [
        {"type": "function", "name": "read", "description": "Read.", "parameters": OBJECT},
        {"type": "function", "name": "write", "description": "Write.", "parameters": OBJECT},
    ],
}
OTHER: Any = {**FILES, "name": "other"}
BASH: Any = {"type": "function", "name": "bash", "description": "Run.", "parameters": OBJECT}
HOSTED: list[Any] = [
    {"type": "web_search"},
    {"type": "web_search_preview"},
    {"type": "image_generation"},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "file_search", "vector_store_ids": ["a"]},
]


def names_in(prompt: str) -> list[str]:
    return [
        json.loads(line)["function"]["name"]
        for line in prompt.replace("Tools: [", "\n").splitlines()
        if line.startswith('{"type": "function"')
    ]


def called_first(tools: list[Any], which: int, *, stream: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the first call's item as a client gets it, the tool as the model is told of it)."""
    found: dict[str, Any] = {}

    def says(wanted: Any) -> str:
        prompt = chat().tokenizer.decode(wanted.prompt_ids, keep_special=True)
        text = prompt[prompt.index("Tools: ") + len("Tools: ") :]
        shown, _ = json.JSONDecoder().raw_decode(text)
        found["tool"] = shown[which]["function"]
        found["all"] = [one["function"]["name"] for one in shown]
        return f'<tool_call>\n{{"name": "{shown[which]["function"]["name"]}", "arguments": {{"a": 1}}}}\n</tool_call>'

    async def test(server: Served) -> Any:
        body = {**BODIES[RESPONSES], "tools": tools, "stream": stream}
        status, _, answer = await server.post(RESPONSES, body)
        assert status == 200, answer
        if stream:
            answer = events_of(answer)[-1][1]["response"]
        return next(item for item in answer["output"] if item["type"] == "function_call")

    return play(test, says), found


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("tools", "which", "name", "namespace"),
    [
        ([BASH, FILES], 0, "bash", None),
        ([BASH, FILES], 1, "read", "files"),
        ([BASH, FILES], 2, "write", "files"),
        ([FILES, OTHER], 2, "read", "other"),
        ([FILES, {**BASH, "name": "read"}], 2, "read", None),
        ([FILES, {"type": "web_search"}, BASH], 2, "bash", None),
    ],
    ids=["beside one", "its first", "its second", "equal names", "a function of an equal name", "a hosted one between"],
)
def test_a_namespaces_functions_go_to_the_model_and_back(
    tools: list[Any], which: int, name: str, namespace: str | None, stream: bool
) -> None:
    item, found = called_first(tools, which, stream=stream)
    assert (item["name"], item.get("namespace")) == (name, namespace)
    assert json.loads(item["arguments"]) == {"a": 1}
    assert len(set(found["all"])) == len(found["all"])


@pytest.mark.parametrize("hosted", HOSTED, ids=[one["type"] for one in HOSTED])
def test_hosted_tools_are_left_out_and_said_once_by_name(hosted: Any) -> None:
    async def test(server: Served) -> None:
        for _ in range(2):
            status, _, answer = await server.post(RESPONSES, {**BODIES[RESPONSES], "tools": [BASH, hosted]})
            assert status == 200, answer
        prompt = chat().tokenizer.decode(server.engine.asked[0].prompt_ids, keep_special=True)
        assert ("bash" in prompt, hosted["type"] in prompt) == (True, False)
        assert len([1 for event in server.events if hosted["type"] in str(event)]) == 1

    play(test)


def test_history_of_a_namespaces_calls_is_read() -> None:
    item, found = called_first([FILES, OTHER], 3)
    call = {key: item[key] for key in ("type", "call_id", "name", "arguments", "namespace") if key in item}
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "done"}
    status, answer, prompt = prompts(
        RESPONSES,
        {**BODIES[RESPONSES], "tools": [FILES, OTHER], "input": [{"role": "user", "content": "x"}, call, output]},
    )
    assert status == 200, answer
    assert f'"name": "{found["tool"]["name"]}", "arguments"' in prompt


@pytest.mark.parametrize(
    "tools",
    [
        [{"type": "namespace", "name": "files"}],
        [{"type": "namespace", "tools": FILES["tools"]}],
        [{"type": "namespace", "name": "files", "tools": "read"}],
        [{"type": "namespace", "name": "files", "tools": [{"type": "function"}]}],
        [{"type": "no such kind"}],
        [{"name": "bash"}],
    ],
)
def test_tools_that_are_none_are_refused_with_their_place(tools: list[Any]) -> None:
    status, answer = posted(RESPONSES, {"tools": [BASH, *tools]})
    assert (status, "tools[1]" in answer["error"]["message"]) == (400, True), answer


CUSTOM: Any = {"type": "custom", "name": "apply_patch", "description": "Apply a patch."}
CUSTOMS: dict[str, Any] = {
    "text": CUSTOM,
    "text by its format": {**CUSTOM, "format": {"type": "text"}},
    "a grammar in Lark": {
        **CUSTOM,
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: /[a-z*]+/"},
    },
    "a regex": {**CUSTOM, "format": {"type": "grammar", "syntax": "regex", "definition": "[a-z*]+"}},
}


@pytest.mark.parametrize("tool", CUSTOMS.values(), ids=CUSTOMS)
def test_custom_tools_reach_the_model(tool: Any) -> None:
    status, answer, prompt = prompts(RESPONSES, {**BODIES[RESPONSES], "tools": [BASH, tool]})
    assert (status, "apply_patch" in prompt) == (200, True), answer


@pytest.mark.parametrize("tool", CUSTOMS.values(), ids=CUSTOMS)
def test_calls_of_custom_tools_come_back_as_texts(tool: Any) -> None:
    """Whatever the one argument is called that the model is told of."""

    def says(wanted: Any) -> str:
        prompt = chat().tokenizer.decode(wanted.prompt_ids, keep_special=True)
        text = prompt[prompt.index("Tools: ") + len("Tools: ") :]
        shown, _ = json.JSONDecoder().raw_decode(text)
        function = shown[0]["function"]
        [key] = function["parameters"]["properties"]
        return f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {{"{key}": "abc*"}}}}\n</tool_call>'

    async def test(server: Served) -> None:
        status, _, answer = await server.post(RESPONSES, {**BODIES[RESPONSES], "tools": [tool]})
        assert status == 200, answer
        [item] = [one for one in answer["output"] if "call" in one["type"]]
        assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", "abc*")
        call = {key: item[key] for key in ("type", "call_id", "name", "input")}
        output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "patched"}
        given = [{"role": "user", "content": "x"}, call, output]
        status, _, answer = await server.post(RESPONSES, {**BODIES[RESPONSES], "tools": [tool], "input": given})
        assert status == 200, answer
        prompt = chat().tokenizer.decode(server.engine.asked[1].prompt_ids, keep_special=True)
        assert ("abc*" in prompt, "patched" in prompt) == (True, True)

    play(test, says)


@pytest.mark.parametrize(
    "format_",
    [
        {"type": "grammar", "syntax": "lark", "definition": "start: ("},
        {"type": "grammar", "syntax": "regex", "definition": "("},
        {"type": "grammar", "syntax": "yacc", "definition": "a"},
        {"type": "grammar", "syntax": "lark"},
        {"type": "nothing"},
    ],
)
def test_grammars_of_custom_tools_that_are_none_are_refused(format_: Any) -> None:
    status, answer = posted(RESPONSES, {"tools": [{**CUSTOM, "format": format_}]})
    assert (status, "tools[0]" in answer["error"]["message"]) == (400, True), answer
