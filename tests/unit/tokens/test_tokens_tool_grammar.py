"""Grammars of whole answers: texts that they allow and don't, in every format of tool calls, behind reasoning."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest
from grammar_walk import allowed_text, is_allowed
from recorded_agent import chat_of
from scratch_folders import scratch_folder

from headway.records.conversations import RequestRefused
from headway.tokens.continuation import Chat
from headway.tokens.grammar import Grammars
from headway.tokens.output_parsing import OutputFormat, parse_output
from headway.tokens.tool_grammar import CallableTool, Constraint, RequestedSchema, answer_grammar

HERMES, LLAMA, NONE = OutputFormat(tools="hermes"), OutputFormat(tools="llama_json"), OutputFormat()
THINKING = OutputFormat(tools="hermes", reasoning=True)


def asked(schema: Any, *, strict: bool = True) -> RequestedSchema:
    return RequestedSchema(param="tools[0].parameters", schema=schema, strict=strict)


ADD = CallableTool(
    name="add",
    arguments=asked(
        {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/whole"}},
            "required": ["a"],
            "additionalProperties": False,
            "$defs": {"whole": {"type": "integer"}},
        }
    ),
)
# a name with what JSON and the grammar write as escapes, and a keyword that is only ignored
ODD = CallableTool(name='mül"\n', arguments=asked({"type": "object", "uniqueItems": True}, strict=False))
TEXT = asked({"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]})
STRICT = Constraint(tools=(ADD, ODD), calls_param="tools[0].strict", optional=True)
FORCED = Constraint(tools=(ADD, ODD), forced=True, calls_param="tool_choice")
EITHER = Constraint(text=TEXT, tools=(ADD, ODD))


def call(name: str, arguments: Any, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def tagged(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in calls)


ONE, WRONG, OTHER = call("add", {"a": 2}), call("add", {"a": "2"}), call('mül"\n', {"z": [1, 1]})
THOUGHT = "<think>\nso <tool_call> is\n</think>\n\n"


@cache
def chat() -> Chat:
    return chat_of("qwen3", scratch_folder("tool-grammar"))


@cache
def grammars() -> Grammars:
    return Grammars(chat().tokenizer)


def allows(grammar: str, text: str) -> bool:
    return is_allowed(grammars(), chat().tokenizer, grammar, text)


@pytest.mark.parametrize(
    ("wanted", "written", "opened", "yes", "no"),
    [
        (
            STRICT,
            HERMES,
            False,
            ["", "hi <tool", "<think>", tagged(ONE), "so\n" + tagged(ONE, OTHER)],
            [tagged(WRONG), "so <tool_call>", tagged(call("sub", {})), tagged(ONE) + "x", tagged(ONE)[:-3]],
        ),
        (
            STRICT,
            THINKING,
            False,
            ["hi", tagged(ONE), THOUGHT, f"{THOUGHT}hi", THOUGHT + tagged(OTHER, ONE)],
            [THOUGHT[:-12], THOUGHT + tagged(WRONG), "<think>hm" + tagged(ONE)],
        ),
        (STRICT, THINKING, True, ["hm</think>", "hm</think>so" + tagged(ONE)], ["hm", tagged(ONE)]),
        (FORCED, HERMES, False, [tagged(ONE), tagged(ONE, OTHER)], ["", "so " + tagged(ONE), tagged(WRONG), ONE]),
        (FORCED, THINKING, False, [tagged(ONE), THOUGHT + tagged(ONE)], [THOUGHT, "so" + tagged(ONE)]),
        (
            Constraint(tools=(ADD,), forced=True, single=True, calls_param="tool_choice"),
            HERMES,
            False,
            [tagged(ONE)],
            [tagged(ONE, ONE), tagged(OTHER)],
        ),
        (
            STRICT,
            LLAMA,
            False,
            ["", " so {", call("add", {"a": 2}, "parameters")],
            [call("add", {"a": "2"}, "parameters"), " {", ONE],
        ),
        (FORCED, LLAMA, False, [call("add", {"a": 2}, "parameters")], ["", "so", tagged(ONE)]),
        (EITHER, HERMES, False, ['{"b": true}', tagged(ONE, ONE)], ['{"b": 1}', '{"b": true} ', "hi", tagged(WRONG)]),
        (EITHER, THINKING, True, ['</think>{"b": true}', "hm</think>\n\n" + tagged(ONE)], ['{"b": true}']),
        (EITHER, NONE, False, ['{"b": false}'], [tagged(ONE)]),  # calls that no one could read, and no one asked for
    ],
)
def test_what_an_answer_may_be(
    wanted: Constraint, written: OutputFormat, opened: bool, yes: list[str], no: list[str]
) -> None:
    grammar = answer_grammar(wanted, written, opened=opened)
    assert [text for text in yes if not allows(grammar, text)] == []
    assert [text for text in no if allows(grammar, text)] == []


@pytest.mark.parametrize("written", [HERMES, THINKING, LLAMA])
def test_whatever_is_sampled_parses_as_calls_of_the_tools(written: OutputFormat) -> None:
    grammar, chance = answer_grammar(FORCED, written), random.Random(1)
    for _ in range(20):
        text = allowed_text(grammars(), chat().tokenizer, grammar, chance)
        message = parse_output(text, written, calls=True, opened=False)
        assert message.calls, text
        assert not message.content
        for made in message.calls:
            arguments = json.loads(made.arguments)
            assert made.name in (ADD.name, ODD.name)
            assert made.name != "add" or (list(arguments) == ["a"] and isinstance(arguments["a"], int)), text


@pytest.mark.parametrize(
    ("wanted", "written", "param", "says"),
    [
        (FORCED, NONE, "tool_choice", "endpoint.tools sets one.; valid: 'auto' and 'none'"),
        (STRICT, NONE, "tools[0].strict", "valid: false"),
        (EITHER, LLAMA, TEXT.param, "looks the same as an answer in JSON; valid: tool_choice = 'none'"),
    ],
)
def test_what_a_chat_template_has_no_form_for(wanted: Constraint, written: OutputFormat, param: str, says: str) -> None:
    with pytest.raises(RequestRefused, match=says) as raised:
        answer_grammar(wanted, written)
    assert raised.value.param == param
