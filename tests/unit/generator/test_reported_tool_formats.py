"""Tool calls in the manners in which models' chat templates write them, through the endpoint: whole and streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import real_tokenizers
import recorded_agent
from endpoint_server import chat, events_of, served
from grammar_walk import is_allowed
from tokenizers import AddedToken

from headway.tokens.grammar import Grammars

FOUND = "/v1/chat/completions"
USER: Any = {"role": "user", "content": "Weather?"}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": schema}}


WEATHER = tool(
    "get_weather",
    city={"type": "string"},
    days={"type": "integer"},
    detail={"type": "boolean"},
    wind={"type": "number"},
    tags={"type": "array", "items": {"type": "string"}},
    place={"type": "object"},
)
TOOLS = [WEATHER, tool("stop"), tool("run", code={"type": "string"})]

HEAD = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{% for tool in tools %}{{- tool | tojson + '\\n' }}{% endfor %}"
    "{{- '<|im_end|>\\n' }}{% endif %}{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{{- message.content or '' }}{%- if message.tool_calls %}"
)
TAIL = (
    "{%- endif %}{{- '<|im_end|>\\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
)
EACH = "{%- for call in message.tool_calls %}{%- set f = call.function %}"
TEXT = "(v if v is string else v | tojson)"


@dataclass(frozen=True)
class Manner:
    """The part of a template that writes calls, and special tokens among its marks."""

    calls: str
    marks: tuple[str, ...] = ()

    @property
    def template(self) -> str:
        return HEAD + self.calls + TAIL


MANNERS: dict[str, Manner] = {
    "xml of functions and parameters": Manner(
        EACH + "{{- '\\n<tool_call>\\n<function=' + f.name + '>\\n' }}{%- for k, v in f.arguments.items() %}"
        "{{- '<parameter=' + k + '>\\n' + " + TEXT + " + '\\n</parameter>\\n' }}{% endfor %}"
        "{{- '</function>\\n</tool_call>' }}{% endfor %}"
    ),
    "keys and values": Manner(
        EACH + "{{- '\\n<tool_call>' + f.name + '\\n' }}{%- for k, v in f.arguments.items() %}"
        "{{- '<arg_key>' + k + '</arg_key>\\n<arg_value>' + " + TEXT + " + '</arg_value>\\n' }}{% endfor %}"
        "{{- '</tool_call>' }}{% endfor %}"
    ),
    "objects in tags": Manner(  # Hermes: as ever
        EACH + '{{- \'\\n<tool_call>\\n{"name": "\' + f.name + \'", "arguments": \' + f.arguments | tojson'
        " + '}\\n</tool_call>' }}{% endfor %}"
    ),
    "a list behind a mark": Manner(
        "{{- '[TOOL_CALLS][' }}" + EACH + '{{- \'{"name": "\' + f.name + \'", "arguments": \' + f.arguments | tojson'
        " + '}' }}{{- ', ' if not loop.last else '' }}{% endfor %}{{- ']' }}",
        ("[TOOL_CALLS]",),
    ),
    "marks around name and arguments": Manner(
        "{{- '<|tool_calls_section_begin|>' }}" + EACH + "{{- '<|tool_call_begin|>functions.' + f.name + ':' + "
        "loop.index0 | string + '<|tool_call_argument_begin|>' + f.arguments | tojson + '<|tool_call_end|>' }}"
        "{% endfor %}{{- '<|tool_calls_section_end|>' }}",
        (
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
    ),
    "name and arguments by marks": Manner(
        EACH + "{{- '[TOOL_CALLS]' + f.name + '[ARGS]' + f.arguments | tojson }}{% endfor %}",
        ("[TOOL_CALLS]", "[ARGS]"),
    ),
    "nested invocations": Manner(
        "{{- '\\n<minimax:tool_call>\\n' }}" + EACH + "{{- '<invoke name=\"' + f.name + '\">\\n' }}"
        "{%- for k, v in f.arguments.items() %}{{- '<parameter name=\"' + k + '\">' + "
        + TEXT
        + " + '</parameter>\\n' }}"
        "{% endfor %}{{- '</invoke>\\n' }}{% endfor %}{{- '</minimax:tool_call>' }}"
    ),
    "a list in tags": Manner(
        "{{- '<tool_calls>[' }}" + EACH + '{{- \'{"name": "\' + f.name + \'", "arguments": \' + f.arguments | tojson'
        " + '}' }}{{- ', ' if not loop.last else '' }}{% endfor %}{{- ']</tool_calls>' }}"
    ),
    "a list in capital tags": Manner(
        "{{- '<TOOLCALL>[' }}" + EACH + '{{- \'{"name": "\' + f.name + \'", "arguments": \' + f.arguments | tojson'
        " + '}' }}{{- ', ' if not loop.last else '' }}{% endfor %}{{- ']</TOOLCALL>' }}"
    ),
    "a list of actions": Manner(
        "{{- '<|START_ACTION|>[' }}"
        + EACH
        + '{{- \'{"tool_call_id": "\' + loop.index0 | string + \'", "tool_name": "\''
        " + f.name + '\", \"parameters\": ' + f.arguments | tojson + '}' }}{{- ', ' if not loop.last else '' }}"
        "{% endfor %}{{- ']<|END_ACTION|>' }}",
        ("<|START_ACTION|>", "<|END_ACTION|>"),
    ),
    "names between wide marks": Manner(
        "{{- '<｜tool▁calls▁begin｜>' }}" + EACH + "{{- '<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' + "
        "f.arguments | tojson + '<｜tool▁call▁end｜>' }}{% endfor %}{{- '<｜tool▁calls▁end｜>' }}",
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ),
    ),
}
NESTED = {"tags": ["a", "b, c"], "place": {"x": 1, "y": {"z": None}}, "wind": 1.5, "detail": True}
ONE = ("get_weather", {"city": "Oslo", "days": 3})
CALLS: dict[str, list[tuple[str, Any]]] = {
    "one call": [ONE],
    "two calls": [ONE, ("run", {"code": "ls"})],
    "no arguments": [("stop", {})],
    "newlines and quotes": [("run", {"code": 'print("a\\n")\nif x < 1:\n\tx = \'}\' + "]"\n'})],
    "marks of xml in a value": [("run", {"code": "<b>&amp; <i>5 < 6 && 7 > 3</i></b>"})],
    "text that looks like a number": [("get_weather", {"city": "007"})],
    "text that looks like JSON": [("run", {"code": '{"a": [1, 2]}'})],
    "text that looks like a boolean": [("get_weather", {"city": "true"})],
    "values of each type": [("get_weather", NESTED)],
    "letters of other scripts": [("get_weather", {"city": "東京 é"})],
}


class Marked(str):
    """A text whose special tokens are sampled as such: each is one of its characters."""

    marks: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[str]:
        at = 0
        while at < len(self):
            mark = next((mark for mark in self.marks if self.startswith(mark, at)), self[at : at + 1])
            yield str(mark)
            at += len(mark)


def marked(text: str, marks: tuple[str, ...]) -> Marked:
    made = Marked(text)
    made.marks = marks
    return made


@cache
def kind_of(template: str, marks: tuple[str, ...] = ()) -> str:
    """A tokenizer with this template and these special tokens, as a kind of chat."""

    def made() -> Any:
        backend, settings = real_tokenizers.qwen()
        backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
        return backend, settings

    name = f"reported {len(real_tokenizers.KINDS)}"
    real_tokenizers.KINDS[name] = made
    recorded_agent.KINDS[name] = (name, template)
    return name


def rendered(template: str, messages: list[Any], **how: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    names = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    texts, _ = render_jinja_template([messages], tools=TOOLS, chat_template=template, **names, **how)
    return texts[0]


def written(template: str, calls: list[tuple[str, Any]], content: str = "") -> str:
    """The assistant's turn as transformers renders it, without its end."""
    entries = [
        {"type": "function", "id": f"call{number:05d}", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]
    asked = rendered(template, [USER], add_generation_prompt=True)
    whole = rendered(template, [USER, {"role": "assistant", "content": content, "tool_calls": entries}])
    assert whole.startswith(asked)
    plain = rendered(template, [USER, {"role": "assistant", "content": "plainly"}])
    return whole[len(asked) :].removesuffix(plain.rpartition("plainly")[2])


def posted(kind: str, says: str, **body: Any) -> tuple[int, Any, Any]:
    """(status, answer, the grammar that was asked for)."""

    async def main() -> Any:
        async with served(lambda wanted: says, kind, context_tokens=8000) as server:
            asked = {"model": "headway", "messages": [USER], "tools": TOOLS, **body}
            status, _, answer = await server.post(FOUND, asked)
            grammar = server.engine.asked[0].grammar if server.engine.asked else ""
            return status, answer, grammar

    return asyncio.run(main())


def streamed(kind: str, says: str) -> tuple[str, list[tuple[str, Any]]]:
    async def main() -> Any:
        async with served(lambda wanted: says, kind, batch=1, context_tokens=8000) as server:
            asked = {"model": "headway", "messages": [USER], "tools": TOOLS, "stream": True}
            status, _, text = await server.post(FOUND, asked)
            assert status == 200, text
            return text

    content, calls = "", dict[int, list[str]]()
    for _, data in events_of(asyncio.run(main())):
        for choice in data["choices"] if data != "[DONE]" else ():
            content += choice["delta"].get("content") or ""
            for entry in choice["delta"].get("tool_calls") or ():
                call = calls.setdefault(entry["index"], ["", ""])
                call[0] += entry["function"].get("name") or ""
                call[1] += entry["function"].get("arguments") or ""
    return content, [(name, json.loads(arguments)) for name, arguments in calls.values()]


def called(answer: Any) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in answer["choices"][0]["message"].get("tool_calls") or ()]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def content_of(answer: Any) -> str:
    return answer["choices"][0]["message"]["content"] or ""


@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("manner", MANNERS.values(), ids=MANNERS)
def test_calls_are_read_as_the_template_writes_them(manner: Manner, calls: list[tuple[str, Any]]) -> None:
    text = written(manner.template, calls)
    kind = kind_of(manner.template, manner.marks)
    status, answer, _ = posted(kind, marked(text, manner.marks))
    assert (status, called(answer)) == (200, calls), answer
    assert content_of(answer).strip() == ""


@pytest.mark.parametrize("manner", MANNERS.values(), ids=MANNERS)
def test_a_stream_of_calls_adds_up_to_them(manner: Manner) -> None:
    text = written(manner.template, CALLS["two calls"], "I look.")
    content, calls = streamed(kind_of(manner.template, manner.marks), marked(text, manner.marks))
    assert (content.strip(), calls) == ("I look.", CALLS["two calls"])


@pytest.mark.parametrize("manner", MANNERS.values(), ids=MANNERS)
def test_marks_that_are_plain_text_are_read_too(manner: Manner) -> None:
    _, answer, _ = posted(kind_of(manner.template), written(manner.template, [ONE]))
    assert called(answer) == [ONE]


@pytest.mark.parametrize("manner", MANNERS.values(), ids=MANNERS)
def test_a_text_without_calls_stays_one(manner: Manner) -> None:
    said = 'Use <b>, [1, 2] and {"name": "get_weather"} in your text.'
    _, answer, _ = posted(kind_of(manner.template, manner.marks), said)
    assert (content_of(answer), called(answer)) == (said, [])


@pytest.mark.slow
@pytest.mark.parametrize("manner", MANNERS.values(), ids=MANNERS)
def test_a_forced_call_is_constrained_to_what_the_template_writes(manner: Manner) -> None:
    text = written(manner.template, [ONE])
    kind = kind_of(manner.template, manner.marks)
    status, answer, grammar = posted(kind, marked(text, manner.marks), tool_choice="required")
    assert (status, called(answer)) == (200, [ONE]), answer
    assert grammar
    tokenizer = chat(kind).tokenizer
    grammars, begun = Grammars(tokenizer), text.lstrip("\n")
    spelled = [marked(one, manner.marks) for one in (text, begun)]
    assert any(is_allowed(grammars, tokenizer, grammar, one) for one in spelled)
    hermes = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    assert is_allowed(grammars, tokenizer, grammar, hermes) == (manner is MANNERS["objects in tags"])


@pytest.mark.parametrize("manner", MANNERS.values(), ids=MANNERS)
def test_a_complete_call_before_a_cut_survives(manner: Manner) -> None:
    if manner.calls.count("tojson + '}'") or "loop.last" in manner.calls:
        pytest.skip("a list that is cut isn't complete")
    both = written(manner.template, [ONE, ("run", {"code": "ls -l /tmp"})])
    text = both[: both.rindex("/tmp")]
    kind = kind_of(manner.template, manner.marks)
    length = len(list(marked(text, manner.marks)))
    _, answer, _ = posted(kind, marked(both, manner.marks), max_tokens=length)
    assert ONE in called(answer), answer


# --- templates whose way of writing calls nobody knows ---------------------------------------------------------------

UNKNOWN = {
    "no calls at all": HEAD + TAIL,
    "names alone": HEAD + EACH + "{{- '\\nI would use ' + f.name }}{% endfor %}" + TAIL,
    "arguments as a hash": HEAD + EACH + "{{- f.name + '#' + f.arguments | length | string }}{% endfor %}" + TAIL,
    "arguments reversed": HEAD + EACH + "{{- '>>' + (f.arguments | tojson)[::-1] + f.name }}{% endfor %}" + TAIL,
}


@pytest.mark.parametrize("template", UNKNOWN.values(), ids=UNKNOWN)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_tools_are_refused_where_calls_cant_be_read(template: str, choice: str) -> None:
    status, answer, _ = posted(kind_of(template), "hello", tool_choice=choice)
    assert status == 400, answer
    assert "tool" in json.dumps(answer)


@pytest.mark.parametrize("template", UNKNOWN.values(), ids=UNKNOWN)
def test_without_tools_such_templates_serve(template: str) -> None:
    status, answer, _ = posted(kind_of(template), "hello", tools=[])
    assert (status, content_of(answer)) == (200, "hello")


# --- JSON that merely looks like a call ------------------------------------------------------------------------------


def llama(says: str, **body: Any) -> Any:
    return posted("llama3.1", says, **body)[1]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ada", "age": 36}',
        '{"name": "Oslo", "population": 700000, "country": {"name": "Norway"}}',
        '{"name": "Rex"}',
        '{"name": "Ada", "params": {"a": 1}}',
        '{"name": "list", "items": [{"name": "get_weather"}]}',
        '{"age": 36, "name": "Ada"}',
    ],
)
def test_an_answer_in_json_is_no_call(text: str) -> None:
    answer = llama(text)
    assert (content_of(answer), called(answer)) == (text, [])


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "get_weather", "parameters": {"city": "Oslo"}}', [("get_weather", {"city": "Oslo"})]),
        ('{"name": "stop"}', [("stop", {})]),
        ('{"name": "stop", "parameters": {}}', [("stop", {})]),
    ],
)
def test_a_call_in_json_is_one(text: str, calls: Any) -> None:
    assert called(llama(text)) == calls


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "stop", "parameters": {}}; {"name": "stop", "parameters": {}}',
        '{"name": "stop", "parameters": {}}; {"name": "run", "parameters": {"code": "ls"}}',
        '{"name": "run", "parameters": {"code": "a"}};{"name": "run", "parameters": {"code": "b"}}; {"name": "stop"}',
        '{"name": "run", "parameters": {"code": ";"}} ;\n{"name": "stop", "parameters": {}}',
    ],
)
def test_no_more_calls_are_given_out_than_the_template_renders(text: str) -> None:
    one_call = (
        "{%- for message in messages %}{%- if message.tool_calls and message.tool_calls | length > 1 %}"
        "{{- raise_exception('one call at a time') }}{% endif %}"
    )
    template = recorded_agent.LLAMA31.replace("{%- for message in messages %}", one_call, 1)
    recorded_agent.KINDS["one call"] = ("llama3", template)

    async def main() -> None:
        async with served(lambda wanted: text, "one call", context_tokens=8000) as server:
            asked = {"model": "headway", "messages": [USER], "tools": TOOLS}
            status, _, answer = await server.post(FOUND, asked)
            assert (status, len(called(answer)) <= 1) == (200, True), answer
            message = answer["choices"][0]["message"]
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": "done"}
                for call in message.get("tool_calls") or ()
            ]
            again = {**asked, "messages": [USER, message, *(results or [USER])]}
            status, _, answer = await server.post(FOUND, again)
            assert status == 200, answer

    asyncio.run(main())


# --- arguments that are no object ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        '{"x": NaN}',
        '{"x": Infinity}',
        '{"x": -Infinity}',
        '{"x": 1e999}',
        '{"x": {"y": [1, -1e999]}}',
        '{"x": [NaN]}',
        "[1, 2]",
        "[]",
        "3",
        "true",
        "1.5",
        '"ls -l"',
        '"[1, 2]"',
        '"{\\"x\\": NaN}"',
        '"3"',
    ],
)
@pytest.mark.parametrize("format_", ["hermes", "llama"])
def test_arguments_that_are_no_object_make_no_call(arguments: str, format_: str) -> None:
    if format_ == "hermes":
        kind, text = "qwen2.5", f'<tool_call>\n{{"name": "run", "arguments": {arguments}}}\n</tool_call>'
    else:
        kind, text = "llama3.1", f'{{"name": "run", "parameters": {arguments}}}'
    _, answer, _ = posted(kind, text)
    assert (called(answer), content_of(answer)) == ([], text)


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("null", {}),
        ("{}", {}),
        ('{"code": null}', {"code": None}),
        ('"{\\"code\\": 1}"', {"code": 1}),
        ('{"x": 1e300}', {"x": 1e300}),
        ('{"x": "NaN"}', {"x": "NaN"}),
    ],
)
def test_arguments_that_are_an_object_make_a_call(arguments: str, meant: Any) -> None:
    _, answer, _ = posted("qwen2.5", f'<tool_call>\n{{"name": "run", "arguments": {arguments}}}\n</tool_call>')
    assert called(answer) == [("run", meant)]
